"""The command leaderboard: compare all methods under one protocol, and add your own."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import Folder, Json, call
from quasiglobal.cli.terminal import Listing, Values, print_json, progress_bar, say, say_written, time_in_words
from quasiglobal.reproduction.leaderboard.contenders import Contender, newcomer, select, source
from quasiglobal.reproduction.leaderboard.contest import contest
from quasiglobal.reproduction.leaderboard.protocol import Tier, tier_named
from quasiglobal.reproduction.leaderboard.standings import (
    check_records,
    file_name,
    read_standing,
    read_standings,
    write_standing,
)
from quasiglobal.reproduction.leaderboard.summary import (
    blocks,
    document_with_blocks,
    leaderboard_document,
    ranked,
    refresh,
    score_cell,
)
from quasiglobal.reproduction.report.formats import write_report
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunFolder, RunStore
from quasiglobal.training.metrics import Record


@dataclass(frozen=True)
class Places:
    """Folders, and how to run."""

    records: Folder = Path("docs/results/leaderboard")
    """Folder of the records, one small JSON file per method and tier."""
    out: Folder = Path("out/leaderboard")
    """Folder for the page (index.html) and the tables in Markdown (tables.md)."""
    update: Annotated[tuple[Path, ...], arg(metavar="FILE...")] = ()
    """Documents to update: blocks `<!-- leaderboard: NAME -->` … `<!-- end -->` are made again from the records."""
    runs: Folder = Path("runs/leaderboard")
    """Folder for the runs; the same command resumes them. Their models are deleted once the record is written."""
    data_dir: Path | None = None
    """Folder of the data sets; by default $QG_DATA or ./data."""
    device: str = "auto"
    """Device: auto, cpu or cuda. On a GPU the trials of all methods train together."""
    workers: int = 0
    """Processes on a CPU, of one thread each; 0 means one per core."""


DEFAULT = Places()
At = Annotated[Places, arg(name="")]
Globs = Annotated[tuple[str, ...], arg(metavar="GLOB...")]


def leaderboard(
    tier: Annotated[Positional[str], arg(metavar="TIER")] = "digits",
    methods: Globs = (),
    conditions: Globs = (),
    seeds: Annotated[tuple[int, ...], arg(metavar="SEED...")] = (),
    show: bool = False,
    again: bool = False,
    at: At = DEFAULT,
    json: Json = False,
) -> None:
    """Compare all methods under one protocol: run the methods without a record, then print and write the tables.

    Every method has the same budget: learning rates on a grid of factors 2, which grows until the best lies inside,
    chosen on a validation split with seed 0; then seeds 1 to 3 on the same partitions. Run the same command again to
    resume. `qg leaderboard add my_package:Mine` adds your own class.

    Args:
        tier: digits (minutes on a CPU), cifar (ResNet-20, for a GPU), or relay (VGG-11 at published rates, for a GPU).
        methods: Run and print only the methods whose name matches one of these patterns, as in 'qg-*' 'edm'.
        conditions: Only the conditions of the tier whose name matches one of these patterns, as in 'sorted' '*0.01'.
        seeds: Only these seeds, as in 1 2. Other seeds in the record stay if the rate is unchanged. By default 1 2 3.
        show: Run nothing; print and write the tables of the existing records.
        again: Train methods again that have a record.
    """
    chosen = tier_named(tier, conditions, seeds)
    if show:
        check_records(chosen, at.records, methods)
    wanted = [] if show else select(chosen, methods)
    if again:
        _forget(wanted, chosen, at)
    else:
        wanted = [one for one in wanted if not _has_record(one, chosen, at)]
    _run_and_show(wanted, chosen, at, json, methods)


def add(
    algorithm: Annotated[Positional[str], arg(metavar="PACKAGE.MODULE:NAME")],
    tier: str = "digits",
    name: str = "",
    topology: str = "",
    lr: float = 0.0,
    at: At = DEFAULT,
    json: Json = False,
) -> None:
    """Run your own algorithm under the protocol of a tier, and add its row to the leaderboard.

    Args:
        algorithm: Your class, my_package:Mine, with options after a second colon; or a built-in one with options.
        tier: digits, cifar or relay.
        name: Name of the row; by default the text of the algorithm.
        topology: Its graph of 16 nodes; by default ring:16, or chain:16 if it needs a tree.
        lr: Middle of the first grid of learning rates; by default 0.1. The grid grows until the best rate is inside.
    """
    chosen = tier_named(tier)
    _run_and_show([newcomer(algorithm, chosen, name, topology, lr, at.records)], chosen, at, json)


def _has_record(one: Contender, tier: Tier, at: Places) -> bool:
    """Whether there is a complete record of this method as it is now, under all conditions."""
    found = read_standing(at.records / tier.name / file_name(one.name))
    if found is None or found.settings != one.settings:
        return False
    placings = [found.conditions.get(condition.name) for condition in tier.conditions]
    return all(placing and placing.complete(tier.seeds) for placing in placings)


def _forget(wanted: Sequence[Contender], tier: Tier, at: Places) -> None:
    """Delete the runs of methods' records, so that they are repeated; runs after the record are resumed."""
    records = {one.settings: at.records / tier.name / file_name(one.name) for one in wanted}
    written = {settings: record.stat().st_mtime for settings, record in records.items() if record.exists()}
    for run in RunStore.read(at.runs / tier.name).runs:
        one, summary = run.experiment, run.folder / "summary.json"
        settings = one.algorithm, one.topology, one.communication, one.wire
        if settings in written and summary.exists() and summary.stat().st_mtime <= written[settings]:
            shutil.rmtree(run.folder)


