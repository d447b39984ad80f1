"""Links: a topology's edges in numbered slots, which `exchange` and per-edge state refer to."""

from __future__ import annotations

from functools import cached_property

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from quasiglobal.algorithms import Needs
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology


class Links:
    """The neighbours of every node over a topology's period: slot s of `senders` and of `receivers` is the s-th.

    >>> from quasiglobal import topology
    >>> links = Links(topology.ring(4))
    >>> links.senders.tolist()
    [[1, 3], [0, 2], [1, 3], [0, 2]]
    >>> links.at_sender.tolist()                              # node 1 has node 0 in its slot 0, node 3 in its slot 0
    [[0, 0], [0, 0], [1, 1], [1, 1]]
    """

    def __init__(self, topology: Topology) -> None:
        if topology.period is None:
            raise InputError(no_edges(topology, Needs()))
        self.topology, self.period = topology, topology.period
        self.union = topology.links()
        self.degree = int(max(self.union.sum(axis=0).max(), self.union.sum(axis=1).max()))
        self.senders, self.has_sender = _slots(self.union, self.degree)
        self.receivers, self.has_receiver = _slots(self.union.T, self.degree)

    @cached_property
    def at_sender(self) -> NDArray[np.int64]:
        """[n, degree]: the slot of `receivers` at which the node in this slot of `senders` has this node."""
        place = np.cumsum(self.union.T, axis=1) - 1         # [sender, receiver]
        nodes = np.arange(len(self.union))[:, None]
        return np.where(self.has_sender, place[self.senders, nodes], 0)

    def active(self, t: int) -> NDArray[np.bool_]:
        """[n, degree]: whether the node receives from this slot at step t."""
        now, nodes = _between(self.topology.weights(t)), np.arange(len(self.union))[:, None]
        return self.has_sender & now[nodes, self.senders]

    def messages(self, t: int) -> list[tuple[int, int, int, int]]:
        """The messages of step t as (sender, its slot, receiver, its slot), in one order everywhere."""
        return sorted(
            (int(self.senders[i, s]), int(self.at_sender[i, s]), int(i), int(s))
            for i, s in zip(*np.nonzero(self.active(t)), strict=True)
        )


def no_edges(topology: Topology, needs: Needs) -> str:
    """Reason why an algorithm with these needs cannot send messages per edge on a random topology, and a remedy."""
    instead = "tree" if needs.tree else "ring" if needs.undirected else "one-peer-exponential"
    return (
        f"messages per edge need edges that stay, but {topology} is drawn anew at each step; use a topology that "
        f"repeats, such as {instead}:{topology.n}"
    )


def check_push(topology: Topology) -> None:
    """Raise if a captured step could not know the shares of a push: W is drawn, and its columns do not sum to 1."""
    if topology.period is None and not topology.keeps_mean:
        raise InputError(
            f"a push on a graph that is drawn anew at each step needs a doubly stochastic W, which {topology} has not; "
            f"use equidyn:{topology.n} or matching:{topology.n}"
        )


def misfit(needs: Needs, topology: Topology) -> str | None:
    """Requirement that the topology's graph does not meet, and a remedy; None if it meets all."""
    if needs.lazy and topology.period != 1:
        return f"needs a fixed symmetric W, which {topology} is not: it diverges there; use a fixed undirected graph"
    steps = [_between(W) for W in {id(W): W for W in topology.matrices}.values()]
    if needs.tree and not all((links == links.T).all() and nx.is_tree(nx.from_numpy_array(links)) for links in steps):
        return f"needs a spanning tree, which {topology} is not; use one, such as tree:{topology.n}"
    if needs.undirected and not all((links == links.T).all() for links in steps):
        return f"needs an undirected graph, which {topology} is not; use links that go both ways"
    return None


def _between(W: NDArray[np.float64]) -> NDArray[np.bool_]:
    """[n, n]: whether node i receives from another node j."""
    return np.asarray((W != 0) & ~np.eye(len(W), dtype=bool))


def _slots(links: NDArray[np.bool_], degree: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The columns of each row's links, [n, degree], padded with 0, and the mask of those that are links."""
    order = np.argsort(~links, axis=1, kind="stable")[:, :degree]
    mask = np.take_along_axis(links, order, axis=1)
    return np.where(mask, order, 0), mask
