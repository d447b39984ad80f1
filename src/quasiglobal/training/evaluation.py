"""Evaluation of many models at once on the test data, and their metrics, added up over batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import Tree, on_device
from quasiglobal.data.dataset import Indices
from quasiglobal.data.inputs import inputs_of
from quasiglobal.data.shards import ExampleShards
from quasiglobal.metrics import Gathered, Metric, accuracy, is_lower
from quasiglobal.stacked.one_model import Buffers, in_dtype
from quasiglobal.stacked.stack import Stack, rows_of
from quasiglobal.training.metrics import LOSS, RECALL, SCORE, Measures
from quasiglobal.training.task import Task
from quasiglobal.training.trial import gathers, misfit

SHOWN_AT_ONCE = 2**15
"""Images per forward pass, summed over all models; a text counts as several images (`Texts.cost`)."""

RELEASED_BATCH = 32
"""Test batch size of models that normalise by batch statistics, as in the released code; it affects the score."""

KEPT = 2**25
"""Limit on the numbers in the outputs of all models on all test data. Up to it, outputs are kept, and the loss is that
of the whole test set, even if it is not a mean over examples. Above it, losses are averaged over batches."""

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

    def _add_whole(self, tally: TestTally, kept: Sequence[tuple[Tensor, Tree]], owners: Sequence[int]) -> None:
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

    def _targets_at(self, rows: Tensor) -> Tree:
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


# ---------------------------------------------------------------------------------------------- metrics


class TestTally:
    """All metrics of the test, and the loss, for each of k models."""

    __test__ = False                                        # not a test class for pytest

    def __init__(
        self,
        metrics: Mapping[str, Metric],
        losses: Callable[[Tree, Tree], Tensor],
        like: Tensor,
        classes: int = 0,
        own: bool = False,
    ) -> None:
        """`losses` gives each model's mean loss [k] on a batch. `like` sets k, the dtype and the device.

        `classes` is the number of classes if recalls are to be measured; `own` if models have examples of their own.
        """
        self.own = own
        self.lower = {name: is_lower(metric) for name, metric in metrics.items()} | {LOSS: True}
        self._tallies: dict[str, Means | Objects] = {
            name: Objects(metric, like, own) if gathers(metric) else Means(of_each_model(metric), like)
            for name, metric in metrics.items()
        }
        self._tallies[LOSS] = Means(losses, like)
        self._recall = like.new_zeros(2, len(like), classes) if metrics.get(SCORE) is accuracy and classes else None

    def add(self, outputs: Tree, targets: Tree, count: int) -> None:
        """Add a batch of test examples."""
        for name, tally in self._tallies.items():
            with _of_the_test(name):
                tally.add(outputs, targets, count)
        if self._recall is not None:
            right = outputs.argmax(dim=-1) == targets
            self._recall[0].index_add_(1, targets, right.to(self._recall.dtype))
            self._recall[1].index_add_(1, targets, torch.ones_like(right, dtype=self._recall.dtype))

    def add_own(self, row: int, output: Tree, targets: Tree, count: int) -> None:
        """Add a batch of one model's own test examples."""
        for name, tally in self._tallies.items():
            with _of_the_test(name):
                tally.add_own(row, output, targets, count)

    def measures(self, rows: slice) -> Measures:
        """The metrics of the models in `rows`."""
        found: Measures = {"metrics": self.lower}
        for name, (values, own) in self._values.items():
            found[name] = values[rows]
            if self.own:
                found[f"{name}_own"] = own[rows]
        if self._recall is not None:
            recall = (self._recall[0] / self._recall[1])[rows].tolist()
            found[RECALL] = [[share if share == share else None for share in node] for node in recall]
        return found

    def of_model(self, row: int) -> dict[str, float]:
        """The metrics of one model."""
        return {name: values[row] for name, (values, _) in self._values.items()}

    @cached_property
    def _values(self) -> dict[str, tuple[list[float], list[float]]]:
        """Each metric of every model on all examples, and on its own; read after the last batch."""
        found = {}
        for name, tally in self._tallies.items():
            with _of_the_test(name):
                found[name] = tally.values(), tally.own() if self.own else []
        return found


