"""What is measured of a network's models."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

Record = dict[str, Any]
"""What was measured in an epoch, by name."""


def combined(parts: Sequence[Mapping[str, Any]]) -> Record:
    """An epoch's record of a run, from the measures of those who host its nodes.

    Each part has an entry a node in its lists, `loss`, `train_accuracy` and, after a test, `accuracy` and more.
    `recall_worst` is, for each class, the share of its test examples that the worst node gets right.
    """
    first = parts[0]

    def every(name: str) -> list[Any]:
        return [value for part in parts for value in part[name]]

    record = {name: first[name] for name in ("epoch", "step", "lr")}
    record |= {name: statistics.fmean(every(name)) for name in ("loss", "train_accuracy")}
    record["images_per_second"] = sum(part["images_per_second"] for part in parts)
    if all("accuracy" in part for part in parts):
        scores, norms = every("accuracy"), every("weight_norm")
        record |= {
            "accuracy": statistics.fmean(scores),
            "accuracy_std": statistics.pstdev(scores),
            "accuracy_worst": min(scores),
            "accuracy_best": max(scores),
        }
        if all("recall" in part for part in parts):
            record["recall_worst"] = every("recall")[scores.index(min(scores))]
        if "accuracy_averaged" in first:
            record |= {name: first[name] for name in ("accuracy_averaged", "consensus_distance")}
        record |= {
            "test_loss": statistics.fmean(every("test_loss")),
            "weight_norm": statistics.fmean(norms),
            "effective_step": statistics.fmean(first["lr"] / norm**2 if norm else math.inf for norm in norms),
            "bytes_sent": statistics.fmean(every("bytes_sent")),
        }
    return record


def consensus_distance(x: Tensor) -> Tensor:
    """Ξ² = mean over nodes of ‖x_i − x̄‖², of [..., n, d].

    >>> import torch
    >>> consensus_distance(torch.tensor([[0.0, 0.0], [2.0, 0.0]])).item()
    1.0
    """
    return (x - x.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)


def path_length(points: Tensor) -> Tensor:
    """The length of the way through the points of [steps, d].

    >>> import torch
    >>> path_length(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).item()
    6.0
    """
    return points.diff(dim=0).square().sum(dim=-1).sqrt().sum()
