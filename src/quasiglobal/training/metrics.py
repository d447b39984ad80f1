"""Records of training: names of their entries, and how the values of all nodes become one record per epoch.

A process measures its own nodes (`Measures`, lists with one entry per node). `combined` merges them into one `Record`
per epoch for all nodes of a run; records are the lines of metrics.jsonl. For a metric NAME of the test, a record has
the mean over the nodes' models (NAME), NAME_std, NAME_worst, NAME_best, every node's value (NAME_nodes) and the value
of the average of all models (NAME_averaged). If every node has its own test data, these are values on the union of the
data; NAME_own_nodes are the nodes' values on their own data, and NAME_own is their mean.

`Experiment.weights` weighs the nodes in the average of the models and in the consensus distance. Losses and scores are
plain means over the nodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypedDict, cast

import torch
from torch import Tensor

from quasiglobal.common.objects import facts_of, imported, is_path
from quasiglobal.errors import InputError
from quasiglobal.metrics import BUILT_IN, Metric, is_lower, percent

SCORE = "accuracy"
"""The metric of the paper's tables and figures."""

WORST, BEST, AVERAGED = (f"{SCORE}_{which}" for which in ("worst", "best", "averaged"))
"""Names of the accuracy of the worst node, of the best node, and of the average of all nodes' models."""

RECALL = "recall_by_class"
"""Name of each node's recall per class in `Measures`."""

LOSS = "test_loss"
"""Name of the mean loss on the test data; the score of a task without other metrics."""


class Record(TypedDict, total=False):
    """One epoch of a run; only tested epochs have the keys after `images_per_second`.

    The entries of the accuracy and of the test loss are listed; other metrics have the same.
    """

    epoch: int
    step: int
    lr: float
    """Learning rate at the epoch's last step."""
    loss: float
    """Training loss, mean over the nodes; None in a file if it is not finite."""
    train_accuracy: float
    """Only for class numbers."""
    images_per_second: float
    """Examples per second, images or not, of all runs that train together, not of this run alone."""
    accuracy: float
    """Accuracy on the whole test set, mean over the nodes' models."""
    accuracy_std: float
    accuracy_worst: float
    accuracy_best: float
    accuracy_nodes: list[float]
    accuracy_own: float
    accuracy_own_nodes: list[float]
    recall_worst: list[float | None]
    """Recall per class of the worst node; None for a class without test examples."""
    accuracy_averaged: float
    """Accuracy of the average of all nodes' models, weighted if nodes count unequally."""
    consensus_distance: float
    """Mean of ‖x_i − x̄‖² over the nodes, weighted like the average x̄."""
    test_loss: float
    weight_norm: float
    effective_step: float
    """lr / ‖x‖², mean over the nodes."""
    bytes_sent: float
    """Bytes sent since the start, mean over the nodes."""


Measures = dict[str, Any]
"""One epoch of the nodes hosted by a process: lists with one value per node, named as in `Record`.

In addition, `nodes` are the hosted nodes, and `metrics` maps the test's metrics by name to whether lower is better.
"""


@dataclass(frozen=True)
class Ranking:
    """The metric that ranks tests and runs: in best epochs, tuning, tables and plots."""

    name: str = SCORE
    lower: bool = False
    """Whether lower values are better."""
    percent: bool = True
    """Whether values are shares, shown in per cent."""

    @property
    def title(self) -> str:
        """Heading of a column or an axis."""
        return f"{self.name.replace('_', ' ')}{', %' if self.percent else ''}"

    @property
    def factor(self) -> float:
        """Factor between a value and its display."""
        return 100.0 if self.percent else 1.0

    def worth(self, value: float | None) -> float:
        """Value in which higher is better; −∞ if it was not measured."""
        if value is None or math.isnan(value):
            return -math.inf
        return -value if self.lower else value

    def shown(self, value: float | None) -> str:
        """The value as text."""
        if value is None:
            return ""
        return f"{100 * value:.2f}" if self.percent else f"{value:.4g}"


