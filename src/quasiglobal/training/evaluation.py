"""Evaluation of many models at once on the test data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from quasiglobal.data.arrays import on_device
from quasiglobal.data.dataset import Dataset, Indices
from quasiglobal.data.inputs import inputs_of
from quasiglobal.gradients.one_model import Buffers, in_dtype
from quasiglobal.gradients.stack import StackedModel
from quasiglobal.training.tallies import TestTally

SHOWN_AT_ONCE = 2**15
"""Images per forward pass, summed over all models; a text counts as several images (`Texts.cost`)."""

RELEASED_BATCH = 32
"""Test batch size of models that normalise by batch statistics, as in the released code; it affects the score."""

Batch = tuple[int, Tensor, tuple[int, ...]]
"""Index of the test data's part, indices [batches, batch], and the `Inputs.need` of these examples."""


class Evaluation:
    """The test data on the device, in batches, and the metrics of the test."""

    def __init__(
        self, data: Dataset, metrics: Mapping[str, Any], model: StackedModel, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.data, self.metrics, self.model, self.device, self.dtype = data, dict(metrics), model, device, dtype
        self.inputs = inputs_of(data, data.test, device=device, dtype=dtype)
        self.targets = on_device(data.test.y, device, dtype)
        self._batches: dict[int, list[Batch]] = {}

    def __call__(self, x: Tensor, buffers: Buffers, owners: Sequence[int] = ()) -> TestTally:
        """Evaluate every model of x [k, d] on the test data; `owners` are the nodes of the models, −1 for none."""
        own = self.data.test_parts
        tally = TestTally(self.metrics, x, len(own or (0,)), len(self.data.classes), owners if own else ())
        for part, index, need in self._batches_for(len(x)):
            shown = self.inputs.show(index, *need)
            outputs = in_dtype(self.model.outputs(x, buffers, shown), self.dtype)
            outputs = tree_map(lambda values: values.flatten(1, 2), outputs)
            targets = tree_map(lambda values, index=index: values[index].flatten(0, 1), self.targets)
            tally.add(part, outputs, targets, index.numel(), self.model.losses(outputs, targets))
        return tally

    def _batches_for(self, models: int) -> list[Batch]:
        """The batches of all parts, of a size that fits the memory; cached."""
        if models not in self._batches:
            order = self.inputs.order
            parts = [order] if self.data.test_parts is None else [
                order[np.isin(order, part)] for part in self.data.test_parts
            ]
            self._batches[models] = [
                (k, index.to(self.device), self.inputs.need(index.numpy()))
                for k, part in enumerate(parts)
                for index in self._indices(part, models)
            ]
        return self._batches[models]

    def _indices(self, rows: Indices, models: int) -> list[Tensor]:
        """Cut the rows into indices [batches, batch]."""
        by_batch = any(map(_normalises_by_batch, self.model.module.modules()))
        at_once = SHOWN_AT_ONCE // (models * self.inputs.cost)
        size = RELEASED_BATCH if by_batch else min(500, max(32, at_once))
        order = torch.from_numpy(rows)
        whole = len(order) // size * size
        together = torch.split(order[:whole].view(-1, size), min(16, max(1, at_once // size)) if by_batch else 1)
        return [index for index in (*together, order[None, whole:]) if index.numel()]


def _normalises_by_batch(part: nn.Module) -> bool:
    """Whether a module normalises by batch statistics in evaluation too."""
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats
