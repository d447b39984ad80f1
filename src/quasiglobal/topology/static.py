"""Fixed graphs, with one W for all steps, and two alternating trees."""

from __future__ import annotations

import math
from collections.abc import Callable

import networkx as nx
import numpy as np

from quasiglobal.common.randomness import generator
from quasiglobal.errors import InputError
from quasiglobal.topology.mixing import Network, metropolis
from quasiglobal.topology.topology import Topology, check_nodes, check_range

__all__ = [
    "chain", "complete", "double_trees", "erdos_renyi", "exponential", "hypercube", "k_regular", "ring", "small_world",
    "social", "star", "torus", "tree",
]  # fmt: skip

TRIES = 1000
"""Maximum number of draws of a random graph until one is connected."""


def ring(n: int) -> Topology:
    """Ring of n ≥ 3 nodes; weight 1/3 for each neighbour and the node itself."""
    check_nodes("ring", n, 3, f"complete({n})" if n in (1, 2) else "ring(3)")
    W = sum(np.roll(np.eye(n), shift, axis=1) for shift in (-1, 0, 1)) / 3
    return Topology(f"ring:{n}", (np.asarray(W),))


def chain(n: int) -> Topology:
    """Path of n ≥ 2 nodes, Metropolis weights."""
    check_nodes("chain", n, 2, "complete(1)")
    return Topology(f"chain:{n}", (metropolis(nx.path_graph(n), range(n)),))


def torus(n: int) -> Topology:
    """Square grid of n = side² ≥ 9 nodes, opposite edges joined; weight 1/5 for each neighbour and the node itself."""
    check_nodes("torus", n, 0, "torus(9)")
    side = math.isqrt(max(n, 0))
    if side * side != n or side < 3:
        near = max(3, round(math.sqrt(max(n, 0)))) ** 2
        raise InputError(f"torus needs n = side * side with side >= 3, got {n}; use torus({near})")
    graph = nx.relabel_nodes(nx.grid_2d_graph(side, side, periodic=True), lambda at: at[0] * side + at[1])
    return Topology(f"torus:{n}", (metropolis(graph, range(n)),))


def complete(n: int) -> Topology:
    """Complete graph: every node with every other, weights 1/n; complete(1) is a single node."""
    check_nodes("complete", n, 1, "complete(1)")
    return Topology(f"complete:{n}", (np.full((n, n), 1 / n),))


def star(n: int) -> Topology:
    """Star: node 0 in the centre and n − 1 ≥ 1 leaves, Metropolis weights."""
    check_nodes("star", n, 2, "complete(1)")
    return Topology(f"star:{n}", (metropolis(nx.star_graph(n - 1), range(n)),))


