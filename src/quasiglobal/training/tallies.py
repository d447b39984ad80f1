"""Metrics of k models on the test data, added up over batches."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from quasiglobal.metrics import accuracy, is_lower
from quasiglobal.stacked.stack import rows_of
from quasiglobal.training.metrics import LOSS, RECALL, SCORE, Measures
from quasiglobal.training.remedies import misfit


class Tally(Protocol):
    """A metric of k models: on all test examples, and on those of each model's own node."""

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of `count` examples: outputs [k, count, …] and targets [count, …]."""

    def add_own(self, row: int, output: Any, targets: Any, count: int) -> None:
        """Add a batch of one model's own examples: its output [count, …] and the targets [count, …]."""

    def values(self) -> list[float]:
        """The value of each model on all examples."""

    def own(self) -> list[float]:
        """The value of each model on its own examples; nan for a model without any."""


class TestTally:
    """All metrics of the test, and the loss, for each of k models."""

    __test__ = False                                        # not a test class for pytest

    def __init__(
        self,
        metrics: Mapping[str, Any],
        losses: Callable[[Any, Any], Tensor],
        like: Tensor,
        classes: int = 0,
        own: bool = False,
    ) -> None:
        """`losses` gives each model's mean loss [k] on a batch. `like` sets k, the dtype and the device.

        `classes` is the number of classes if recalls are to be measured; `own` if models have examples of their own.
        """
        self.own = own
        self.lower = {name: is_lower(metric) for name, metric in metrics.items()} | {LOSS: True}
        self._tallies: dict[str, Tally] = {
            name: Objects(metric, like, own) if hasattr(metric, "compute") else Means(of_each_model(metric), like)
            for name, metric in metrics.items()
        }
        self._tallies[LOSS] = Means(losses, like)
        self._recall = like.new_zeros(2, len(like), classes) if metrics.get(SCORE) is accuracy and classes else None

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of test examples."""
        for name, tally in self._tallies.items():
            with _of_the_test(name):
                tally.add(outputs, targets, count)
        if self._recall is not None:
            right = outputs.argmax(dim=-1) == targets
            self._recall[0].index_add_(1, targets, right.to(self._recall.dtype))
            self._recall[1].index_add_(1, targets, torch.ones_like(right, dtype=self._recall.dtype))

    def add_own(self, row: int, output: Any, targets: Any, count: int) -> None:
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
    """Say which metric fails, if one does."""
    what = "the loss" if metric == LOSS else f"metric {metric!r}"
    return misfit(f"{what} fails on the test data", "a trial on a few training examples did not show it; check both")


class Means:
    """Metric that is a mean over examples, of a function (outputs [k, m, …], targets [m, …]) → [k] or [k, m, …]."""

    def __init__(self, function: Callable[[Any, Any], Tensor], like: Tensor) -> None:
        self._function = function
        self._sums, self._own = like.new_zeros(len(like)), like.new_zeros(len(like))
        self._count, self._own_counts = 0, [0] * len(like)

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch; see `Tally`."""
        self._sums += self._sum(outputs, targets, count)
        self._count += count

    def add_own(self, row: int, output: Any, targets: Any, count: int) -> None:
        """Add a batch of one model's own examples; see `Tally`."""
        self._own[row] += self._sum(as_stack(output), targets, count)[0]
        self._own_counts[row] += count

    def values(self) -> list[float]:
        """The mean of each model over all examples."""
        means: list[float] = (self._sums / self._count).tolist()
        return means

    def own(self) -> list[float]:
        """The mean of each model over its own examples."""
        sums: list[float] = self._own.tolist()
        return [total / count if count else float("nan") for total, count in zip(sums, self._own_counts, strict=True)]

    def _sum(self, outputs: Any, targets: Any, count: int) -> Tensor:
        """The sum over the examples, for each model."""
        values = self._function(outputs, targets).to(self._sums.dtype)
        return values * count if values.ndim == 1 else values.reshape(len(values), count, -1).mean(dim=2).sum(dim=1)


class Objects:
    """Metric of objects with `update`, `compute` and `reset`: one copy per model, and one for its own examples."""

    def __init__(self, metric: Any, like: Tensor, own: bool) -> None:
        def copies(count: int) -> list[Any]:
            made = [copy.deepcopy(metric) for _ in range(count)]
            for one in made:
                one.reset()
            return [one.to(like.device) if hasattr(one, "to") else one for one in made]

        self._models, self._own = copies(len(like)), copies(len(like) if own else 0)
        self._seen: set[int] = set()

    def add(self, outputs: Any, targets: Any, count: int) -> None:
        """Update the copy of each model; see `Tally`."""
        for metric, output in zip(self._models, rows_of(outputs), strict=True):
            metric.update(output, targets)

    def add_own(self, row: int, output: Any, targets: Any, count: int) -> None:
        """Update a model's copy for its own examples; see `Tally`."""
        self._own[row].update(output, targets)
        self._seen.add(row)

    def values(self) -> list[float]:
        """The value of each model on all examples."""
        return [float(metric.compute()) for metric in self._models]

    def own(self) -> list[float]:
        """The value of each model on its own examples."""
        return [float(one.compute()) if row in self._seen else float("nan") for row, one in enumerate(self._own)]


def of_each_model(function: Callable[[Any, Any], Tensor]) -> Callable[[Any, Any], Tensor]:
    """A function of one model's output, for the outputs [k, …] of all; on a GPU vectorised, if possible."""
    vectorises = True

    def of_all(outputs: Any, targets: Any) -> Tensor:
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


def as_stack(output: Any) -> Any:
    """The output of one model as the outputs [1, …] of a stack."""
    return tree_map(lambda values: values[None], output)
