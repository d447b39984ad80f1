"""Three readings of the released ResNet-EvoNorm: the same weights tested with other statistics of its batch norms.

Training is the same for all three. The release tests by the statistics of each batch; its first version, two days
older, tests 5 of the 11 batch normalisations by running statistics. Which of them made the paper's tables is not known:
`ScoreReadings` tests runs in all readings, and `table` says which one explains the paper's rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from statistics import fmean
from typing import Literal

import torch

from quasiglobal.common.files import append_line, markdown_table, read_lines, write_lines
from quasiglobal.errors import InputError
from quasiglobal.reproduction.paper.outcomes import (
    FILE,
    PAPER_SEEDS,
    READINGS,
    TRAINED,
    Reading,
    outcomes,
    read_readings,
)
from quasiglobal.reproduction.paper.tables import TABLES, PaperCell
from quasiglobal.runs.building import make_task
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.store import RunStore
from quasiglobal.stacked.layout import Layout
from quasiglobal.training.evaluation import Evaluation
from quasiglobal.training.experiment import Experiment, setting
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import SCORE
from quasiglobal.training.program import Networks, Program

Generator = Literal["own", "shared"]


class ScoreReadings(Callback):
    """Tests the models of runs with `norm = "evonorm-running"` in all three readings, and writes readings.jsonl.

    Such a run keeps the running statistics of all batch normalisations, which the other readings use in part.
    Runs whose name matches a pattern of `every_epoch` are tested in every epoch, others every `eval_every` epochs.
    These tests change neither the training nor the experiment.
    """

    def __init__(self, every_epoch: Sequence[str] = ()) -> None:
        self.every_epoch = every_epoch
        self.tests: dict[str, Evaluation] = {}

    def on_start(self, loop: Loop) -> None:
        """Prepare the tests; on a resume, forget the lines after the checkpoint."""
        program = loop.program
        if program.experiment.norm != READINGS[TRAINED]:
            raise InputError(f"the readings need norm = {READINGS['running']!r}, got {program.experiment.norm!r}")
        if not loop.folders:
            raise InputError("the readings are written into run folders; train with runs=FOLDER")
        self.tests = {name: _evaluation(program, norm) for name, norm in READINGS.items()}
        for k, folder in enumerate(loop.folders):
            lines = [line for line in read_lines(folder / FILE) if line["epoch"] <= loop.epochs_of(k)]
            write_lines(folder / FILE, lines)

    def on_epoch(self, loop: Loop) -> None:
        """Add a line for each run that is tested in this epoch."""
        chosen = [k for k, record in loop.latest.items() if SCORE in record or self._often(loop.experiments[k])]
        if not chosen:
            return
        places = [loop.place(k) for k in chosen]
        found = {
            name: _accuracies(loop.program, test, places) for name, test in self.tests.items()
            if name != TRAINED or any(SCORE not in loop.latest[k] for k in chosen)
        }
        for place, k in enumerate(chosen):
            own = loop.latest[k]
            line: Reading = {"epoch": own["epoch"]}
            if SCORE in own:                                # the run's own test
                line |= {"running": own["accuracy"], "running_averaged": own["accuracy_averaged"]}
            for name, accuracies in found.items():
                line |= {name: accuracies[place][0], f"{name}_averaged": accuracies[place][1]}
            append_line(loop.folders[k] / FILE, line)

    def _often(self, experiment: Experiment) -> bool:
        return any(fnmatch(experiment.name, pattern) for pattern in self.every_epoch)


def last_and_best(lines: Sequence[Reading], reading: str) -> tuple[float, float]:
    """The accuracy of a reading in the last test, and in its best one.

    >>> last_and_best([{"epoch": 1, "batch": 0.5}, {"epoch": 2, "batch": 0.4}], "batch")
    (0.4, 0.5)
    """
    values = [line[reading] for line in lines]
    return values[-1], max(values)


def _evaluation(program: Program, norm: str) -> Evaluation:
    """The test of a program's models with another norm; its parameters are the same."""
    one = replace(program.experiment, norm=norm)
    task = make_task(one, program.task.data)
    networks = Networks(task, [one], program.device)
    return Evaluation(task, networks.stack(recomputing=False, long=False), program.device, networks.dtype)


def _accuracies(program: Program, test: Evaluation, runs: Sequence[int]) -> list[tuple[float, float]]:
    """For each of the runs the mean accuracy of its nodes, and that of their average."""
    x, buffers = program.models(runs)
    with torch.no_grad():
        tally = test(x, {name: buffers[name] for name in Layout.buffers(test.model.module)}, [-1] * len(x))
    nodes = len(program.engine.nodes)
    return [
        (
            fmean(tally.of_model(row)[SCORE] for row in range(r * nodes, (r + 1) * nodes)),
            tally.of_model(len(runs) * nodes + r)[SCORE],
        )
        for r in range(len(runs))
    ]


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
        chosen += [replace(_experiment(one.cell, draws), lr=rate, seed=seed) for seed in range(seeds)]
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
        runs = [run for run in store.ended.get(setting(_experiment(cell, draws)), ()) if read_readings(run)]
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


def _experiment(cell: PaperCell, draws: Generator) -> Experiment:
    return replace(cell.experiment, norm=READINGS[TRAINED], draws=draws)


def _deviation(ours: Score, seeds: int, papers: Score) -> float:
    """Difference of the means in units of its standard error; a single seed borrows the paper's deviation."""
    own, other = (ours.std if ours.std is not None else papers.std or 0.0), papers.std or 0.0
    return (ours.mean - papers.mean) / math.sqrt(own**2 / seeds + other**2 / PAPER_SEEDS)
