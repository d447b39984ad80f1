"""Evaluation of many models at once on the test data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from quasiglobal.data.dataset import Dataset
from quasiglobal.data.inputs import inputs_of
from quasiglobal.gradients.one_model import Buffers
from quasiglobal.gradients.stack import StackedModel
from quasiglobal.training.metrics import TestSums

SHOWN_AT_ONCE = 2**15
"""Images per forward pass, summed over all models; a text counts as several images (`Texts.cost`)."""

RELEASED_BATCH = 32
"""Test batch size of models that normalise by batch statistics, as in the released code; it affects the score."""


class Evaluation:
    """The test data on the device, in batches."""

    def __init__(self, data: Dataset, model: StackedModel, device: torch.device, dtype: torch.dtype) -> None:
        self.model, self.device, self.dtype = model, device, dtype
        self.classes = len(data.classes)
        self.inputs = inputs_of(data, data.test, device=device, dtype=dtype)
        self.targets = data.test.y.to(device)
        self._batches: dict[int, list[tuple[Tensor, tuple[int, ...]]]] = {}

    def __call__(self, x: Tensor, buffers: Buffers) -> TestSums:
        """Evaluate every model of x [k, d] on the test data."""
        sums = TestSums(x, self.targets, self.classes)
        for index, need in self._batches_for(len(x)):
            outputs = self.model.outputs(x, buffers, self.inputs.show(index, *need))
            outputs, targets = outputs.to(self.dtype).flatten(1, 2), self.targets[index].flatten()
            sums.add(outputs, targets, self.model.losses(outputs, targets))
        return sums

    def _batches_for(self, models: int) -> list[tuple[Tensor, tuple[int, ...]]]:
        """Indices [batches, batch] that fit the memory, each with the `Inputs.need` of its examples; cached."""
        if models not in self._batches:
            by_batch = any(map(_normalises_by_batch, self.model.module.modules()))
            at_once = SHOWN_AT_ONCE // (models * self.inputs.cost)
            size = RELEASED_BATCH if by_batch else min(500, max(32, at_once))
            order = torch.from_numpy(self.inputs.order)
            whole = len(order) // size * size
            together = torch.split(order[:whole].view(-1, size), min(16, max(1, at_once // size)) if by_batch else 1)
            batches = [positions for positions in (*together, order[None, whole:]) if positions.numel()]
            self._batches[models] = [
                (positions.to(self.device), self.inputs.need(positions.numpy())) for positions in batches
            ]
        return self._batches[models]


def _normalises_by_batch(part: nn.Module) -> bool:
    """Whether a module normalises by batch statistics in evaluation too."""
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats
