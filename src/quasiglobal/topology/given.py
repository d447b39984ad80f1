"""Graphs and matrices of a user's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import networkx as nx
from numpy.typing import ArrayLike

from quasiglobal.common.edge_lists import graph_of_neighbours, read_edge_list
from quasiglobal.common.mixing import Matrix, graph_weights, stochastic
from quasiglobal.topology.topology import Topology


def from_graph(graph: nx.Graph[Any], weight: str | None = None, name: str = "graph") -> Topology:
    """Build a topology from a connected networkx graph; node i is `list(graph)[i]`.

    An undirected graph gets Metropolis weights 1/(1 + max degree). In a directed graph an edge u → v means that v
    receives u's model: a node with k senders gives itself and each of them the weight 1/(1 + k). W is then not doubly
    stochastic in general; `sgp`, `qg-sgp`, `push-diging` and `ab` are for such graphs.

    If `weight` is given, or edges of a directed graph have the attribute "weight", the edge attribute of that name sets
    the weights. Weights of parallel edges add up. A node's own weight is 1 minus the sum of the others, unless a
    self-loop sets it.

    >>> import networkx as nx
    >>> from_graph(nx.path_graph(3)).weights()[0].round(3).tolist()
    [0.667, 0.333, 0.0]
    >>> from_graph(nx.DiGraph([("a", "b"), ("b", "c"), ("c", "a"), ("a", "c")])).weights()[2].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    return Topology(name, (graph_weights(graph, weight, name),))


def from_matrices(matrices: Sequence[ArrayLike] | Matrix, name: str = "matrices") -> Topology:
    """Build a topology from mixing matrices, one per step of a period; the diagonal absorbs float32 rounding errors."""
    return Topology(name, stochastic(matrices, name))


def from_file(path: str) -> Topology:
    """Read an edge list or CSV file: a line `u v` or `u v weight` per link; `#` begins a comment."""
    graph, weighted = read_edge_list(path)
    return from_graph(graph, "weight" if weighted else None, name=f"file:{path}")


def from_neighbours(neighbours: Mapping[Any, Any]) -> Topology:
    """Build a topology from a dict that maps each node to its neighbours, with Metropolis weights.

    A link goes both ways, also if only one of its nodes lists it; for links in one direction use `from_graph` with a
    networkx DiGraph.

    >>> from_neighbours({"a": ["b"], "b": ["a", "c"], "c": ["b"]}).weights()[0].round(3).tolist()
    [0.667, 0.333, 0.0]
    """
    return from_graph(graph_of_neighbours(neighbours), name="neighbours")
