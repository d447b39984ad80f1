"""Copies of the task's network in the rows of a program: row layout, initial values and the stacked model."""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from quasiglobal.common.memory import keep_freed_memory
from quasiglobal.common.modules import converted, copied
from quasiglobal.errors import InputError
from quasiglobal.metrics import accuracy
from quasiglobal.models.language import recompute
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.one_model import Buffers, arguments
from quasiglobal.stacked.precision import PRECISIONS
from quasiglobal.stacked.routes import OneByOne, Vectorised
from quasiglobal.stacked.stack import Stack, stacked_rows
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task

log = logging.getLogger("quasiglobal")


class Networks:
    """A copy of the task's network for each experiment."""

    def __init__(self, task: Task, experiments: Sequence[Experiment], device: torch.device) -> None:
        self.task, self.device, self.precision = task, device, experiments[0].precision
        self.dtype = PRECISIONS[self.precision]
        self._modules = [task.module(one.seed, self.dtype) for one in experiments]
        self.layout = Layout.of_experiment(self._modules[0], experiments[0].bn)
        if device.type == "cpu":
            keep_freed_memory()

    def check_batches(self, sizes: Sequence[int]) -> None:
        """Raise InputError if a batch has one example, from which BatchNorm cannot compute a variance."""
        norms = nn.modules.batchnorm._BatchNorm
        if 1 not in sizes or not any(isinstance(part, norms) for part in self._modules[0].modules()):
            return
        module = copied(self._modules[0]).train()
        given, named = arguments(module, self.task.examples(1, self.dtype)[0])
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                module(*given, **named)
        except ValueError as error:
            raise InputError(
                f"a step has a batch of one example, which BatchNorm cannot normalise ({error}); use another batch size"
            ) from None

    def start(self, nodes: int) -> tuple[Tensor, Buffers]:
        """Initial x [rows, d] and buffers of all rows; all nodes of an experiment start from the same weights."""
        x, buffers = stacked_rows(self.layout, self._modules, nodes)
        return x.to(self.device), {name: value.to(self.device) for name, value in buffers.items()}

    def stack(self, *, recomputing: bool, long: bool) -> Stack:
        """All copies as one stack; see `Stack` for `long`."""
        def made() -> nn.Module:
            module = self.task.module(0, self.dtype).to(self.device)
            if recomputing:
                recompute(module)
            return module

        loss = self.task.loss
        if isinstance(loss, nn.Module):
            loss = converted(copy.deepcopy(loss), self.device, self.dtype)
        effects = self.task.effects
        route = OneByOne if effects.draws_elsewhere else Vectorised if effects.counts else None
        stack = Stack(
            made, loss, self.layout, self.precision, right=self.task.right, counts_hits=self.task.right is accuracy,
            long=long, route=route,
        )
        if effects.draws_elsewhere:
            name = type(stack.module).__name__
            log.warning(f"{name} draws random numbers of NumPy or Python; the models are trained {OneByOne.cost}")
        stack.random = stack.random or effects.draws or effects.draws_elsewhere
        return stack
