"""Train a task of your own in memory: `qg.train`."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from quasiglobal.errors import InputError
from quasiglobal.runs.options import choose_device
from quasiglobal.training.callbacks import Call, Interrupts, patient_interrupts
from quasiglobal.training.experiment import from_mapping
from quasiglobal.training.loop import Loop
from quasiglobal.training.metrics import Record
from quasiglobal.training.program import Program
from quasiglobal.training.rows import state_dict_of
from quasiglobal.training.task import Task


@dataclass(frozen=True)
class TrainedInMemory:
    """Result of `qg.train`: the record of every epoch, and the models."""

    program: Program
    records: list[Record]

    def model(self, node: int | None = None) -> nn.Module:
        """A copy of the module with the parameters and buffers of a node, or with the average over all nodes."""
        module = copy.deepcopy(self.program.model.module).cpu()
        module.load_state_dict(state_dict_of(self.program.rows_of(0), self.program.layout, node), strict=False)
        return module.eval()


def train(
    task: Task,
    algorithm: str,
    topology: str,
    epochs: int,
    device: str = "auto",
    watch: Callable[[Record], None] = lambda record: None,
    **settings: Any,
) -> TrainedInMemory:
    """Train a task of your own in memory. Ctrl-C stops after the current epoch and returns what is trained so far.

    Args:
        task: the model, its loss and its data.
        algorithm: a name with options, as `qg algorithms` lists them.
        topology: a name, as accepted by `qg topology`.
        epochs: number of epochs; each node passes through its own data.
        device: auto, cpu or cuda.
        watch: called with each epoch's record.
        settings: further fields of `Experiment`: alpha, lr, batch, partition, seed, …. The learning rate is constant
            unless `warmup`, `milestones` or a `recipe` are given, or `lr` is a function of the step t = 1, 2, ….
            `steps` counts the steps of one epoch.

    >>> import quasiglobal as qg, torch
    >>> from quasiglobal.data.sources import load
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = qg.Task(net, torch.nn.functional.cross_entropy, load("digits"))
    >>> run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:4", epochs=3, lr=0.05, alpha=1.0, device="cpu")
    >>> [record["lr"] for record in run.records], run.records[-1]["accuracy"] > 0.8
    ([0.05, 0.05, 0.05], True)
    """
    constant = {} if "recipe" in settings else {"warmup": 0.0, "milestones": ()}
    for name, needed in (("decay", "milestones"), ("warmup_from", "warmup")):
        if name in settings and needed not in settings and constant:
            raise InputError(f"{name} has no effect without {needed}; give both, or leave out {name}")
    schedule = settings.pop("lr") if callable(settings.get("lr")) else None
    if schedule and {"warmup", "milestones", "recipe"} & settings.keys():
        raise InputError("lr is a function of the step; leave out warmup, milestones and recipe")
    fields = {"algorithm": algorithm, "topology": topology, "epochs": epochs} | constant | settings
    experiment = from_mapping({"data": task.data.name, "model": "own"} | fields, "qg.train")
    program = Program(task, [experiment], choose_device(device), schedule=schedule)
    records: list[Record] = []

    def keep(loop: Loop) -> None:
        records.extend(loop.records.values())
        watch(records[-1])

    with patient_interrupts() as noted:
        Loop(program, [Call(keep), Interrupts(noted)]).run()
    if not program.finished and noted:
        warnings.warn(f"stopped by Ctrl-C after epoch {program.state.epochs} of {epochs}", stacklevel=2)
    return TrainedInMemory(program, records)
