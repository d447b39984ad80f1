"""Topologies: graphs and their mixing matrices W(t), by constructor, by name (`parse`), or of a user's own."""

from quasiglobal.topology.finite_time import base, one_peer_exponential
from quasiglobal.topology.given import from_file, from_graph, from_matrices, from_neighbours
from quasiglobal.topology.labels import d_cliques, stl_fw
from quasiglobal.topology.parsing import parse
from quasiglobal.topology.random import RandomTopology, epidemic, equidyn, from_function, matching
from quasiglobal.topology.static import (
    chain,
    complete,
    double_trees,
    erdos_renyi,
    exponential,
    hypercube,
    k_regular,
    ring,
    small_world,
    social,
    star,
    torus,
    tree,
)
from quasiglobal.topology.topology import Topology

__all__ = [
    "RandomTopology", "Topology", "base", "chain", "complete", "d_cliques", "double_trees", "epidemic", "equidyn",
    "erdos_renyi", "exponential", "from_file", "from_function", "from_graph", "from_matrices", "from_neighbours",
    "hypercube", "k_regular", "matching", "one_peer_exponential", "parse", "ring", "small_world", "social", "star",
    "stl_fw", "torus", "tree",
]
