"""Graphs made from the nodes' label counts, so that neighbours together have the label mix of all nodes.

They need the number of examples of each class at every node.
"""

from __future__ import annotations

from itertools import combinations, pairwise, product

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.common.randomness import generator
from quasiglobal.errors import InputError
from quasiglobal.topology.mixing import Matrix, metropolis
from quasiglobal.topology.topology import Topology, check_nodes, check_range

__all__ = ["d_cliques", "stl_fw"]

SWAPS = 1000
"""Pairs of cliques that `d_cliques` tries to improve, as in the paper."""


def stl_fw(counts: ArrayLike, peers: int, *, lam: float = 0.1) -> Topology:
    """Directed graph with at most `peers` peers whose neighbourhoods have the label mix of all nodes (STL-FW).

    B. Le Bars, A. Bellet, M. Tommasi, E. Lavoie, A.-M. Kermarrec: Refined convergence and topology learning for
    decentralized SGD with heterogeneous data. AISTATS 2023. `counts` are the nodes' numbers of examples, [n, classes].
    W minimises ‖WΠ − JΠ‖² + λ‖W − J‖², Π the nodes' label proportions, by Frank–Wolfe from W = I: each iteration adds
    a permutation, so that W is doubly stochastic.

    >>> graph = stl_fw([[8, 0], [8, 0], [0, 8], [0, 8]], peers=3)
    >>> (graph.weights() @ [1, 1, 0, 0]).round(1).tolist()
    [0.5, 0.5, 0.5, 0.5]
    """
    from scipy.optimize import linear_sum_assignment  # takes a while to import

    shares = _shares("stl-fw", counts)
    n = len(shares)
    check_range("stl-fw", "a number of peers", peers, 1, n - 1)
    check_range("stl-fw", "lam", lam, 0.0, 1e9)
    name, W = f"stl-fw:{n}:{peers}" + (f":lam={lam:g}" if lam != 0.1 else ""), np.eye(n)
    for _ in range(peers):
        gradient = (W - 1 / n) @ shares @ shares.T + lam * (W - 1 / n)
        P = np.zeros((n, n))
        P[linear_sum_assignment(gradient)] = 1
        D = P - W
        curvature = float(np.square(D @ shares).sum() + lam * np.square(D).sum())
        W = W + min(1.0, max(0.0, -float((gradient * D).sum()) / curvature)) * D if curvature else W
    try:
        return Topology(name, (W,))
    except InputError:
        raise InputError(f"{name} is not connected for these label counts; use more peers") from None


def d_cliques(counts: ArrayLike, size: int, *, seed: int = 0) -> Topology:
    """Cliques of `size` nodes with the label mix of all nodes, joined in a ring; Metropolis weights (D-Cliques).

    A. Bellet, A.-M. Kermarrec, E. Lavoie: D-Cliques: compensating for data heterogeneity with topology in decentralized
    federated learning. SRDS 2022. `counts` are the nodes' numbers of examples, [n, classes]. Random cliques are
    improved by swaps of two nodes that lower their skew. The size is usually the number of classes. Without the paper's
    averaging of gradients inside a clique, which is not a property of the graph.

    >>> graph = d_cliques([[8, 0], [8, 0], [8, 0], [0, 8], [0, 8], [0, 8]], size=2)
    >>> [graph.neighbours(i) for i in range(3)]
    [(2, 4), (3, 5), (0, 5)]
    """
    shares = _shares("d-cliques", counts)
    n, rng = len(shares), generator(17, seed, len(shares))
    check_range("d-cliques", "a clique size", size, 2, n)
    check_range("d-cliques", "a seed", seed, 0, 2**63 - 1)
    cliques = [part.tolist() for part in np.array_split(rng.permutation(n), -(-n // size))]
    for _ in range(SWAPS if len(cliques) > 1 else 0):
        a, b = rng.choice(len(cliques), size=2, replace=False)
        _swap(cliques[a], cliques[b], shares, rng)
    graph = nx.Graph(edge for clique in cliques for edge in combinations(clique, 2))
    graph.add_nodes_from(range(n))
    for one, other in pairwise([*cliques, cliques[0]] if len(cliques) > 2 else cliques):
        ends = [min(clique, key=lambda node: (graph.degree(node), node)) for clique in (one, other)]
        graph.add_edge(*ends)
    name = f"d-cliques:{n}:{size}" + (f":seed={seed}" if seed else "")
    return Topology(name, (metropolis(graph, range(n)),))


def _swap(one: list[int], other: list[int], shares: Matrix, rng: np.random.Generator) -> None:
    """Swap a random pair of nodes of two cliques among the pairs that lower the sum of their skews, if any."""
    mean = shares.mean(axis=0)
    (a, b), pairs = (shares[clique].sum(axis=0) for clique in (one, other)), list(product(one, other))
    moved = np.array([shares[v] - shares[u] for u, v in pairs])
    skew = np.abs((a + moved) / len(one) - mean).sum(axis=1) + np.abs((b - moved) / len(other) - mean).sum(axis=1)
    now = np.abs(a / len(one) - mean).sum() + np.abs(b / len(other) - mean).sum()
    better = np.flatnonzero(skew < now - 1e-12)
    if len(better):
        u, v = pairs[rng.choice(better)]
        one[one.index(u)], other[other.index(v)] = v, u


def _shares(name: str, counts: ArrayLike) -> Matrix:
    """The label proportions of each node."""
    found: NDArray[np.float64] = np.asarray(counts, dtype=np.float64)
    if found.ndim != 2 or found.size == 0 or not np.isfinite(found).all() or (found < 0).any():
        raise InputError(f"{name} needs the number of examples of each node and class, [n, classes]")
    check_nodes(name, len(found), 2, "complete(1)")
    if (empty := np.flatnonzero(found.sum(axis=1) == 0)).size:
        raise InputError(f"{name} needs at least one example at each node; node {empty[0]} has none")
    return np.asarray(found / found.sum(axis=1, keepdims=True))
