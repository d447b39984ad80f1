"""Partition of the training examples among nodes, cached for experiments with the same split."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch.utils._pytree import tree_leaves

from quasiglobal.common.objects import is_own, readable, recall
from quasiglobal.data.dataset import Dataset, Indices
from quasiglobal.data.partition import split
from quasiglobal.errors import InputError
from quasiglobal.topology import count_nodes
from quasiglobal.training.experiment import Experiment

DEALT: WeakKeyDictionary[Dataset, dict[tuple[str, int, float, int], list[Indices]]] = WeakKeyDictionary()
"""Cache of partitions for each data set: splitting few classes among many nodes takes seconds."""


def partition_of(data: Dataset, experiment: Experiment) -> list[Indices]:
    """The training examples of each node."""
    nodes = count_nodes(experiment.topology)
    for what, parts in (("train", data.parts), ("test", data.test_parts)):
        if parts is not None and len(parts) != nodes:
            raise InputError(
                f"{what} has {len(parts)} parts, but {readable(experiment.topology)} has {nodes} nodes; use a topology "
                f"of {len(parts)} nodes, such as ring:{len(parts)}"
            )
    if data.parts is not None:
        return list(data.parts)
    key = (experiment.partition, nodes, experiment.alpha, experiment.seed)
    dealt = DEALT.setdefault(data, {})
    if key not in dealt:
        kind = recall(experiment.partition, "partition") if is_own(experiment.partition) else experiment.partition
        labels = tree_leaves(data.train.y)[0].numpy()
        dealt[key] = split(labels, nodes, kind, experiment.alpha, experiment.seed, data.train.columns)
    return dealt[key]