def tree(n: int) -> Topology:
    """Binary tree: the parent of node i ≥ 1 is node ⌊(i − 1)/2⌋; Metropolis weights.

    >>> tree(7).neighbours(1)
    (0, 3, 4)
    """
    check_nodes("tree", n, 2, "complete(1)")
    graph = nx.Graph((i, (i - 1) // 2) for i in range(1, n))
    return Topology(f"tree:{n}", (metropolis(graph, range(n)),))


def double_trees(n: int) -> Topology:
    """Two binary trees in turn: the parent of node i ≥ 1 is node ⌊i/2⌋, then the same with the nodes in reverse order.

    T. Vogels, L. He, A. Koloskova, T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: RelaySum for decentralized deep
    learning on heterogeneous data. NeurIPS 2021. Inner nodes of one tree are mostly leaves of the other, which evens
    out the traffic. `relaysgd` uses both trees in every step, each for half of the coordinates. Metropolis weights.

    >>> [double_trees(8).neighbours(1, t) for t in (1, 2)]
    [(0, 2, 3), (4,)]
    """
    check_nodes("double-trees", n, 2, "complete(1)")
    W = metropolis(nx.Graph((i, i // 2) for i in range(1, n)), range(n))
    return Topology(f"double-trees:{n}", (W, W[::-1, ::-1].copy()))


def hypercube(n: int) -> Topology:
    """Hypercube of n = 2^p nodes: neighbours differ in one binary digit; weight 1/(p + 1) for each and the node itself.

    >>> hypercube(8).neighbours(0)
    (1, 2, 4)
    """
    check_nodes("hypercube", n, 2, "complete(1)")
    if n & (n - 1):
        raise InputError(f"hypercube needs n = 2^p, got {n}; use hypercube({1 << round(math.log2(n))})")
    graph = nx.Graph((i, i ^ 1 << k) for i in range(n) for k in range(n.bit_length() - 1))
    return Topology(f"hypercube:{n}", (metropolis(graph, range(n)),))


def exponential(n: int) -> Topology:
    """Node i averages with the nodes i − 1, i − 2, i − 4, …, i − 2^(p − 1), p = ⌈log₂ n⌉; weights 1/(p + 1).

    B. Ying, K. Yuan, Y. Chen, H. Hu, P. Pan, W. Yin: Exponential graph is provably efficient for decentralized deep
    training. NeurIPS 2021. `one_peer_exponential` takes these neighbours in turn, one at each step.

    >>> exponential(8).neighbours(0)
    (4, 6, 7)
    """
    check_nodes("exponential", n, 2, "complete(1)")
    hops = [0, *(1 << k for k in range((n - 1).bit_length()))]
    W = sum(np.roll(np.eye(n), hop, axis=0) for hop in hops) / len(hops)
    return Topology(f"exponential:{n}", (np.asarray(W),))


def social() -> Topology:
    """The paper's social network: the Davis Southern women graph, 32 nodes, 89 edges, Metropolis weights."""
    graph = nx.davis_southern_women_graph()
    return Topology("social", (metropolis(graph, list(graph)),))


def erdos_renyi(n: int, chance: float, *, seed: int = 0) -> Topology:
    """Random graph in which each pair of nodes is linked with probability `chance`; connected, Metropolis weights.

    P. Erdős, A. Rényi: On random graphs. 1959. A graph that is not connected is drawn again.
    """
    check_nodes("erdos-renyi", n, 2, "complete(1)")
    check_range("erdos-renyi", "a probability of each link", chance, 0.0, 1.0)
    return _drawn(
        f"erdos-renyi:{n}:{chance:g}", n, seed, lambda key: nx.gnp_random_graph(n, chance, seed=key),
        f"use a larger probability, such as {min(1.0, math.ceil(200 * math.log(n) / n) / 100):g}",
    )


def small_world(n: int, peers: int, chance: float, *, seed: int = 0) -> Topology:
    """Ring whose nodes know the `peers` nearest nodes; the far end of each link moves with probability `chance`.

    D. J. Watts, S. H. Strogatz: Collective dynamics of small-world networks. Nature 1998. Connected, Metropolis
    weights.
    """
    check_nodes("small-world", n, 4, "ring(3)")
    check_range("small-world", "a number of peers", peers, 2, n - 1)
    check_range("small-world", "a probability that a link moves", chance, 0.0, 1.0)
    if peers % 2:
        raise InputError(f"small-world needs an even number of peers, got {peers}; use {peers - 1}")
    return _drawn(
        f"small-world:{n}:{peers}:{chance:g}", n, seed, lambda key: nx.watts_strogatz_graph(n, peers, chance, seed=key),
        "use more peers",
    )


def k_regular(n: int, peers: int, *, seed: int = 0) -> Topology:
    """Random graph in which every node has `peers` neighbours; connected, weights 1/(peers + 1).

    >>> graph = k_regular(10, 3)
    >>> {len(graph.neighbours(i)) for i in range(10)}
    {3}
    """
    check_nodes("k-regular", n, 3, "complete(2)")
    check_range("k-regular", "a number of peers", peers, 2, n - 1)
    if n * peers % 2:
        raise InputError(f"k-regular needs an even number n * peers, got {n} * {peers}; use one peer or node more")
    def draw(key: int) -> Network:
        if 2 * peers < n:
            return nx.random_regular_graph(peers, n, seed=key)
        return nx.complement(nx.random_regular_graph(n - 1 - peers, n, seed=key))      # a dense graph is hard to draw

    return _drawn(f"k-regular:{n}:{peers}", n, seed, draw, "use more peers")


def _drawn(name: str, n: int, seed: int, draw: Callable[[int], Network], remedy: str) -> Topology:
    """The first connected graph among those of the keys of (seed, n)."""
    check_range(name.partition(":")[0], "a seed", seed, 0, 2**63 - 1)
    rng = generator(seed, n)
    for _ in range(TRIES):
        graph = draw(int(rng.integers(2**31)))
        if nx.is_connected(graph):
            return Topology(name if seed == 0 else f"{name}:seed={seed}", (metropolis(graph, range(n)),))
    raise InputError(f"{name} is not connected in any of {TRIES} draws; {remedy}")
