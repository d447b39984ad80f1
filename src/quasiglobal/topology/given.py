"""User-defined graphs and matrices: networkx graphs, dicts of neighbours, matrices and edge lists.

An edge list is a text file with one link per line, or a CSV file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from quasiglobal.errors import InputError
from quasiglobal.topology.mixing import Matrix, Network, metropolis, stochastic
from quasiglobal.topology.topology import Topology

__all__ = ["from_file", "from_graph", "from_matrices", "from_neighbours"]

Neighbours: TypeAlias = "Mapping[Any, Iterable[Any]]"
"""The neighbours of each node; nodes may be anything hashable."""


def from_graph(graph: Network, weight: str | None = None, name: str = "graph") -> Topology:
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
    return Topology(name, (_weights(graph, weight, name),))


def from_matrices(matrices: Sequence[ArrayLike] | Matrix, name: str = "matrices") -> Topology:
    """Build a topology from mixing matrices, one per step of a period; the diagonal absorbs float32 rounding errors."""
    return Topology(name, stochastic(matrices, name))


def from_file(path: str) -> Topology:
    """Read an edge list or CSV file: a line `u v` or `u v weight` per link; `#` begins a comment."""
    graph, weighted = _read_edge_list(path)
    return from_graph(graph, "weight" if weighted else None, name=f"file:{path}")


def from_neighbours(neighbours: Neighbours) -> Topology:
    """Build a topology from a dict that maps each node to its neighbours, with Metropolis weights.

    A link goes both ways, also if only one of its nodes lists it; for links in one direction use `from_graph` with a
    networkx DiGraph.

    >>> from_neighbours({"a": ["b"], "b": ["a", "c"], "c": ["b"]}).weights()[0].round(3).tolist()
    [0.667, 0.333, 0.0]
    """
    graph: Network = nx.Graph()
    graph.add_nodes_from(neighbours)
    for node, others in neighbours.items():
        if isinstance(others, str) or not isinstance(others, Iterable):
            raise InputError(f"the neighbours of node {node} must be a list, got {others!r}")
        for other in others:
            if other not in neighbours:
                raise InputError(f"node {node} has the neighbour {other!r}, which is not a node; add it to the dict")
            graph.add_edge(node, other)
    return from_graph(graph, name="neighbours")


SUFFIXES = (".csv", ".edgelist", ".edges", ".txt")
"""Suffixes of edge lists that need no prefix `file:`."""

HEADERS = (["source", "target"], ["from", "to"], ["node1", "node2"])
"""First words of a header line, which is skipped; if all nodes are numbers, any words are a header."""


def _read_edge_list(path: str) -> tuple[Network, bool]:
    """Read a graph, and whether its links have weights. Spaces or commas separate words; nodes are sorted by name."""
    links: dict[frozenset[str], float | None] = {}
    table = [line.partition("#")[0].replace(",", " ").split() for line in _lines(path)]
    numbered = all(word.isdecimal() for words in [words for words in table if words][1:] for word in words[:2])
    for number, words in enumerate(table, start=1):
        titles = [word.lower() for word in words[:2]]
        named = titles in HEADERS or (numbered and len(table) > 1 and not any(map(str.isdigit, titles)))
        if not words or (not links and named):
            continue
        try:
            weight = float(words[2]) if len(words) == 3 else None
        except ValueError:
            words = []
        if len(words) not in (2, 3):
            raise InputError(f"line {number} of {path} is not a link; write 'u v' or 'u v weight'")
        if links.setdefault(frozenset(words[:2]), weight) != weight:
            raise InputError(f"line {number} of {path} repeats {words[0]} {words[1]} with another weight; keep one")
    names = {name for link in links for name in link}
    graph: Network = nx.Graph()
    graph.add_nodes_from(sorted(names, key=int) if all(map(str.isdigit, names)) else sorted(names))
    for link, weight in links.items():
        u, v = (*link, *link)[:2]
        graph.add_edge(u, v, **({} if weight is None else {"weight": weight}))
    return graph, any(weight is not None for weight in links.values())


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read().splitlines()
    except OSError as error:
        raise InputError(f"cannot read the edge list {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError):
        raise InputError(f"{path} is not a text file; write a line 'u v' or 'u v weight' per link") from None


def _weights(graph: Network, weight: str | None, name: str) -> Matrix:
    """W of a graph; see `from_graph`."""
    nodes = list(graph)
    if not nodes:
        raise InputError(f"{name} has no nodes; add an edge")
    if weight is None and not graph.is_directed():
        return metropolis(graph, nodes)
    if weight is None and all(w is None for *_, w in graph.edges(data="weight")):
        A = nx.to_numpy_array(graph, nodelist=nodes, weight=None).T + np.eye(len(nodes)) > 0
        return np.asarray(A / A.sum(axis=1, keepdims=True))
    weight = weight or "weight"
    bare = next(((u, v) for u, v, w in graph.edges(data=weight) if w is None), None)
    if bare is not None:
        raise InputError(
            f"all edges need a weight: edge {bare[0]} -> {bare[1]} of {name} has no {weight!r}; set it, or use "
            "from_matrices"
        )
    for u, v, w in graph.edges(data=weight):
        if not isinstance(w, Real):
            raise InputError(f"the weight of edge {u} -> {v} of {name} must be a number, got {w!r}")
    W: Matrix = np.ascontiguousarray(nx.to_numpy_array(graph, nodelist=nodes, weight=weight).T)
    for i, node in enumerate(nodes):
        if not graph.has_edge(node, node):
            W[i, i] = 1 - W[i].sum()
    return W
