"""Sums over test batches for each of k models, and the metrics computed from them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.func import vmap

from quasiglobal.gradients.stack import rows_of
from quasiglobal.metrics import accuracy, is_lower
from quasiglobal.training.metrics import LOSS, RECALL, SCORE, Measures


class Tally(Protocol):
    """A metric of k models, added up over test batches."""

    def add(self, part: int, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch of `count` examples: outputs [k, count, …] and targets [count, …] of one part of the data."""

    def values(self) -> list[float]:
        """The value of each model on all parts."""

    def own(self) -> list[float]:
        """The value of each model on the part of its node."""


class TestTally:
    """All metrics of the test, and the loss, for each of k models."""

    __test__ = False                                        # not a test class for pytest

    def __init__(
        self, metrics: Mapping[str, Any], like: Tensor, parts: int, classes: int, owners: Sequence[int] = ()
    ) -> None:
        """`like` sets k, the dtype and the device. `owners` are the nodes of the models if each has its own part."""
        self.owners = owners
        self.lower = {name: is_lower(metric) for name, metric in metrics.items()} | {LOSS: True}
        self._loss = Sums(like, parts, owners)
        self._tallies: dict[str, Tally] = {
            name: Objects(metric, like, owners) if hasattr(metric, "compute") else Shares(metric, like, parts, owners)
            for name, metric in metrics.items()
        }
        self._recall = like.new_zeros(2, len(like), classes) if metrics.get(SCORE) is accuracy and classes else None

    def add(self, part: int, outputs: Any, targets: Any, count: int, losses: Tensor) -> None:
        """Add a batch of one part of the data; `losses` is each model's mean loss [k]."""
        self._loss.add_sums(part, losses * count, count)
        for tally in self._tallies.values():
            tally.add(part, outputs, targets, count)
        if self._recall is not None:
            right = outputs.argmax(dim=-1) == targets
            self._recall[0].index_add_(1, targets, right.to(self._recall.dtype))
            self._recall[1].index_add_(1, targets, torch.ones_like(right, dtype=self._recall.dtype))

    def measures(self, rows: slice) -> Measures:
        """The metrics of the models in `rows`."""
        found: Measures = {"metrics": self.lower}
        for name, (values, own) in self._values.items():
            found[name] = values[rows]
            if self.owners:
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
        """Each metric's value of every model on all data, and on its own part; read after the last batch."""
        tallies: dict[str, Tally] = self._tallies | {LOSS: self._loss}
        return {name: (tally.values(), tally.own()) for name, tally in tallies.items()}


class Sums:
    """Sums of values per example, for each model and part of the data."""

    def __init__(self, like: Tensor, parts: int, owners: Sequence[int]) -> None:
        self._sums = like.new_zeros(len(like), parts)
        self._counts = [0] * parts
        self._owners = owners

    def add_sums(self, part: int, sums: Tensor, count: int) -> None:
        """Add the sums [k] of a batch."""
        self._sums[:, part] += sums
        self._counts[part] += count

    def add(self, part: int, outputs: Any, targets: Any, count: int) -> None:
        """Add a batch; see `Tally`."""
        raise NotImplementedError

    def values(self) -> list[float]:
        """The mean of each model over all examples."""
        means: list[float] = (self._sums.sum(dim=1) / sum(self._counts)).tolist()
        return means

    def own(self) -> list[float]:
        """The mean of each model over its own part; nan for a model without one."""
        sums = self._sums.tolist()
        return [
            sums[row][node] / self._counts[node] if node >= 0 else float("nan")
            for row, node in enumerate(self._owners)
        ]


class Shares(Sums):
    """Metric that is the mean of a function (output, target) → one number per example."""

    def __init__(
        self, function: Callable[[Any, Any], Tensor], like: Tensor, parts: int, owners: Sequence[int]
    ) -> None:
        super().__init__(like, parts, owners)
        self._function, self._vectorised = function, like.is_cuda

    def add(self, part: int, outputs: Any, targets: Any, count: int) -> None:
        values = self._of_all(outputs, targets).to(self._sums.dtype)
        self.add_sums(part, values.reshape(len(values), count, -1).mean(dim=2).sum(dim=1), count)

    def _of_all(self, outputs: Any, targets: Any) -> Tensor:
        """The function of each model's outputs, [k, count, …]; on a GPU vectorised, if the function allows it."""
        if self._vectorised:
            try:
                result: Tensor = vmap(self._function, in_dims=(0, None))(outputs, targets)
                return result
            except Exception:                               # vmap does not support every function
                self._vectorised = False
        return torch.stack([self._function(output, targets) for output in rows_of(outputs)])


class Objects:
    """Metric of objects with `update`, `compute` and `reset`: one copy per model, and one for its own part."""

    def __init__(self, metric: Any, like: Tensor, owners: Sequence[int]) -> None:
        def copies(count: int) -> list[Any]:
            made = [copy.deepcopy(metric) for _ in range(count)]
            for one in made:
                one.reset()
            return [one.to(like.device) if hasattr(one, "to") else one for one in made]

        self._models, self._own = copies(len(like)), copies(len(owners))
        self._owners = owners

    def add(self, part: int, outputs: Any, targets: Any, count: int) -> None:
        """Update the copy of each model; see `Tally`."""
        for row, output in enumerate(rows_of(outputs)):
            self._models[row].update(output, targets)
            if self._owners and self._owners[row] == part:
                self._own[row].update(output, targets)

    def values(self) -> list[float]:
        """The value of each model on all parts."""
        return [float(metric.compute()) for metric in self._models]

    def own(self) -> list[float]:
        """The value of each model on its own part; nan for a model without one."""
        return [
            float(metric.compute()) if node >= 0 else float("nan")
            for metric, node in zip(self._own, self._owners, strict=True)
        ]
