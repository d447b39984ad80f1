"""Partition of the training examples among nodes, cached for experiments with the same split, and their topology."""

from __future__ import annotations

import warnings
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from quasiglobal.common.objects import is_own, readable, recall
from quasiglobal.data.dataset import Dataset, Indices
from quasiglobal.data.partition import class_counts, split
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology
from quasiglobal.topology.parsing import count_nodes, given_weights, needs_counts, parse
from quasiglobal.training.experiment import Experiment

DEALT: WeakKeyDictionary[Dataset, dict[tuple[str, int, float, int], list[Indices]]] = WeakKeyDictionary()
"""Cache of partitions for each data set: splitting few classes among many nodes takes seconds."""


MADE: WeakKeyDictionary[Dataset, dict[tuple[str, str, float, int], Topology]] = WeakKeyDictionary()
"""Cache of topologies that are made from label counts."""


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


def topology_of(data: Dataset, experiment: Experiment) -> Topology:
    """The experiment's topology, with its weights; one that needs label counts is made from the partition."""
    weights, graph = weights_of(data, experiment), _graph_of(data, experiment)
    return graph if weights is None else graph.weighted(weights)


def weights_of(data: Dataset, experiment: Experiment) -> NDArray[np.float64] | None:
    """How much each node counts, in any unit; None if all count alike."""
    if experiment.weights == "equal":
        return None
    sizes = [len(part) for part in partition_of(data, experiment)] if experiment.weights == "examples" else []
    return np.array(sizes or given_weights(experiment.weights), dtype=np.float64)


def _graph_of(data: Dataset, experiment: Experiment) -> Topology:
    """The topology of nodes that count alike."""
    name = experiment.topology
    if not needs_counts(name):
        return parse(name)
    made, key = MADE.setdefault(data, {}), (name, experiment.partition, experiment.alpha, experiment.seed)
    if key not in made:
        made[key] = _from_labels(data, experiment)
    return made[key]


def _from_labels(data: Dataset, experiment: Experiment) -> Topology:
    name = experiment.topology
    labels = np.asarray(tree_leaves(data.train.y)[0])
    if labels.ndim != 1 or labels.dtype.kind not in "iu" or experiment.partition == "whole":
        lacks = "one class number per example" if experiment.partition != "whole" else "the label counts of all nodes"
        raise InputError(f"{name} needs {lacks}, which this data does not have; use another topology, such as ring:16")
    warnings.warn(
        f"{name} is made from the number of examples of each class at every node: in a deployment, the nodes would "
        "have to reveal these label counts",
        stacklevel=3,
    )
    return parse(name, class_counts(partition_of(data, experiment), labels, int(labels.max()) + 1))
