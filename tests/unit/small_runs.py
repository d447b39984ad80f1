"""Short trainings on the digits, and helpers for the tests of training."""

from collections import defaultdict

import torch

from quasiglobal.data.sources import load
from quasiglobal.runs import checkpoints
from quasiglobal.runs.building import make_task
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Call, Loop
from quasiglobal.training.program import Program

CPU = torch.device("cpu")
SHORT = Experiment(model="mlp", topology="ring:4", epochs=3, lr=0.05, alpha=1.0, batch=64)
TIMING = "images_per_second"


def seeded(experiment, seeds):
    return [experiment.with_seed(seed) for seed in seeds]


def run_all(experiment, seeds=(0,), task=None, device=CPU):
    """Train one program; return it with the records of every epoch by run."""
    program = Program(task or make_task(experiment, load("digits")), seeded(experiment, seeds), device)
    records = []
    Loop(program, [Call(lambda loop: records.append(loop.latest))]).run()
    return program, records


def settled(tmp_path, **options):
    return Options(runs=tmp_path, device="cpu", **{"checkpoint_seconds": 0.0} | options)


class Stop(Exception):
    pass


def stop_at(epoch, error=Stop):
    """Return a watcher that raises `error` at an epoch."""
    def stop(runs, records):
        if records[0]["epoch"] == epoch:
            raise error

    return stop


def final(run):
    """The checkpoint rows of a finished run."""
    found = checkpoints.newest(run.folder / "checkpoint")
    assert found.epochs == run.experiment.epochs
    return found.rows


def assert_same_run(a, b):
    ours, theirs = final(a), final(b)
    assert set(ours) == set(theirs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    assert without_timing(a) == without_timing(b)


def without_timing(run):
    return [{name: value for name, value in record.items() if name != TIMING} for record in run.records()]


def by_algorithm(runs):
    groups = defaultdict(list)
    for run in runs:
        groups[run.experiment.algorithm].append(run)
    return dict(groups)


def only_runs_together(monkeypatch, most, epoch=0):
    """Let the steps of programs with more runs find no memory, from this epoch on; return the programs' sizes."""
    advance, seen = Program.advance, []

    def own(self, step):
        if step == 0:
            seen.append(len(self.experiments))
        if len(self.experiments) > most and max(self.state.epochs) >= epoch and step == 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3.99 GiB.")
        advance(self, step)

    monkeypatch.setattr(Program, "advance", own)
    return seen
