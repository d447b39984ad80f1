"""Partition of the examples among the nodes: fixed for a run, a function of (labels, n, α, seed).

The parts are disjoint, except with `whole`.

M. Yurochkin et al.: Bayesian nonparametric federated learning of neural networks. ICML 2019.
T.-M. H. Hsu, H. Qi, M. Brown: Measuring the effects of non-identical data distribution. 2019.
"""

from __future__ import annotations

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.common.randomness import generator
from quasiglobal.data.dataset import Indices
from quasiglobal.errors import InputError, unknown

GROUP = 10
"""Largest group of nodes in `dirichlet`, as in the experiments behind the paper's tables."""

REDRAWS = 50_000
"""Maximum number of draws for a group: four classes among ten nodes at α = 0.1 need 3,600 on average."""


Split = Callable[[NDArray[np.generic], int, np.random.Generator], Sequence[ArrayLike]]
"""A user's own partition: (targets, number of nodes, random generator) → one index array per node."""


def split(
    labels: ArrayLike,
    n: int,
    kind: str | Split = "dirichlet",
    alpha: float = 1.0,
    seed: int = 0,
    columns: Mapping[str, NDArray[np.generic]] | None = None,
) -> list[Indices]:
    """Example indices of each of n nodes, by the name of a partition or by a function (labels, n, rng).

        dirichlet        as in the experiments behind the paper's tables; equal sizes
        dirichlet-plain  as in the paper's text: each node draws its own class mix from Dirichlet(α)
        iid              a random split; equal sizes
        shards:K         sorted by class, cut into K pieces per node, assigned at random; equal sizes
        by:COLUMN        natural clients: one node per value of the column; it needs exactly n values
        whole            every node has all examples, for nodes that bring their own data

    >>> [len(part) for part in split(np.repeat([0, 1], 50), 4, "shards:2")]
    [24, 24, 24, 24]
    >>> split(np.arange(6), 2, lambda labels, n, rng: np.split(rng.permutation(6), n))
    [array([2, 5, 4]), array([3, 1, 0])]
    """
    labels = np.asarray(labels)
    if not isinstance(kind, str):
        try:
            parts = kind(labels, n, generator(seed, n))
        except Exception as error:
            raise InputError(
                f"the partition fails: {type(error).__name__}: {error}; it has to be a function (targets, n, rng)"
            ) from None
        return _checked(parts, n, len(labels))
    if kind == "whole":
        return [np.arange(len(labels))] * n
    if n < 1:
        raise InputError(f"the number of nodes must be >= 1, got {n}")
    if n > len(labels):
        raise InputError(f"{len(labels)} examples cannot be split among {n} nodes; use fewer nodes")
    name, _, argument = kind.partition(":")
    if name == "by":
        return by_column(argument, columns or {}, n)
    if kind == "iid":
        return _equal([generator(seed, n).permutation(len(labels))], n)
    if (kind in DIRICHLET or name == "shards") and (labels.ndim != 1 or labels.dtype.kind not in "iu"):
        raise InputError(
            f"{kind} needs one class number per example, but a target is {labels.dtype} {list(labels.shape[1:])}; use "
            "the partition iid, by:COLUMN, a function (targets, n, rng), or a list with one data set per node"
        )
    if name == "shards":
        if not re.fullmatch(r"[1-9][0-9]{0,8}", argument):
            raise InputError(f"shards needs the number of shards per node, as in shards:2, got {argument[:50]!r}")
        return shards(labels, n, int(argument), seed)
    if kind in DIRICHLET:
        if not 0 < alpha < float("inf"):
            raise InputError(f"alpha must be > 0, got {alpha}; 0.1 is very heterogeneous, 10 nearly uniform")
        return DIRICHLET[kind](labels, n, alpha, seed)
    raise unknown("partition", name, [*DIRICHLET, "iid", "shards", "by", "whole"])


