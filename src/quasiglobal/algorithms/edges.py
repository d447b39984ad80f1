"""Edges: the links of the hosted nodes, numbered by slots, as `node.exchange` and per-edge state use them."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Edges:
    """The neighbours of each hosted node in numbered slots 0, 1, …, degree − 1.

    On an undirected graph, slot j of a node is its j-th neighbour, to send to and to receive from. On a directed graph
    the slots of senders and of receivers are numbered separately. All nodes have `degree` slots, so that per-edge
    tensors have one shape, [k, degree, …]; the masks are False at slots without a neighbour. If only some columns are
    communicated, the masks are [k, degree, d] and False at the other columns: these have no neighbours.
    """

    n: int
    """Number of nodes of a run."""
    degree: int
    """Number of slots: the most neighbours that a node sends to or receives from over the topology's period."""
    period: int
    """Number of steps after which the topology repeats."""
    senders: Tensor
    """[k, degree, 1] mask of the slots that have a neighbour to receive from."""
    receivers: Tensor
    """[k, degree, 1] mask of the slots that have a neighbour to send to."""
