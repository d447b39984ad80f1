"""Metrics: every metric is named here, and nowhere else.

A process measures its own nodes (`Measures`, lists with one entry per node). `combined` merges them into one `Record`
per epoch for all nodes of a run; records are the lines of metrics.jsonl.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

SCORE = "accuracy"
"""Metric that ranks runs in tuning, tables and plots."""

WORST, BEST, AVERAGED = (f"{SCORE}_{which}" for which in ("worst", "best", "averaged"))
"""Names of the score of the worst node, of the best node, and of the average of all nodes' models."""


class Record(TypedDict, total=False):
    """One epoch of a run; only tested epochs have the keys after `images_per_second`."""

    epoch: int
    step: int
    lr: float
    """Learning rate at the epoch's last step."""
    loss: float
    """Training loss, mean over the nodes; None in a file if it is not finite."""
    train_accuracy: float
    images_per_second: float
    """Examples per second, images or not, of all runs that train together, not of this run alone."""
    accuracy: float
    """Accuracy on the whole test set, mean over the nodes' models."""
    accuracy_std: float
    accuracy_worst: float
    accuracy_best: float
    recall_worst: list[float | None]
    """Recall per class of the worst node; None for a class without test examples."""
    accuracy_averaged: float
    """Accuracy of the average of all nodes' models."""
    consensus_distance: float
    test_loss: float
    weight_norm: float
    effective_step: float
    """lr / ‖x‖², mean over the nodes."""
    bytes_sent: float
    """Bytes sent since the start, mean over the nodes."""


class Measures(TypedDict, total=False):
    """One epoch of the nodes hosted by a process."""

    epoch: int
    step: int
    lr: float
    nodes: list[int]
    loss: list[float]
    train_accuracy: list[float]
    images_per_second: float
    accuracy: list[float]
    recall: list[list[float | None]]
    test_loss: list[float]
    weight_norm: list[float]
    bytes_sent: list[float]
    accuracy_averaged: float
    consensus_distance: float


# ---------------------------------------------------------------------------------------------- measuring


class TestSums:
    """Sums over test batches for each of k models, and the metrics computed from them."""

    __test__ = False                                        # not a test class for pytest

    def __init__(self, like: Tensor, targets: Tensor, classes: int) -> None:
        """`like` sets k, the dtype and the device; `targets` are the targets of the whole test set."""
        self._right, self._loss = like.new_zeros(len(like), classes), like.new_zeros(len(like))
        self._count, self._of_class = len(targets), torch.bincount(targets, minlength=classes)

    def add(self, outputs: Tensor, targets: Tensor, losses: Tensor) -> None:
        """Add a batch: outputs [k, m, classes], targets [m], and each model's mean loss [k]."""
        self._right.index_add_(1, targets, (outputs.argmax(dim=-1) == targets).to(self._right.dtype))
        self._loss += losses * len(targets)

    def accuracy(self) -> Tensor:
        """Accuracy of each model, [k]."""
        return self._right.sum(dim=1) / self._count

    def measures(self, rows: slice) -> Measures:
        """The metrics of the models in `rows`."""
        recall = (self._right / self._of_class)[rows].tolist()
        return {
            "accuracy": self.accuracy()[rows].tolist(),
            "test_loss": (self._loss / self._count)[rows].tolist(),
            "recall": [[share if share == share else None for share in node] for node in recall],
        }


def measures_of_models(x: Tensor, bytes_sent: float) -> Measures:
    """Per-node measures of a run's models x [nodes, d]; each node has sent `bytes_sent` bytes."""
    return {"weight_norm": x.norm(dim=-1).tolist(), "bytes_sent": [bytes_sent] * len(x)}


def measures_of_all(x: Tensor, averaged: Tensor) -> Measures:
    """Measures over all models [n, d] of a run; `averaged` is the accuracy of their average."""
    return {"accuracy_averaged": float(averaged), "consensus_distance": float(consensus_distance(x))}