def dirichlet(labels: Indices, n: int, alpha: float, seed: int) -> list[Indices]:
    """Distribute each class among the nodes in Dirichlet(α) proportions; all nodes get the same number of examples.

    As in the experiments behind the paper's tables: nodes form groups of at most ten. Each group has its own
    random slice of the data, of proportional size. Within a group, a node that already has the group's mean
    size gets no more examples, and the draw is repeated until every node has at least half the mean size. The
    concatenated lists are then cut into n equal slices; the remainder, fewer than n examples, is dropped.

    >>> parts = dirichlet(np.repeat([0, 1], 50), n=4, alpha=0.1, seed=0)
    >>> [len(part) for part in parts], len(np.unique(np.concatenate(parts)))
    ([25, 25, 25, 25], 100)
    """
    rng = generator(seed, n)
    shuffled = rng.permutation(len(labels))
    sizes = [min(GROUP, n - first) for first in range(0, n, GROUP)]
    ends = (np.cumsum(sizes) * len(labels) // n).tolist()
    lists: list[Indices] = []
    for size, start, end in zip(sizes, [0, *ends], ends, strict=False):
        lists += _deal(shuffled[start:end], labels, size, alpha, rng)
    return _equal(lists, n)


def dirichlet_plain(labels: Indices, n: int, alpha: float, seed: int) -> list[Indices]:
    """Draw a class distribution q ~ Dirichlet(α p) per node, p the class frequencies, and sample its examples by q.

    As p sums to 1, an α here is as heterogeneous as α divided by the number of classes in `dirichlet`.
    Nodes take one example each in turn. The example's class is drawn from the node's q, among the classes that still
    have examples.
    All nodes get the same number of examples; the remainder, fewer than n, is dropped.
    """
    rng = generator(seed, n)
    classes, counts = np.unique(labels, return_counts=True)
    mixes = rng.dirichlet(alpha * counts / counts.sum(), size=n)
    stock = [rng.permutation(np.flatnonzero(labels == label)).tolist() for label in classes]
    parts: list[list[int]] = [[] for _ in range(n)]
    for _ in range(len(labels) // n):
        for part, mix in zip(parts, mixes, strict=True):
            left = mix * np.array([len(examples) > 0 for examples in stock])
            if left.sum() == 0:
                left = np.array([float(len(examples)) for examples in stock])
            part.append(stock[rng.choice(len(classes), p=left / left.sum())].pop())
    return [np.array(part, dtype=np.int64) for part in parts]


def shards(labels: Indices, n: int, pieces: int, seed: int) -> list[Indices]:
    """Cut the examples, sorted by class, into equal shards; assign `pieces` random shards to each node."""
    size = len(labels) // (n * pieces)
    if size < 1:
        raise InputError(f"{len(labels)} examples are too few for {n * pieces} shards; use fewer shards per node")
    rng = generator(seed, n)
    mixed = rng.permutation(len(labels))
    by_class = mixed[np.argsort(labels[mixed], kind="stable")][: size * n * pieces]
    dealt = rng.permutation(by_class.reshape(n * pieces, size))
    return list(dealt.reshape(n, pieces * size))


def by_column(column: str, columns: Mapping[str, NDArray[np.generic]], n: int) -> list[Indices]:
    """One node per value of the column, in sorted order. Sizes differ as in the data."""
    if column not in columns:
        raise unknown("column", column, columns)
    values, owner = np.unique(columns[column], return_inverse=True)
    if len(values) != n:
        raise InputError(
            f"column {column!r} has {len(values)} values, but there are {n} nodes; make them equal"
        )
    return [np.flatnonzero(owner == i) for i in range(n)]


DIRICHLET: dict[str, Callable[[Indices, int, float, int], list[Indices]]] = {
    "dirichlet": dirichlet,
    "dirichlet-plain": dirichlet_plain,
}


def class_counts(parts: Sequence[Indices], labels: Indices, classes: int) -> NDArray[np.int64]:
    """Number of examples per node and class, [n, classes]: the dots of the paper's figure."""
    return np.stack([np.bincount(labels[part], minlength=classes) for part in parts])


def heterogeneity(counts: NDArray[np.int64]) -> tuple[float, float]:
    """The nodes' mean label entropy in nats, and their mean total-variation distance to the overall label distribution.

    >>> heterogeneity(np.array([[10, 0], [0, 10]]))
    (0.0, 0.5)
    """
    shares = counts / counts.sum(axis=1, keepdims=True)
    whole = counts.sum(axis=0) / counts.sum()
    entropy = -(shares * np.log(np.where(shares > 0, shares, 1))).sum(axis=1).mean()
    return float(abs(entropy)), float(np.abs(shares - whole).sum(axis=1).mean() / 2)


def digest_of_parts(parts: Sequence[Indices]) -> str:
    """Short hash of a partition."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + np.asarray(part, dtype="<i8").tobytes())
    return digest.hexdigest()[:16]


def _checked(parts: Sequence[ArrayLike], n: int, examples: int) -> list[Indices]:
    try:
        arrays = [np.asarray(part).reshape(-1) for part in parts]
    except (TypeError, ValueError):
        raise InputError(f"the partition has to return one index array per node, got {type(parts).__name__}") from None
    if len(arrays) != n:
        raise InputError(f"the partition returned {len(arrays)} parts for {n} nodes; return one index array per node")
    for i, part in enumerate(arrays):
        if len(part) == 0:
            raise InputError(f"the partition gives node {i} no examples; give each node at least one")
        if part.dtype.kind not in "iu":
            raise InputError(f"the partition of node {i} has indices of type {part.dtype}; return whole numbers")
        if part.min() < 0 or part.max() >= examples:
            raise InputError(f"the partition of node {i} has an index outside 0 to {examples - 1}")
    uses = np.bincount(np.concatenate(arrays), minlength=examples)
    if more := int((uses > 1).sum()):
        warnings.warn(f"the partition uses {more} of {examples} examples more than once", stacklevel=2)
    return [part.astype(np.int64) for part in arrays]


def _equal(lists: Sequence[Indices], n: int) -> list[Indices]:
    """Concatenate the lists and cut the result into n equal slices."""
    everything = np.concatenate(lists)
    each = len(everything) // n
    return list(everything[: each * n].reshape(n, each))


def _deal(
    examples: Indices, labels: Indices, n: int, alpha: float, rng: np.random.Generator
) -> list[Indices]:
    """Distribute one group's examples among its nodes, class by class."""
    mean = len(examples) / n
    by_class = [examples[labels[examples] == label] for label in np.unique(labels[examples])]
    for _ in range(REDRAWS):
        parts: list[list[Indices]] = [[] for _ in range(n)]
        counts = np.zeros(n)
        for of_class in by_class:
            members = rng.permutation(of_class)
            shares = rng.dirichlet(np.full(n, alpha)) * (counts < mean)
            if shares.sum() == 0:
                shares = (counts < mean).astype(np.float64)
            cuts = (np.cumsum(shares / shares.sum())[:-1] * len(members)).astype(np.int64)
            for part, piece in zip(parts, np.split(members, cuts), strict=True):
                part.append(piece)
            counts = np.array([sum(map(len, part)) for part in parts])
        if counts.min() >= mean / 2:
            return [np.concatenate(part) for part in parts]
    raise InputError(
        f"in each of {REDRAWS:,} draws of Dirichlet({alpha:g}) some of {n} nodes had less than half the mean size; "
        "take a larger alpha, fewer nodes or another partition"
    )
