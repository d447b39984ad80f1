"""Train all seeds of an experiment in this process without files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from quasiglobal.runs.grouping import Waiting, queues
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.store import RunFolder, folders_of
from quasiglobal.training.callbacks import Interrupts, patient_interrupts
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import Record
from quasiglobal.training.program import Program
from quasiglobal.training.rows import NamedRows, models_of
from quasiglobal.training.task import Task


def train(
    task: Task, experiment: Experiment, options: Options, callbacks: Sequence[Any] = ()
) -> list[tuple[Experiment, list[Record], NamedRows, str]]:
    """Train all seeds of an experiment without files; return the records, the models and the status of each."""
    device = choose_device(options.device)
    found: dict[Experiment, tuple[list[Record], NamedRows, str]] = {}
    folders = folders_of(experiment, options)

    def train_group(waiting: Waiting, group: list[RunFolder], entered: list[RunFolder]) -> None:
        if noted:
            return
        diverged = KeepDiverged()
        program = Program(task, [run.experiment for run in group], device, **options.of_program)
        loop = Loop(program, [*callbacks, diverged, Interrupts(noted)])
        loop.run()
        for k, run in enumerate(group):
            rows = diverged.models[k] if k in diverged.models else models_of(loop.rows_of(k))
            found[run.experiment] = loop.runs[k], rows, loop.ends.get(k, "unfinished")
        if loop.interrupted and not loop.ended:
            warnings.warn(f"stopped by Ctrl-C after epoch {loop.epoch} of {experiment.epochs}", stacklevel=6)

    with patient_interrupts() as noted:
        for waiting in queues(dict.fromkeys(folders), lambda one: task, device, **options.of_program):
            waiting.train(train_group, dict.fromkeys)
    return [(run.experiment, *found[run.experiment]) for run in folders if run.experiment in found]


class KeepDiverged(Callback):
    """Keeps the models of runs that diverged, which leave their program."""

    def __init__(self) -> None:
        self.models: dict[int, NamedRows] = {}

    def on_epoch(self, loop: Loop) -> None:
        for k in loop.diverged:
            self.models[k] = models_of(loop.rows_of(k))
