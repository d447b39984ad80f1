"""Who holds which examples: disjoint, fixed for the whole run, a function of (labels, n, α, seed).

M. Yurochkin et al.: Bayesian nonparametric federated learning of neural networks. ICML 2019.
T.-M. H. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution. 2019.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from quasiglobal.errors import InputError
from quasiglobal.tasks.randomness import generator

Indices = NDArray[np.int64]

GROUP = 10
"""The experiments behind the paper's tables split the nodes into groups of at most ten."""


def dirichlet(labels: Indices, n: int, alpha: float, seed: int) -> list[Indices]:
    """Each class is dealt out among the nodes in Dirichlet(α) shares; all nodes end up with equally many.

    As in the experiments behind the paper's tables: nodes come in groups of at most ten, each with its own
    random slice of the data of proportional size. Within a group, a node that already has the group's mean
    gets no more, and the draw is repeated until the smallest list has half the mean. The lists, one after
    the other, are then cut into n equal slices; the remainder, fewer than n examples, is left out.

    >>> parts = dirichlet(np.repeat([0, 1], 50), n=4, alpha=0.1, seed=0)
    >>> [len(part) for part in parts], len(np.unique(np.concatenate(parts)))
    ([25, 25, 25, 25], 100)
    """
    if not 0 < alpha < float("inf"):
        raise InputError(f"alpha must be > 0, got {alpha}; 0.1 is very heterogeneous, 10 nearly uniform")
    if not 1 <= n <= len(labels):
        raise InputError(f"{len(labels)} examples cannot be split among {n} nodes; take fewer nodes")
    rng = generator(seed, n)
    shuffled = rng.permutation(len(labels))
    sizes = [min(GROUP, n - first) for first in range(0, n, GROUP)]
    ends = (np.cumsum(sizes) * len(labels) // n).tolist()
    lists: list[Indices] = []
    for size, start, end in zip(sizes, [0, *ends], ends, strict=False):
        lists += _deal(shuffled[start:end], labels, size, alpha, rng)
    each = len(labels) // n
    return list(np.concatenate(lists)[: each * n].reshape(n, each))


def _deal(
    examples: Indices, labels: Indices, n: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """One group's lists, dealt class by class."""
    mean = len(examples) / n
    while True:
        parts: list[list[Indices]] = [[] for _ in range(n)]
        counts = np.zeros(n)
        for label in np.unique(labels[examples]):
            members = rng.permutation(examples[labels[examples] == label])
            shares = rng.dirichlet(np.full(n, alpha)) * (counts < mean)
            if shares.sum() == 0:
                shares = (counts < mean).astype(np.float64)
            cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
            counts = np.array([sum(map(len, part)) for part in parts])
        if counts.min() >= mean / 2:
            return [np.concatenate(part) for part in parts]
