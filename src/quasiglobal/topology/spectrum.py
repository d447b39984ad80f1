"""Spectral facts of a sequence of mixing matrices: its speed, and the noise that it leaves between the nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

from quasiglobal.common.mixing import TOLERANCE, Matrix

DOUBLINGS = 60
"""Doublings of a period after which a sequence that has not mixed never does."""


Alike = Literal["", "rotated", "permuted"]
"""Which nodes random graphs treat alike: none, i and i + 1 for all i, or any two pairs of nodes."""


def shrinkage(matrices: Sequence[Matrix], first: Matrix | None = None, alike: Alike = "") -> Matrix:
    """The eigenvalues, in rising order, of the mean of (W − J)ᵀ(W − J): the squares λ² for one symmetric W.

    J is vvᵀ for the unit vector `first` that every W keeps, by default 1/√n everywhere. If `matrices` are a sample of
    graphs that treat nodes `alike`, so does the mean of all: the largest eigenvalue of the sample's mean is too large.
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
    for W in matrices:                                      # over a period, C ← P C Pᵀ + what it is now
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
