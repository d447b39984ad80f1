"""Copies of the task's network in the rows of a program: row layout, initial values and the stacked model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasiglobal.engines.allocator import keep_freed_memory
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.one_model import Buffers
from quasiglobal.gradients.precision import PRECISIONS
from quasiglobal.gradients.stack import StackedModel
from quasiglobal.models.language.checkpointing import recompute
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task


class Networks:
    """A copy of the task's network for each experiment."""

    def __init__(self, task: Task, experiments: Sequence[Experiment], device: torch.device) -> None:
        self.task, self.device, self.precision = task, device, experiments[0].precision
        self.dtype = PRECISIONS[self.precision]
        self._modules = [task.module(one.seed).to(self.dtype) for one in experiments]
        self.layout = Layout.of_experiment(self._modules[0], experiments[0].bn)
        if device.type == "cpu":
            keep_freed_memory()

    def start(self, nodes: int) -> tuple[Tensor, Buffers]:
        """Initial x [rows, d] and buffers of all rows; all nodes of an experiment start from the same weights."""
        rows = [self.layout.row(dict(module.named_parameters())) for module in self._modules]
        kept = [self.layout.buffers(module) for module in self._modules]

        def for_nodes(values: list[Tensor]) -> Tensor:
            return torch.stack(values).repeat_interleave(nodes, dim=0).to(self.device)

        return for_nodes(rows), {name: for_nodes([own[name] for own in kept]) for name in kept[0]}

    def stacked(self, *, recomputing: bool, long: bool) -> StackedModel:
        """All copies as one stacked model; see `StackedModel` for `long`."""
        module = self.task.module(0).to(self.device, self.dtype)
        if recomputing:
            recompute(module)
        return StackedModel(module, self.task.loss, self.layout, self.precision, right=self.task.right, long=long)