def ranking(metric: Sequence[str], records: Sequence[Mapping[str, object]] = ()) -> Ranking:
    """The first of an experiment's metrics; by default the accuracy if it was measured, else the test loss.

    >>> ranking(["mae", "accuracy"]), ranking([], [{"test_loss": 0.5}]).title
    (Ranking(name='mae', lower=True, percent=False), 'test loss')
    """
    if metric:
        return ranking_of(metric[0])
    if any(LOSS in record for record in records) and not any(SCORE in record for record in records):
        return ranking_of(LOSS)
    return Ranking()


def ranking_of(metric: str) -> Ranking:
    """The name and the direction of a metric given as text: a built-in name, package.module:name or own:…"""
    if metric == LOSS:
        return Ranking(LOSS, lower=True, percent=False)
    if metric in BUILT_IN:
        return Ranking(metric, is_lower(BUILT_IN[metric]), percent(BUILT_IN[metric]))
    facts = facts_of(metric)
    if "name" not in facts and is_path(metric):
        with suppress(InputError):                          # a finished run is readable without its code
            facts = facts_of_metric(metric)
    name = facts.get("name", metric.rpartition(":")[2])
    return Ranking(str(name), bool(facts.get("lower", False)), bool(facts.get("percent", False)))


def imported_metric(path: str) -> Metric:
    """The metric package.module:name; a class is instantiated."""
    metric: Metric = imported(path, "metric")
    return metric() if isinstance(metric, type) else metric


def facts_of_metric(path: str) -> dict[str, str | bool]:
    """The name and the direction of the metric package.module:name; raise InputError if it cannot be imported."""
    metric = imported_metric(path)
    return {"name": path.rpartition(":")[2], "lower": is_lower(metric), "percent": percent(metric)}


RESERVED = {
    "epoch", "step", "lr", "loss", "train_accuracy", "images_per_second", "recall_worst", "consensus_distance", LOSS,
    "weight_norm", "effective_step", "bytes_sent", "nodes", "metrics", RECALL,
}
"""Names that a metric cannot have."""


def check_names(names: Sequence[str]) -> None:
    """Raise InputError for names that records cannot hold."""
    endings = ("_std", "_worst", "_best", "_averaged", "_nodes", "_own")
    for name in names:
        if not isinstance(name, str) or not name or name in RESERVED or name.endswith(endings):
            raise InputError(f"a metric cannot be called {name!r}, which means something else in records; rename it")


# ---------------------------------------------------------------------------------------------- measuring


def measures_of_all(x: Tensor, averaged: Mapping[str, float], weights: Tensor | None = None) -> Measures:
    """Measures over all models [n, d] of a run; `averaged` has the metrics of their average."""
    found = {f"{name}_averaged": value for name, value in averaged.items()}
    return found | {"consensus_distance": float(consensus_distance(x, weights))}


def average(values: Tensor, dim: int, weights: Tensor | None = None) -> Tensor:
    """Mean over nodes, computed in double precision; also accepts integer counters.

    `weights` are the nodes' weights, [n] or [runs, n]; `dim` is their last dimension.

    >>> import torch
    >>> average(torch.tensor([[1.0], [5.0]]), dim=0, weights=torch.tensor([3.0, 1.0])).item()
    2.0
    """
    if values.is_complex():
        return torch.view_as_complex(average(torch.view_as_real(values), dim % values.ndim, weights))
    if weights is None:
        return values.double().mean(dim=dim).to(values.dtype)
    shares = (weights / weights.sum(dim=-1, keepdim=True)).to(values.device, torch.float64)
    mean = (shares.view(*shares.shape, *[1] * (values.ndim - shares.ndim)) * values).sum(dim=dim)
    return (mean if values.is_floating_point() else mean.round()).to(values.dtype)


def consensus_distance(x: Tensor, weights: Tensor | None = None) -> Tensor:
    """Ξ² = mean over nodes of ‖x_i − x̄‖², for x [..., n, d]; with weights [n], both means weigh the nodes.

    >>> import torch
    >>> consensus_distance(torch.tensor([[0.0, 0.0], [2.0, 0.0]])).item()
    1.0
    """
    if weights is None:
        return (x - x.mean(dim=-2, keepdim=True)).square().sum(dim=-1).mean(dim=-1)
    mean = average(x, x.ndim - 2, weights.expand(x.shape[:-1])).unsqueeze(-2)
    return average((x - mean).square().sum(dim=-1), x.ndim - 2, weights.expand(x.shape[:-1]))


