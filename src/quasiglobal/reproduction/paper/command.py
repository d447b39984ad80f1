"""Commands about the paper: reproduce, report."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import Around, Folder, Json, call, only_simulated, store_at
from quasiglobal.cli.terminal import (
    WIDE,
    Listing,
    Values,
    console,
    log_as,
    preparing,
    print_json,
    say_utilisation,
    say_written,
    time_in_words,
    watcher,
)
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.paper.figures import Reproduced, draw_from_store, make_figure, title_of, write_figure
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.reproduce import (
    TARGETS,
    Speeds,
    Target,
    absent,
    complete,
    cost,
    missing_data,
    recorded,
    select,
    stand,
)
from quasiglobal.reproduction.paper.summary import left_out, summary
from quasiglobal.reproduction.paper.tables import PaperTable, Scale
from quasiglobal.reproduction.report.formats import FORMATS, write_report
from quasiglobal.runs.comparison import NOT_CONVERGED, Score
from quasiglobal.runs.options import Options, choose_device
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
        _targets([name] if name else list(TARGETS), scale, options, tune_short).show(json)
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
    store = RunStore.read(options.runs)
    if table.cells:
        began, measured = time.time(), options.utilisation or Path(f"{options.runs.resolve()}-utilisation.jsonl")
        options = replace(options, utilisation=measured)
        with watcher(options.log, _runs_needed(table, store, scale, cells, tune_short, options)) as watch:
            found, store = complete(table, store, scale, options.seeds, cells, options, watch, tune_short)
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
        made = draw_from_store(name, store, scale, options.data_dir)
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


# ------------------------------------------------------------------------------------------------ tables


def _targets(names: Sequence[str], scale: Scale, options: Options, tune_short: bool) -> Listing:
    """Every target with its cells, the finished and missing runs, and the estimated time of the missing runs."""
    fresh = options.runs == Options().runs and not options.runs.exists()        # nothing was run yet
    store = RunStore(options.runs, ()) if fresh else store_at(options.runs, "qg reproduce")
    device = choose_device(options.device)
    speeds = recorded(store, device)
    rows = []
    for name in names:
        with console.status(f"estimating {name}"):
            rows.append(_target_values(TARGETS[name], store, scale, options, tune_short, speeds))
    return Listing(
        rows,
        {"target": lambda row: f"{row['target']}  {TARGETS[row['target']].heading}"},
        group=lambda row: TARGETS[row["target"]].kind,
        brief=_target_in_words,
        caption=f"At {scale} scale with {options.seeds} seeds. Learning-rate grids may grow beyond the runs counted "
        f"here; times are estimated from stored runs of the same model on {device.type}, else from a few plain steps.",
    )


def _target_values(
    target: Target, store: RunStore, scale: Scale, options: Options, tune_short: bool, speeds: Speeds
) -> Values:
    """A target's progress as raw values; the counts are null if it needs no training."""
    values: Values = {"target": target.name, "number": target.number or None, "title": target.title}
    if target.table is None or not target.table.cells:
        lost = absent(target.data if scale != "smoke" else (), options.data_dir)
        counts = dict.fromkeys(("cells", "tried", "done", "runs_left", "seconds"))
        return values | counts | {"seconds_cover_all": True, "data_missing": lost}
    at = stand(target.table, store, scale, options.seeds, options.data_dir, tune_short)
    seconds, everything = cost(at.to_run, choose_device(options.device), speeds)
    return values | {
        "cells": at.cells, "tried": at.tried, "done": at.done, "runs_left": len(at.to_run), "seconds": seconds,
        "seconds_cover_all": everything, "data_missing": list(at.missing),
    }


def _target_in_words(row: Values) -> str:
    text = "takes seconds"
    if row["cells"] is not None:
        text = f"{row['done']} of {row['cells']} cells done, {row['tried']} tried; {row['runs_left']} runs left"
        if row["seconds"]:
            text += f", {'about' if row['seconds_cover_all'] else 'over'} {time_in_words(row['seconds'])}"
        elif row["runs_left"]:
            text += ", time unknown"
    return text + (f"; data missing: {', '.join(row['data_missing'])}" if row["data_missing"] else "")


def _runs_needed(
    table: PaperTable, store: RunStore, scale: Scale, cells: Sequence[str], tune_short: bool, options: Options
) -> int:
    """Number of runs that a target still needs, without those whose data is missing; a grid may need more."""
    part = replace(table, cells=tuple(select(table, cells)))
    at = stand(part, store, scale, options.seeds, options.data_dir, tune_short)
    return sum(one.data not in at.missing for one in at.to_run)


def beside_the_paper(target: Target, table: PaperTable, found: Sequence[Outcome], scale: Scale) -> Listing:
    """One row per cell: the paper's number, ours, and how the learning rate was found."""
    texts = {one.cell.name: _outcome_texts(one, scale) for one in found}

    def text(name: str) -> Callable[[Values], str]:
        return lambda row: texts[row["cell"]][name]

    further = ("averaged",) if console.width >= WIDE else ()
    shown = {name: text(name) for name in ("paper", "ours (seeds)", "best", "ours −\npaper", "lr", *further)}
    if console.width < ROOMY:
        shown["best"] = lambda row: texts[row["cell"]]["best"].partition(" ± ")[0]
    return Listing(
        [_outcome_values(one, scale) for one in found],
        {"method": "method", **shown},
        title=target.numbered(table.title_at(scale)),
        group=lambda row: ", ".join(filter(None, (row["model"], row["column"]))),
        folds={"method": 13, "lr": 9},
        brief=lambda row: ", ".join(
            f"{BRIEF[name]} {said}" for name, said in texts[row["cell"]].items() if name in BRIEF and said != "-"
        ),
    )


ROOMY = 100
"""Width of a terminal with room for the standard deviation of the best epoch."""

BRIEF = {"paper": "paper", "ours (seeds)": "ours", "best": "best", "lr": "lr"}
"""Columns on a narrow terminal, and their names there."""


def _outcome_texts(one: Outcome, scale: Scale) -> dict[str, str]:
    nothing = NOT_CONVERGED if one.diverged else "-"
    last, best, averaged = (str(score or nothing) for score in (one.ours(), one.ours("best"), one.ours("averaged")))
    difference = one.difference if scale != "smoke" else None
    return {
        "paper": str(one.cell.score or NOT_CONVERGED),
        "ours (seeds)": f"{last} ({len(one.runs)})" if one.runs else last,
        "ours −\npaper": "-" if difference is None else f"{difference:+.2f}",
        "lr": f"{one.experiment.peak_lr:g}, {one.how}" if one.runs else one.how,
        "best": best,
        "averaged": averaged,
    }


def _outcome_values(one: Outcome, scale: Scale) -> Values:
    """A cell beside the paper as raw values; scores are in per cent, as in the paper."""
    def percent(name: str, score: Score | None) -> dict[str, float | None]:
        mean, std = (score.mean, score.std) if score else (None, None)
        return {f"{name}_percent": mean, f"{name}_std_percent": std}

    return {
        "cell": one.cell.name, "model": one.cell.row.model, "method": one.cell.row.method,
        "column": str(one.cell.column), **percent("paper", one.cell.score), **percent("ours", one.ours()),
        "difference_percent": one.difference if scale != "smoke" else None, "seeds": len(one.runs),
        "diverged": one.diverged, "lr": one.experiment.peak_lr if one.runs else None, "lr_found": one.how,
        **percent("best_epoch", one.ours("best")), **percent("averaged", one.ours("averaged")),
    }
