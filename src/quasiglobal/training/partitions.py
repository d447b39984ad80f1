"""Partition of the training examples among nodes, cached for experiments with the same split."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from quasiglobal.data.dataset import Dataset
from quasiglobal.data.partition import Indices, split
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment

DEALT: WeakKeyDictionary[Dataset, dict[tuple[str, int, float, int], list[Indices]]] = WeakKeyDictionary()
"""Cache of partitions for each data set: splitting few classes among many nodes takes seconds."""


def partition_of(data: Dataset, experiment: Experiment) -> list[Indices]:
    """The training examples of each node."""
    key = (experiment.partition, count_nodes(experiment.topology), experiment.alpha, experiment.seed)
    dealt = DEALT.setdefault(data, {})
    if key not in dealt:
        dealt[key] = split(key[0], data.train.y.numpy(), *key[1:], data.train.columns)
    return dealt[key]
