"""Three readings of the released ResNet-EvoNorm: the same weights tested with other statistics of its batch norms.

Training is the same for all three. The release tests by the statistics of each batch; its first version, two days
older, tests 5 of the 11 batch normalisations by running statistics. It is unknown which of them made the paper's
tables: `ScoreReadings` tests runs in all readings, and `benchmarks/readings.py` compares them with the paper's rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fnmatch import fnmatch
from statistics import fmean
from typing import cast

import torch

from quasiglobal.common.files import append_line, read_lines, write_lines
from quasiglobal.errors import InputError
from quasiglobal.runs.building import make_task
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.stacked.layout import Layout
from quasiglobal.training import metrics
from quasiglobal.training.evaluation import Evaluation
from quasiglobal.training.experiment import Experiment, setting
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import AVERAGED, SCORE, Record
from quasiglobal.training.program import Networks, Program

READINGS = {"batch": "evonorm-released", "hybrid": "evonorm-first-release", "running": "evonorm-running"}
"""The norm of each reading, which selects the statistics of its tests."""

TRAINED = "running"
"""The reading that keeps the running statistics of all batch norms, which the others use in part."""

Reading = dict[str, float]
"""A test: the epoch, and the accuracy of every reading and of its averaged model."""

FILE = "readings.jsonl"
"""The file in a run folder: a line per test, with the accuracy of every reading."""


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
        chosen = [
            k for k, record in loop.latest.items()
            if SCORE in record or any(fnmatch(loop.experiments[k].name, pattern) for pattern in self.every_epoch)
        ]
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


# ------------------------------------------------------------------------------------------------ look-up


def ended_runs(store: RunStore, experiment: Experiment) -> list[Run]:
    """The ended runs of an experiment's setting, and runs with the same training that were also tested with its norm.

    If both exist for a seed and a rate, the setting's own run counts.
    """
    own = store.ended.get(setting(experiment), [])
    reading = next((name for name, norm in READINGS.items() if norm == experiment.norm and name != TRAINED), None)
    if reading is None:
        return own
    trained = store.ended.get(setting(replace(experiment, norm=READINGS[TRAINED])), ())
    known = {(run.experiment.seed, run.experiment.peak_lr) for run in own}
    missing = [run for run in trained if (run.experiment.seed, run.experiment.peak_lr) not in known]
    return [*own, *(_read_as(run, reading) for run in missing if (run.folder / FILE).exists())]


def _read_as(run: Run, reading: str) -> Run:
    """Replace the tests in a run's records and summary by those of a reading."""
    tests = {line["epoch"]: line for line in read_readings(run)}
    records: list[Record] = []
    for record in run.records():
        plain = {key: value for key, value in record.items() if not key.startswith(SCORE)}
        line = tests.get(record["epoch"])
        scores = {SCORE: line[reading], AVERAGED: line[f"{reading}_averaged"]} if line else {}
        records.append(cast(Record, plain | scores))
    one = replace(run.experiment, norm=READINGS[reading])
    last, best = metrics.last_and_best(records, one.metric)
    ended = run.summary and replace(run.summary, last=last, best=best)
    return replace(run, experiment=one, summary=ended, _records=[records])


def read_readings(run: Run, every_epoch: bool = False) -> list[Reading]:
    """The tests of a run in all readings: those that its experiment schedules, or all recorded ones."""
    one, lines = run.experiment, read_lines(run.folder / FILE)
    return [line for line in lines if every_epoch or line["epoch"] % one.eval_every == 0 or line["epoch"] == one.epochs]


def last_and_best(lines: Sequence[Reading], reading: str) -> tuple[float, float]:
    """The accuracy of a reading in the last test, and in its best one.

    >>> last_and_best([{"epoch": 1, "batch": 0.5}, {"epoch": 2, "batch": 0.4}], "batch")
    (0.4, 0.5)
    """
    values = [line[reading] for line in lines]
    return values[-1], max(values)