def path_length(points: Tensor) -> Tensor:
    """Length of the path through the points [steps, d].

    >>> import torch
    >>> path_length(torch.tensor([[0.0, 0.0], [3.0, 4.0], [3.0, 5.0]])).item()
    6.0
    """
    return points.diff(dim=0).square().sum(dim=-1).sqrt().sum()


# ---------------------------------------------------------------------------------------------- combining


def combined(parts: Sequence[Measures]) -> Record:
    """Combine the measures of all processes of a run into the epoch's record."""
    first = parts[0]
    nodes = [node for part in parts for node in part.get("nodes", ())]

    def every(name: str) -> list[Any]:
        """The values of all nodes, in the order of the nodes."""
        values = [value for part in parts for value in part[name]]
        if len(nodes) != len(values):
            return values
        return [value for _, value in sorted(zip(nodes, values, strict=True), key=lambda pair: pair[0])]

    record: Measures = {name: first[name] for name in ("epoch", "step", "lr")}
    for name in ("loss", "train_accuracy"):
        if name in first:
            record[name] = statistics.fmean(every(name))
    record["images_per_second"] = sum(part["images_per_second"] for part in parts)
    if all(LOSS in part for part in parts):
        for name, lower in first.get("metrics", {SCORE: False, LOSS: True}).items():
            record |= _spread(name, every(name), lower)
            if all(f"{name}_own" in part for part in parts):
                own = every(f"{name}_own")
                record |= {f"{name}_own": _mean(own), f"{name}_own_nodes": own}
        recall = RECALL if "metrics" in first else "recall"         # "recall" in files of version 1
        if all(recall in part for part in parts):
            scores = every(SCORE)
            record["recall_worst"] = every(recall)[scores.index(min(scores))]
        norms = every("weight_norm")
        steps = [record["lr"] / norm**2 if norm else math.inf for norm in norms]
        record |= {"weight_norm": statistics.fmean(norms), "effective_step": statistics.fmean(steps)}
        record["bytes_sent"] = statistics.fmean(every("bytes_sent"))
        record |= {                                         # `measures_of_all`
            name: value for part in parts for name, value in part.items()
            if name == "consensus_distance" or name.endswith("_averaged")
        }
    return cast(Record, record)


def _spread(name: str, values: list[float], lower: bool) -> Measures:
    """The entries of one metric of the test."""
    worth = Ranking(name, lower).worth
    return {
        name: _mean(values),
        f"{name}_std": statistics.pstdev(values) if all(map(math.isfinite, values)) else math.nan,
        f"{name}_worst": min(values, key=worth),
        f"{name}_best": max(values, key=worth),
        f"{name}_nodes": values,
    }


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if all(map(math.isfinite, values)) else sum(values) / len(values)


# ---------------------------------------------------------------------------------------------- reading


def number(record: Mapping[str, Any] | None, name: str) -> float | None:
    """A number from a record; None if it was not measured or was not finite."""
    found = (record or {}).get(name)
    return None if found is None else float(found)


class RecordList(list[Record]):
    """The records of one run, a list with one entry per epoch."""

    @property
    def records(self) -> list[Record]:
        """The records as in metrics.jsonl."""
        return self


def tests(records: Sequence[Record]) -> list[Record]:
    """The records of tested epochs."""
    return [record for record in records if LOSS in record or SCORE in record]


def last_and_best(records: Sequence[Record], metric: Sequence[str] = ()) -> tuple[Record | None, Record | None]:
    """The records of the last test and of the test with the best score; `metric` are the experiment's metrics."""
    tested = tests(records)
    if not tested:
        return None, None
    score = ranking(metric, tested)
    return tested[-1], max(tested, key=lambda record: score.worth(number(record, score.name)))


def diverged(record: Record, bound: float) -> bool:
    """Whether a run has diverged: its loss is not finite, or above `bound`."""
    return not math.isfinite(record["loss"]) or record["loss"] > bound