def _run_and_show(
    wanted: Sequence[Contender], tier: Tier, at: Places, json: bool, methods: Sequence[str] = ()
) -> None:
    for path in at.update:
        document_with_blocks(path)                          # raises before the run
    try:
        if wanted:
            _run(wanted, tier, at)
    finally:                                    # also the records of a command that is stopped
        _show(tier, at, json, methods)


def _run(wanted: Sequence[Contender], tier: Tier, at: Places) -> None:
    """Run methods, and write the record of each."""
    changes = "-".join(filter(None, dict.fromkeys(source(one.algorithm) for one in wanted)))
    options = Options(runs=at.runs / tier.name / changes, data_dir=at.data_dir, device=at.device)
    began = time.monotonic()
    with progress_bar() as progress:
        bar = progress.add_task(tier.name, total=len(wanted))

        def watch(runs: Sequence[RunFolder], records: list[Record]) -> None:
            names = {run.experiment.algorithm for run in runs}
            what = names.pop() if len(names) == 1 else f"{len(names)} methods"
            epoch = f"epoch {records[0]['epoch']} of {runs[0].experiment.epochs}"
            progress.update(bar, description=f"{what}, {len(runs)} runs, {epoch}")

        for k, standing in enumerate(contest(wanted, tier, options, at.workers or os.cpu_count() or 1, watch), start=1):
            write_standing(standing, at.records)
            progress.update(bar, completed=k, description=standing.name)
            since = time_in_words(time.monotonic() - began)
            scores = (f"{one.name} {score_cell(standing.conditions[one.name]).text}" for one in tier.conditions)
            say(f"{k} of {len(wanted)} after {since}: {standing.name}: {'; '.join(scores)}")


def _show(tier: Tier, at: Places, json: bool, methods: Sequence[str]) -> None:
    """Print a tier's table of some methods, or of all; write the page, the tables and the blocks of other documents."""
    standings = read_standings(at.records)
    rows = ranked(standings.get(tier.name, []), tier.conditions[0].name)
    rows = [one for one in rows if not methods or any(fnmatch(one.name, pattern) for pattern in methods)]
    if json:
        print_json([asdict(one) for one in rows])
    else:
        columns = {one.name: _text(one.name) for one in tier.conditions}
        Listing(
            [{"method": one.name, "graph": one.graph, "conditions": one.conditions} for one in rows],
            {"method": "method", "graph": "graph", **columns},
            title=tier.title, caption="Mean of nodes, %; the page has all numbers.",
            folds={"graph": 10} | dict.fromkeys(columns, 7),
        ).show()
    say_written(write_report(leaderboard_document(standings), at.out, ["html", "markdown"]))
    made = blocks(standings)
    for path in at.update:
        for name in sorted(refresh(path, made)):
            say(f"{path} keeps its block {name!r}: {at.records} has no records for it")
    if at.update:
        say_written(at.update)


def _text(condition: str) -> Callable[[Values], str]:
    return lambda row: score_cell(row["conditions"].get(condition)).text


def run(name: str, words: Sequence[str]) -> None:
    """Run this command, or its second word `add`."""
    if words[:1] == ["add"]:
        call({"leaderboard add": add}, "leaderboard add", words[1:])
    else:
        call({"leaderboard": leaderboard}, name, words)
