"""Which reading of the released network explains the paper's rows: the runs that tell, and a table of them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal

from quasiglobal.common.files import markdown_table
from quasiglobal.errors import InputError
from quasiglobal.reproduction.paper.cells import PaperCell
from quasiglobal.reproduction.paper.comparison import PAPER_SEEDS
from quasiglobal.reproduction.paper.outcomes import outcomes
from quasiglobal.reproduction.paper.readings import READINGS, last_and_best, read_readings
from quasiglobal.reproduction.paper.tables import TABLES
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment, setting

Generator = Literal["own", "shared"]


def experiments(store: RunStore, seeds: int = 3, draws: Generator = "own") -> list[Experiment]:
    """The runs that compare the readings: the rows of ResNet-EvoNorm-20 on a ring of 16, at their tuned rates.

    With `draws = "shared"` all nodes draw from one generator, as in the released code.

    Training is that of `evonorm-released`, so the rates of its cells in the store hold; a cell without runs takes the
    rate of the same method's other cells.
    """
    found = [one for one in outcomes(TABLES["cifar10"], store) if _compares(one.cell)]
    rates: dict[str, float] = {}
    for one in found:
        if one.runs:
            rates.setdefault(one.cell.row.method, one.experiment.peak_lr)
    chosen = []
    for one in found:
        rate = one.experiment.peak_lr if one.runs else rates.get(one.cell.row.method, one.experiment.peak_lr)
        chosen += [replace(_running(one.cell, draws), lr=rate, seed=seed) for seed in range(seeds)]
    return chosen


def table(store: RunStore, averaged: bool = False, draws: Generator = "own") -> str:
    """Each cell beside the paper's in all readings, last and best, as Markdown; with `averaged`, of the averaged model.

    The last rows have, for each reading, the sum of the squared deviations in units of the noise, the standard error
    of the difference of two means over seeds: for each method, and for all of them.
    """
    suffix = "_averaged" if averaged else ""
    keys = [(name, which) for name in READINGS for which in WHICH]
    rows: list[list[str]] = []
    sums: dict[str, dict[tuple[str, str], float]] = {}
    for cell in filter(_compares, TABLES["cifar10"].cells):
        runs = [run for run in store.ended.get(setting(_running(cell, draws)), ()) if read_readings(run)]
        if not runs or cell.score is None:
            continue
        cells = []
        for name, which in keys:
            values = [100 * last_and_best(read_readings(run), name + suffix)[WHICH.index(which)] for run in runs]
            ours = Score.of(values)
            cells.append(f"{ours} ({len(values)})")
            for summed in (cell.row.method, "all"):
                of = sums.setdefault(summed, dict.fromkeys(keys, 0.0))
                of[name, which] += _deviation(ours, len(values), cell.score) ** 2
        rows.append([cell.row.method, cell.column.setting, str(cell.score), *cells])
    if not rows:
        raise InputError(f"{store.root} has no runs with readings; train those of `experiments` with ScoreReadings")
    everything = sums.pop("all")
    for method, of in [*sums.items(), ("all methods", everything)]:
        rows.append([f"squared deviations, {method}", "", "", *(f"{value:.1f}" for value in of.values())])
    return markdown_table(["method", "setting", "paper", *(f"{name}, {which}" for name, which in keys)], rows)


def table_of_more_tests(store: RunStore) -> str:
    """What a test in every epoch adds to the best, for the runs that have one: in all readings, as Markdown."""
    rows = []
    for run in (run for runs in store.ended.values() for run in runs):
        usual, all_tests = read_readings(run), read_readings(run, every_epoch=True)
        if not usual or len(all_tests) == len(usual):
            continue
        for name in READINGS:
            last, best = last_and_best(usual, name)
            more = last_and_best(all_tests, name)[1]
            numbers = [f"{100 * value:.2f}" for value in (last, best, more, more - best)]
            rows.append([run.folder.name, name, f"{len(usual)}, {len(all_tests)}", *numbers])
    header = ["run", "reading", "tests", "last", "best", "best of all epochs", "difference"]
    return markdown_table(header, rows) if rows else ""


WHICH = ("last", "best")


def _compares(cell: PaperCell) -> bool:
    return cell.row.model == "ResNet-EvoNorm-20" and cell.column.group == "ring 16"


def _running(cell: PaperCell, draws: Generator) -> Experiment:
    return replace(cell.experiment, norm=READINGS["running"], draws=draws)


def _deviation(ours: Score, seeds: int, papers: Score) -> float:
    """Difference of the means in units of its standard error; a single seed borrows the paper's deviation."""
    own, other = (ours.std if ours.std is not None else papers.std or 0.0), papers.std or 0.0
    return (ours.mean - papers.mean) / math.sqrt(own**2 / seeds + other**2 / PAPER_SEEDS)