def average(values: Tensor, dim: int) -> Tensor:
    """Mean over nodes, computed in double precision; also accepts integer counters."""
    return values.double().mean(dim=dim).to(values.dtype)


def consensus_distance(x: Tensor) -> Tensor:
    """Ξ² = mean over nodes of ‖x_i − x̄‖², for x [..., n, d].

    >>> consensus_distance(torch.tensor([[0.0, 0.0], [2.0, 0.0]])).item()
    1.0
    """
    return (x - x.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)


def path_length(points: Tensor) -> Tensor:
    """Length of the path through the points [steps, d].

    >>> path_length(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).item()
    6.0
    """
    return points.diff(dim=0).square().sum(dim=-1).sqrt().sum()


# ---------------------------------------------------------------------------------------------- combining

Reduction = Callable[[str, list[Any], Record], dict[str, Any]]
"""(name of the metric, its values at all nodes, the record so far) → entries of the record."""


def _mean(name: str, values: list[float], record: Record) -> dict[str, Any]:
    return {name: statistics.fmean(values)}


def _spread(name: str, values: list[float], record: Record) -> dict[str, Any]:
    return {
        name: statistics.fmean(values),
        f"{name}_std": statistics.pstdev(values),
        f"{name}_worst": min(values),
        f"{name}_best": max(values),
    }


def _weight_norm(name: str, values: list[float], record: Record) -> dict[str, Any]:
    steps = [record["lr"] / norm**2 if norm else math.inf for norm in values]
    return {name: statistics.fmean(values), "effective_step": statistics.fmean(steps)}


TRAINED: dict[str, Reduction] = {"loss": _mean, "train_accuracy": _mean}
"""Metrics of every epoch, one value per node."""

TESTED: dict[str, Reduction] = {
    "accuracy": _spread, "test_loss": _mean, "weight_norm": _weight_norm, "bytes_sent": _mean,
}
"""Metrics of a tested epoch, one value per node."""

OF_ALL = ("accuracy_averaged", "consensus_distance")
"""Metrics of a tested epoch that need the models of all nodes: `measures_of_all`."""


def combined(parts: Sequence[Mapping[str, Any]]) -> Record:
    """Combine the measures of all processes of a run into the epoch's record."""
    first = parts[0]

    def every(name: str) -> list[Any]:
        return [value for part in parts for value in part[name]]

    record = cast(Record, {name: first[name] for name in ("epoch", "step", "lr")})
    entries = cast(dict[str, Any], record)
    for name, reduce in TRAINED.items():
        entries |= reduce(name, every(name), record)
    entries["images_per_second"] = sum(part["images_per_second"] for part in parts)
    if all(SCORE in part for part in parts):
        for name, reduce in TESTED.items():
            entries |= reduce(name, every(name), record)
        if all("recall" in part for part in parts):
            scores = every(SCORE)
            entries["recall_worst"] = every("recall")[scores.index(min(scores))]
        entries |= {name: part[name] for part in parts for name in OF_ALL if name in part}
    return record


# ---------------------------------------------------------------------------------------------- reading


def number(record: Mapping[str, Any] | None, name: str) -> float | None:
    """A number from a record; None if it was not measured or was not finite."""
    found = (record or {}).get(name)
    return None if found is None else float(found)


def tests(records: Sequence[Record]) -> list[Record]:
    """The records of tested epochs."""
    return [record for record in records if SCORE in record]


def last_and_best(records: Sequence[Record]) -> tuple[Record | None, Record | None]:
    """The records of the last test and of the test with the best score."""
    tested = tests(records)
    return (tested[-1], max(tested, key=lambda record: record["accuracy"])) if tested else (None, None)


def diverged(record: Record, bound: float = 1e4) -> bool:
    """Whether a run has diverged: its loss is not finite, or above `bound`."""
    return not math.isfinite(record["loss"]) or record["loss"] > bound