def _of_the_test(metric: str) -> AbstractContextManager[None]:
    """Name the metric in errors."""
    what = "the loss" if metric == LOSS else f"metric {metric!r}"
    return misfit(f"{what} fails on the test data", "a trial on a few training examples did not show it; check both")


class Means:
    """Metric that is a mean over examples, of a function (outputs [k, m, …], targets [m, …]) → [k] or [k, m, …]."""

    def __init__(self, function: Callable[[Tree, Tree], Tensor], like: Tensor) -> None:
        self._function = function
        self._sums, self._own = like.new_zeros(len(like)), like.new_zeros(len(like))
        self._count, self._own_counts = 0, [0] * len(like)

    def add(self, outputs: Tree, targets: Tree, count: int) -> None:
        """Add a batch of `count` examples: outputs [k, count, …] and targets [count, …]."""
        self._sums += self._sum(outputs, targets, count)
        self._count += count

    def add_own(self, row: int, output: Tree, targets: Tree, count: int) -> None:
        """Add a batch of one model's own examples: its output [count, …] and the targets [count, …]."""
        self._own[row] += self._sum(tree_map(lambda values: values[None], output), targets, count)[0]
        self._own_counts[row] += count

    def values(self) -> list[float]:
        """The mean of each model over all examples."""
        means: list[float] = (self._sums / self._count).tolist()
        return means

    def own(self) -> list[float]:
        """The mean of each model over its own examples; nan for a model without any."""
        sums: list[float] = self._own.tolist()
        return [total / count if count else float("nan") for total, count in zip(sums, self._own_counts, strict=True)]

    def _sum(self, outputs: Tree, targets: Tree, count: int) -> Tensor:
        """The sum over the examples, for each model."""
        values = self._function(outputs, targets).to(self._sums.dtype)
        return values * count if values.ndim == 1 else values.reshape(len(values), count, -1).mean(dim=2).sum(dim=1)


class Objects:
    """Metric that gathers batches: one copy per model, and another for the model's own examples."""

    def __init__(self, metric: Gathered, like: Tensor, own: bool) -> None:
        def copies(count: int) -> list[Gathered]:
            made = [copy.deepcopy(metric) for _ in range(count)]
            for one in made:
                one.reset()
            return [one.to(like.device) if hasattr(one, "to") else one for one in made]

        self._models, self._own = copies(len(like)), copies(len(like) if own else 0)
        self._seen: set[int] = set()

    def add(self, outputs: Tree, targets: Tree, count: int) -> None:
        """Update the copy of each model."""
        for metric, output in zip(self._models, rows_of(outputs), strict=True):
            metric.update(output, targets)

    def add_own(self, row: int, output: Tree, targets: Tree, count: int) -> None:
        """Update a model's copy for its own examples."""
        self._own[row].update(output, targets)
        self._seen.add(row)

    def values(self) -> list[float]:
        """The value of each model on all examples."""
        return [float(metric.compute()) for metric in self._models]

    def own(self) -> list[float]:
        """The value of each model on its own examples."""
        return [float(one.compute()) if row in self._seen else float("nan") for row, one in enumerate(self._own)]


def of_each_model(function: Callable[[Tree, Tree], Tensor]) -> Callable[[Tree, Tree], Tensor]:
    """A function of one model's output, for the outputs [k, …] of all; on a GPU vectorised, if possible."""
    vectorises = True

    def of_all(outputs: Tree, targets: Tree) -> Tensor:
        nonlocal vectorises
        rows = rows_of(outputs)
        if vectorises and len(rows) > 1 and torch.is_tensor(outputs) and outputs.is_cuda:
            try:
                result: Tensor = vmap(function, in_dims=(0, None))(outputs, targets)
                return result
            except Exception:                               # vmap does not support every function
                vectorises = False
        return torch.stack([function(output, targets) for output in rows])

    return of_all
