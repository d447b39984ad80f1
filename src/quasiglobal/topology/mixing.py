"""Mixing matrices: Metropolis weights, weights for nodes with unequal shares, checks, and spectral properties."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.errors import InputError

Matrix = NDArray[np.float64]

Network: TypeAlias = "nx.Graph[Hashable]"
"""A networkx graph; its nodes may be anything hashable."""

TOLERANCE = 1e-9
"""Rounding tolerance for row sums (against 1) and for symmetry (W against its transpose)."""


def metropolis(graph: Network, nodes: Sequence[Hashable]) -> Matrix:
    """Metropolis weights: 1/(1 + the larger degree) on each edge, the rest on the diagonal.

    Symmetric and doubly stochastic.
    """
    A = nx.to_numpy_array(graph, nodelist=nodes, weight=None)
    np.fill_diagonal(A, 0)
    A = (A > 0).astype(np.float64)
    degree = A.sum(axis=1)
    W = A / (1 + np.maximum(degree[:, None], degree[None, :]))
    return np.asarray(W + np.diag(1 - W.sum(axis=1)))


def column_stochastic(W: Matrix) -> Matrix:
    """P for a push along W's links: W if its columns sum to 1; otherwise 1/(1 + j's receivers) in column j.

    >>> column_stochastic(np.array([[1, 0, 0], [0.5, 0.5, 0], [0.5, 0, 0.5]]))[:, 0].round(3).tolist()
    [0.333, 0.333, 0.333]
    """
    if np.allclose(W.sum(axis=0), 1, rtol=0, atol=TOLERANCE):
        return W
    shares = (W != 0) | np.eye(len(W), dtype=bool)
    return np.asarray(shares / shares.sum(axis=0))


def weighted(W: Matrix, shares: Matrix, name: str) -> Matrix:
    """W for nodes that count by their shares p: w_ij p_j / max(D_i, D_j), D_i = Σ_j w_ij p_j, the rest on the diagonal.

    p_i w_ij = p_j w_ji, so pᵀ W = pᵀ: mixing keeps Σ p_i x_i. Equal shares leave W as it is. A pair averages with the
    weights p_j/(p_i + p_j), and a complete graph takes the exact mean Σ p_i x_i. A row needs the shares of the node's
    neighbours and of their neighbours.

    >>> weighted(np.full((2, 2), 0.5), np.array([0.75, 0.25]), "pair").tolist()
    [[0.75, 0.25], [0.75, 0.25]]
    """
    if not np.allclose(W, W.T, rtol=0, atol=TOLERANCE) or W.min() < -TOLERANCE:
        raise InputError(
            f"nodes can count unequally only if links go both ways, with equal weights >= 0, which {name} has not; use "
            f"ring:{len(W)}, base:{len(W)}:1 or matching:{len(W)}, or leave out weights"
        )
    D = W @ shares
    flow = W * shares / np.maximum(D[:, None], D)
    np.fill_diagonal(flow, 0)
    return np.asarray(flow + np.diag(1 - flow.sum(axis=1)))


def check_matrix(W: Matrix, name: str) -> None:
    """Raise unless W is square and finite and each row sums to 1."""
    if W.ndim != 2 or W.shape[0] != W.shape[1] or W.size == 0:
        raise InputError(f"{name}: each W must be a square matrix, got shape {list(W.shape)}")
    if not np.isfinite(W).all():
        raise InputError(f"{name}: W has an entry that is not a number; every weight must be finite")
    sums = W.sum(axis=1)
    worst = int(np.abs(sums - 1).argmax())
    if abs(sums[worst] - 1) > TOLERANCE:
        raise InputError(
            f"{name}: each row of W must sum to 1, but row {worst} sums to {sums[worst]:.9g}; "
            "put the rest on its diagonal"
        )


def check_connected(links: NDArray[np.bool_], name: str) -> None:
    """Raise unless the graph of links [receiver, sender] is strongly connected."""
    graph = nx.from_numpy_array(links.T, create_using=nx.DiGraph)
    if not nx.is_strongly_connected(graph):
        parts = nx.number_strongly_connected_components(graph)
        raise InputError(
            f"{name} is not connected: it falls into {parts} parts that cannot all reach each other; add an edge"
        )


def entries(W: Matrix) -> list[list[float]]:
    """The non-zero entries of W as [row, column, weight].

    >>> from_entries(entries(np.eye(2)), 2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return [[int(i), int(j), float(W[i, j])] for i, j in zip(*np.nonzero(W), strict=True)]


def from_entries(found: Sequence[Sequence[float]], n: int) -> Matrix:
    """W of n nodes from its non-zero entries."""
    W = np.zeros((n, n))
    for i, j, w in found:
        W[int(i), int(j)] = w
    return W


def stochastic(matrices: Sequence[ArrayLike] | Matrix, name: str) -> tuple[Matrix, ...]:
    """Mixing matrices from arrays; the diagonal absorbs float32 rounding errors."""
    try:
        one = isinstance(matrices, np.ndarray) and matrices.ndim == 2
        arrays = [np.array(W, dtype=np.float64) for W in ([matrices] if one else matrices)]
    except (TypeError, ValueError):
        raise InputError(f"{name}: each W must be a square array of numbers") from None
    for W in arrays:
        if W.ndim == 2 and W.shape[0] == W.shape[1] and np.abs(W.sum(axis=1) - 1).max(initial=0) < 1e-6:
            W[np.diag_indices(len(W))] += 1 - W.sum(axis=1)
    return tuple(arrays)


# ---------------------------------------------------------------------- spectral properties of a sequence of matrices


DOUBLINGS = 60
"""Doublings of a period after which a sequence that has not mixed counts as never mixing."""


Alike = Literal["", "rotated", "permuted"]
"""Symmetry of random graphs: none, under the shift of all nodes i → i + 1, or under all permutations of nodes."""


def shrinkage(matrices: Sequence[Matrix], first: Matrix | None = None, alike: Alike = "") -> Matrix:
    """The eigenvalues, in rising order, of the mean of (W − J)ᵀ(W − J): the squares λ² for one symmetric W.

    J is vvᵀ for the unit vector `first` that every W keeps, by default 1/√n everywhere. If `matrices` are a sample of
    graphs with the symmetry `alike`, it is imposed on their mean, whose largest eigenvalue is too large otherwise.
    """
    J = 1 / len(matrices[0]) if first is None else np.outer(first, first)
    squares = {id(W): (W - J).T @ (W - J) for W in matrices}
    mean = np.asarray(sum(squares[id(W)] for W in matrices) / len(matrices))
    n = len(mean)
    if alike == "permuted":                                 # then it is a multiple of I − J
        return np.asarray([0.0] + [np.trace(mean) / (n - 1)] * (n - 1))
    if alike == "rotated":                                  # then it is circulant
        row = np.mean([np.roll(values, -i) for i, values in enumerate(mean)], axis=0)
        return np.sort(np.fft.fft(row).real)
    return np.asarray(np.linalg.eigvalsh(mean), dtype=np.float64)


def mixing_rate(matrices: Sequence[Matrix], first: Matrix | None = None, alike: Alike = "") -> float:
    """ρ of doubly stochastic W: 1 − λ_max of the mean of (W − J)ᵀ(W − J); see `shrinkage`."""
    return min(max(1 - float(shrinkage(matrices, first, alike)[-1]), 0.0), 1.0)


def lasting_noise(matrices: Sequence[Matrix]) -> float:
    """ν of a sequence of doubly stochastic W that repeats: see `Topology.nu`.

    The covariance of the nodes' distances to their mean, C ← W(C + I − J)Wᵀ, has a limit at each step of the period.
    """
    n = len(matrices[0])
    apart = np.eye(n) - 1 / n

    def step(C: Matrix, W: Matrix) -> Matrix:
        return C + apart if _is_identity(W) else W @ (C + apart) @ W.T

    P, C = apart, np.zeros((n, n))
    for W in matrices:                                      # over a period, C ← P C Pᵀ + the present C
        P, C = (P if _is_identity(W) else W @ P), step(C, W)
    for _ in range(DOUBLINGS):
        if np.abs(P).max() < 1e-12:
            break
        P, C = P @ P, C + P @ C @ P.T
    else:
        return float("inf")
    total = 0.0
    for W in matrices:
        C = step(C, W)
        total += float(np.trace(C))
    return total / (n * len(matrices))


def steps_to_consensus(matrices: Sequence[Matrix], shares: Matrix | None = None) -> int | None:
    """The first m with W(m) ⋯ W(1) = J, whose rows are the nodes' shares; None if there is none in the sequence."""
    product, mean = np.eye(len(matrices[0])), 1 / len(matrices[0]) if shares is None else shares
    for m, W in enumerate(matrices, start=1):
        product = product if _is_identity(W) else W @ product
        if np.abs(product - mean).max() < TOLERANCE:
            return m
    return None


def _is_identity(W: Matrix) -> bool:
    return bool((np.eye(len(W)) == W).all())
