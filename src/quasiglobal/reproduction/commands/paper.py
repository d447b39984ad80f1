"""Commands about the paper: reproduce, report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import Around, Folder, Json, call, only_simulated, store_at
from quasiglobal.cli.terminal import console, log_as, preparing, print_json, say_utilisation, say_written, watcher
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.commands.paper_tables import beside_the_paper, runs_needed, targets
from quasiglobal.reproduction.paper.cells import Scale
from quasiglobal.reproduction.paper.figures import Reproduced, draw_from_store, make_figure, title_of, write_figure
from quasiglobal.reproduction.paper.reproduce import missing_data, run_missing
from quasiglobal.reproduction.paper.summary import left_out, summary
from quasiglobal.reproduction.paper.targets import TARGETS, Target
from quasiglobal.reproduction.report.formats import FORMATS, write_report
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunStore

THREE_SEEDS = Options(seeds=3)

VALUES = {"reproduce TARGET": tuple(TARGETS)}
"""Values of positional arguments, for `qg completion`."""


def reproduce(
    name: Annotated[Positional[str | None], arg(metavar="TARGET")] = None,
    listing: Annotated[bool, arg(name="list")] = False,
    scale: Scale = "paper",
    cells: Annotated[tuple[str, ...], arg(metavar="GLOB...")] = (),
    tune_short: bool = False,
    out: Folder = Path("out"),
    options: Around = THREE_SEEDS,
    json: Json = False,
) -> None:
    """Make a table or figure of the paper: run the missing experiments, and show our numbers beside the paper's.

    Learning rates are tuned on seed 0. Run the same command again to resume. Without a name, list all targets.

    Args:
        name: A table, such as cifar10, or a figure, such as figure-2d.
        listing: List the targets: their cells, the finished and the missing runs, and an estimate of the time.
        scale: paper: as in the paper; short: a tenth of the epochs; smoke: a quick test on digits, on a CPU.
        cells: Only the cells whose name matches one of these patterns, as in 'QG-*ring 16*0.1'.
            A pattern may also match the name of the cell's run with seed 0 at the paper's scale; write * for the hash.
        tune_short: Tune on runs of a tenth of the epochs, and mark the results.
            Such rates may be too small for the whole run. Without this option these cells are tuned again, over all
            epochs.
        out: The folder for a figure's PNG, SVG and CSV files.
    """
    only_simulated("reproduce", options)
    if name is not None and name not in TARGETS:
        raise unknown("target", name, TARGETS)
    if listing or name is None:
        if cells:
            raise InputError("--list shows whole targets; leave out --cells")
        targets([name] if name else list(TARGETS), scale, options, tune_short).show(json)
        return
    if json and options.log == "json":
        raise InputError("--json and --log json both write to standard output; leave one out")
    table = TARGETS[name].table
    if cells and (table is None or not table.cells):
        raise InputError(f"{name} has no cells to choose from; leave out --cells")
    if table is None:
        with console.status(f"making {name}"):
            made, written = make_figure(name, out)
        _say_made(TARGETS[name], TARGETS[name].heading, made, written, json)
        return
    log_as(options.log)
    if table.cells:
        began, measured = time.time(), options.utilisation or Path(f"{options.runs.resolve()}-utilisation.jsonl")
        options = replace(options, utilisation=measured)
        with watcher(options.log, runs_needed(table, scale, cells, tune_short, options)) as watch:
            found = run_missing(table, scale, options.seeds, cells, options, watch, tune_short)
        if not json:
            say_utilisation(measured, began)
        lacking = [one.cell for one in found if len(one.runs) < options.seeds]
        for sentence in missing_data(lacking, scale, options.data_dir).values():
            console.print(f"data missing: {sentence}", soft_wrap=True)
        if not TARGETS[name].drawn:
            beside_the_paper(TARGETS[name], table, found, scale).show(json)
            for note in table.notes:
                console.print(f"note: {note}")
            return
    with preparing():
        made = draw_from_store(name, RunStore.read(options.runs), scale, options.data_dir)
    heading = TARGETS[name].numbered(title_of(name, scale))
    _say_made(TARGETS[name], heading, made, write_figure(made, name, out), json)


def _say_made(target: Target, heading: str, made: Reproduced, written: Sequence[Path], json: bool) -> None:
    """Print what a figure shows, and its files."""
    if json:
        print_json({
            "target": target.name, "number": target.number or None, "title": heading, "text": made.says,
            "files": list(map(str, written)), "rows": made.rows,
        })
    else:
        console.print(f"{heading}. {made.says}")
    say_written(written)


def report(
    out: Folder = Path("out/report"),
    runs: Folder = Path("runs"),
    scale: Scale = "paper",
    format: Literal["all", "html", "markdown", "latex", "svg"] = "all",
) -> None:
    """Compare the paper's tables and claims with the results of your runs: an HTML page, Markdown, LaTeX and SVG.

    Args:
        out: The folder for index.html, tables.md, tables.tex and grid.svg, a picture of all cells by agreement.
        runs: The folder of all runs.
        scale: Compare the runs of this scale of `qg reproduce`.
        format: Write only this format.
    """
    store = store_at(runs, "qg reproduce")
    say_written(write_report(summary(store, scale), out, FORMATS if format == "all" else [format]))
    for sentence in left_out(store, scale):
        console.print(f"not shown: {sentence}", soft_wrap=True)


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    call({"reproduce": reproduce, "report": report}, name, words)
