"""Tables that `qg reproduce` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from quasiglobal.cli.arguments import store_at
from quasiglobal.cli.listing import Listing, Values
from quasiglobal.cli.terminal import WIDE, console, time_in_words
from quasiglobal.reproduction.paper.cells import PaperTable, Scale
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.reproduce import absent, select
from quasiglobal.reproduction.paper.targets import TARGETS, Speeds, Target, cost, recorded, stand
from quasiglobal.runs.comparison import NOT_CONVERGED, Score
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import RunStore


def targets(names: Sequence[str], scale: Scale, options: Options, tune_short: bool) -> Listing:
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
) -> dict[str, Any]:
    """A target's progress as raw values; the counts are null if it needs no training."""
    values: dict[str, Any] = {"target": target.name, "number": target.number or None, "title": target.title}
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


def runs_needed(
    table: PaperTable, scale: Scale, cells: Sequence[str], tune_short: bool, options: Options
) -> int:
    """Number of runs that a target still needs, without those whose data is missing; a grid may need more."""
    part = replace(table, cells=tuple(select(table, cells)))
    at = stand(part, RunStore.read(options.runs), scale, options.seeds, options.data_dir, tune_short)
    return sum(one.data not in at.missing for one in at.to_run)


def beside_the_paper(target: Target, table: PaperTable, found: Sequence[Outcome], scale: Scale) -> Listing:
    """One row per cell: the paper's number, ours, and how the learning rate was found."""
    texts = {one.cell.name: _outcome_texts(one, scale) for one in found}

    def text(name: str) -> Any:
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


def _outcome_values(one: Outcome, scale: Scale) -> dict[str, Any]:
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
