"""Mixing matrices: Metropolis weights of a graph, and validity checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import networkx as nx
import numpy as np
from numpy.typing import NDArray

from quasiglobal.errors import InputError

Matrix = NDArray[np.float64]

TOLERANCE = 1e-9
"""Rounding tolerance for row sums (against 1) and for symmetry (W against its transpose)."""


def metropolis(graph: nx.Graph[Any], nodes: Sequence[Any]) -> Matrix:
    """Metropolis weights: 1/(1 + the larger degree) on each edge, the rest on the diagonal.

    Symmetric and doubly stochastic.
    """
    A = nx.to_numpy_array(graph, nodelist=nodes, weight=None)
    np.fill_diagonal(A, 0)
    A = (A > 0).astype(np.float64)
    degree = A.sum(axis=1)
    W = A / (1 + np.maximum(degree[:, None], degree[None, :]))
    return np.asarray(W + np.diag(1 - W.sum(axis=1)))


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


def edge_list_lines(path: str) -> list[str]:
    """Read the lines of an edge list."""
    try:
        with open(path, encoding="utf-8-sig") as file:
            return file.read().splitlines()
    except OSError as error:
        raise InputError(f"cannot read the edge list {path}: {error.strerror}") from None
    except (UnicodeDecodeError, ValueError):
        raise InputError(f"{path} is not a text file; write a line 'u v' or 'u v weight' per link") from None
