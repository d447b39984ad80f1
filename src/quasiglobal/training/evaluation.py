"""Evaluation of many models at once on the test data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import on_device
from quasiglobal.data.dataset import Indices
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.shards import ExampleShards
from quasiglobal.stacked.one_model import Buffers, in_dtype
from quasiglobal.stacked.stack import Stack, rows_of
from quasiglobal.training.tallies import TestTally
from quasiglobal.training.task import Task

SHOWN_AT_ONCE = 2**15
"""Images per forward pass, summed over all models; a text counts as several images (`Texts.cost`)."""

RELEASED_BATCH = 32
"""Test batch size of models that normalise by batch statistics, as in the released code; it affects the score."""

KEPT = 2**25
"""Numbers in the outputs of all models on all test data up to which they are kept, so that a loss is that of the whole
test set, also if it is no mean over examples. Beyond, losses are averaged over batches."""

Batch = tuple[int, Tensor, tuple[int, ...]]
"""Index of the test data's part, indices [batches, batch], and the `Inputs.need` of these examples."""


class Evaluation:
    """The test data on the device, in batches, and the metrics of the test."""

    def __init__(self, task: Task, model: Stack, device: torch.device, dtype: torch.dtype) -> None:
        self.data, self.metrics, self.model, self.device, self.dtype = task.data, task.metrics, model, device, dtype
        self.classes = len(task.data.classes) if task.classifies else 0
        self.inputs = inputs_of(task.data, task.data.test, device=device, dtype=dtype)
        self.on_disk = isinstance(task.data.test.shards, ExampleShards)
        self.targets = task.data.test.y if self.on_disk else on_device(task.data.test.y, device, dtype)
        self._batches: dict[tuple[int, bool], list[Batch]] = {}
        self.output_size = task.output_size

    def __call__(
        self, x: Tensor, buffers: Buffers, owners: Sequence[int] = (), rows: Sequence[int] = ()
    ) -> TestTally:
        """Evaluate every model of x [k, d] on the test data; `owners` are the nodes of the models, −1 for none.

        `rows` are their numbers in the program, negative for averages.
        """
        parts = self.data.test_parts
        tally = TestTally(self.metrics, partial(self.model.losses, rows=rows), x, self.classes, own=parts is not None)
        whole = self.output_size * len(x) * len(self.data.test) <= KEPT
        kept = []
        for part, index, need in self._batches_for(len(x), whole):
            outputs = in_dtype(self.model.outputs(x, buffers, self.inputs.show(index, *need), rows), self.dtype)
            outputs = tree_map(lambda values: values.flatten(1, 2), outputs)
            if whole:
                kept.append((index.flatten(), outputs))
                continue
            targets = self._targets_at(index.flatten())
            tally.add(outputs, targets, index.numel())
            if parts is not None:
                for row, output in enumerate(rows_of(outputs)):
                    if owners[row] == part:
                        tally.add_own(row, output, targets, index.numel())
        if whole:
            shapes = {tuple(leaf.shape[2:] for leaf in tree_leaves(outputs)) for _, outputs in kept}
            if len(shapes) > 1:                             # the outputs depend on the batch: one batch at a time
                self.output_size = KEPT + 1
                return self(x, buffers, owners, rows)
            self._add_whole(tally, kept, owners)
        return tally

    def _add_whole(self, tally: TestTally, kept: Sequence[tuple[Tensor, Any]], owners: Sequence[int]) -> None:
        """Add the outputs on all test data at once."""
        order = torch.cat([index for index, _ in kept])
        outputs = tree_map(lambda *values: torch.cat(values, dim=1), *(found for _, found in kept))
        tally.add(outputs, self._targets_at(order), len(order))
        if self.data.test_parts is None:
            return
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        for row, output in enumerate(rows_of(outputs)):
            if owners[row] >= 0:
                rows = torch.from_numpy(self.data.test_parts[owners[row]]).to(self.device)
                own = tree_map(lambda values, at=places[rows]: values[at], output)
                tally.add_own(row, own, self._targets_at(rows), len(rows))

    def _targets_at(self, rows: Tensor) -> Any:
        if self.on_disk:
            rows = rows.cpu()
        return on_device(tree_map(lambda values: values[rows], self.targets), self.device, self.dtype)

    def _batches_for(self, models: int, whole: bool) -> list[Batch]:
        """Batches of a size that fits the memory; unless `whole`, no batch has examples of two parts. Cached."""
        if (models, whole) not in self._batches:
            order, parts = self.inputs.order, self.data.test_parts
            split = [order] if whole or parts is None else [order[np.isin(order, part)] for part in parts]
            self._batches[models, whole] = [
                (k, index.to(self.device), self.inputs.need(index.numpy()))
                for k, part in enumerate(split)
                for index in self._indices(part, models)
            ]
        return self._batches[models, whole]

    def _indices(self, rows: Indices, models: int) -> list[Tensor]:
        """Cut the rows into indices [batches, batch]."""
        by_batch = any(map(_normalises_by_batch, self.model.module.modules()))
        at_once = SHOWN_AT_ONCE // (models * self.inputs.cost)
        most = 2000 if self.device.type == "cuda" else 500  # a GPU waits for the host between small batches
        size = test_batch(self.model.module, min(most, max(32, at_once)))
        order = torch.from_numpy(rows)
        whole = len(order) // size * size
        together = torch.split(order[:whole].view(-1, size), min(16, max(1, at_once // size)) if by_batch else 1)
        return [index for index in (*together, order[None, whole:]) if index.numel()]


def test_batch(module: nn.Module, usual: int) -> int:
    """Test batch size: RELEASED_BATCH if the model normalises by batch statistics, else the usual one."""
    return RELEASED_BATCH if any(map(_normalises_by_batch, module.modules())) else usual


def _normalises_by_batch(part: nn.Module) -> bool:
    """Whether a module normalises by batch statistics in evaluation too."""
    return isinstance(part, nn.modules.batchnorm._BatchNorm) and not part.track_running_stats
