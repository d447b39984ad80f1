"""The objects that an experiment's strings name: `resolve` makes them once, as `experiment.resolved`.

No other module parses these strings. The split of the examples, and a graph that is made from label counts, depend on
the data too; they are cached for experiments with the same split.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray
from torch.utils._pytree import tree_leaves

from quasiglobal.algorithms import Algorithm, algorithm
from quasiglobal.common.objects import is_own, readable, recall
from quasiglobal.data.dataset import Dataset, Indices
from quasiglobal.data.partition import Split, class_counts, split
from quasiglobal.engines.wire import Wire, checked_wire, wire_of
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology
from quasiglobal.topology.parsing import count_nodes, given_weights, is_external, needs_counts, parse
from quasiglobal.training.communication import Communication, communication_of
from quasiglobal.training.schedule import check_schedule, schedule_of

if TYPE_CHECKING:
    from quasiglobal.training.experiment import Experiment

DEALT: WeakKeyDictionary[Dataset, dict[tuple[str, int, float, int], list[Indices]]] = WeakKeyDictionary()
"""Cache of partitions for each data set: splitting few classes among many nodes takes seconds."""

MADE: WeakKeyDictionary[Dataset, dict[tuple[str, str, float, int], Topology]] = WeakKeyDictionary()
"""Cache of topologies that are made from label counts."""


def resolve(experiment: Experiment) -> Resolved:
    """The objects of an experiment; raise InputError for an invalid string.

    Graphs and data are looked up at their first use: their files may be elsewhere.
    """
    resolved = Resolved(experiment)
    check_schedule(experiment.schedule)
    wire_of(experiment.wire)
    _ = resolved.communication, resolved.weights, resolved.algorithm
    return resolved


class Resolved:
    """The objects that an experiment's strings name."""

    def __init__(self, experiment: Experiment) -> None:
        self.experiment = experiment

    @cached_property
    def algorithm(self) -> Algorithm:
        """The algorithm, without the windows of `communication`."""
        return algorithm(self.experiment.algorithm)

    @cached_property
    def communication(self) -> Communication:
        """The schedule of communication, in addition to the topology."""
        return communication_of(self.experiment.communication)

    @cached_property
    def wire(self) -> Wire | None:
        """The compression of messages; raise InputError if it does not fit the algorithm."""
        return checked_wire(self.experiment.wire, self.algorithm, self.experiment.algorithm)

    @cached_property
    def weights(self) -> list[float]:
        """The weights of the nodes that are given as numbers; empty if they are equal, or the numbers of examples."""
        return given_weights(self.experiment.weights)

    @cached_property
    def nodes(self) -> int:
        """Number of nodes."""
        return count_nodes(self.experiment.topology)

    @cached_property
    def topology(self) -> Topology:
        """The graph for nodes that count alike; raise InputError if it depends on the data."""
        return parse(self.experiment.topology)

    @cached_property
    def external(self) -> str:
        """Fingerprint of a topology that a file or Python code defines; empty if its name defines it."""
        return self.topology.fingerprint if is_external(self.experiment.topology) else ""

    @cached_property
    def split(self) -> str | Split:
        """The kind of partition, or the user's function."""
        kind = self.experiment.partition
        return recall(kind, "partition") if is_own(kind) else kind

    def rate(self, steps_per_epoch: int) -> Callable[[int], float]:
        """The learning rate as a function of the step t = 1, 2, …"""
        return schedule_of(self.experiment, steps_per_epoch)

    # ------------------------------------------------------------------------------------------- with the data

    def partition(self, data: Dataset) -> list[Indices]:
        """The training examples of each node."""
        one, nodes = self.experiment, self.nodes
        for what, parts in (("train", data.parts), ("test", data.test_parts)):
            if parts is not None and len(parts) != nodes:
                raise InputError(
                    f"{what} has {len(parts)} parts, but {readable(one.topology)} has {nodes} nodes; use a topology "
                    f"of {len(parts)} nodes, such as ring:{len(parts)}"
                )
        if data.parts is not None:
            return list(data.parts)
        key = (one.partition, nodes, one.alpha, one.seed)
        dealt = DEALT.setdefault(data, {})
        if key not in dealt:
            labels = tree_leaves(data.train.y)[0].numpy()
            dealt[key] = split(labels, nodes, self.split, one.alpha, one.seed, data.train.columns)
        return dealt[key]

    def topology_on(self, data: Dataset) -> Topology:
        """The topology with its weights; one that needs label counts is made from the partition."""
        weights = self.weights_on(data)
        graph = self._from_labels(data) if needs_counts(self.experiment.topology) else self.topology
        return graph if weights is None else graph.weighted(weights)

    def weights_on(self, data: Dataset) -> NDArray[np.float64] | None:
        """Weights of the nodes, in any unit; None if all count alike."""
        if self.experiment.weights == "equal":
            return None
        sizes = [len(part) for part in self.partition(data)] if self.experiment.weights == "examples" else []
        return np.array(sizes or self.weights, dtype=np.float64)

    def _from_labels(self, data: Dataset) -> Topology:
        """The topology that is made from the label counts of all nodes."""
        one = self.experiment
        made, key = MADE.setdefault(data, {}), (one.topology, one.partition, one.alpha, one.seed)
        if key in made:
            return made[key]
        labels, whole = np.asarray(tree_leaves(data.train.y)[0]), one.partition == "whole"
        if labels.ndim != 1 or labels.dtype.kind not in "iu" or whole:
            lacks = "the label counts of all nodes" if whole else "one class number per example"
            raise InputError(
                f"{one.topology} needs {lacks}, which this data does not have; use another topology, such as ring:16"
            )
        warnings.warn(
            f"{one.topology} is made from the number of examples of each class at every node: in a deployment, the "
            "nodes would have to reveal these label counts",
            stacklevel=2,
        )
        made[key] = parse(one.topology, class_counts(self.partition(data), labels, int(labels.max()) + 1))
        return made[key]
