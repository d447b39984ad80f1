"""Topologies: a deterministic map t → W(t), t = 1, 2, …, from steps to mixing matrices.

X⁺ = W X: row i of W holds the weights of the models that node i receives, so its neighbours are the non-zeros of row i.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.common.edge_lists import SUFFIXES, graph_of_neighbours, read_edge_list
from quasiglobal.common.imports import imported, is_path
from quasiglobal.common.mixing import (
    TOLERANCE,
    Matrix,
    check_connected,
    check_matrix,
    from_entries,
    graph_weights,
    metropolis,
    stochastic,
)
from quasiglobal.common.objects import facts_of, is_own, readable
from quasiglobal.errors import InputError, unknown, whole

LARGEST = 10_000
"""Maximum number of nodes, and of steps in a period: W is a dense matrix."""


@dataclass(frozen=True, eq=False)
class Topology:
    """The mixing matrices of one period, W(1), …, W(p); W(t + p) = W(t).

    >>> graph = ring(4)
    >>> graph.weights(1)[0].round(3).tolist()
    [0.333, 0.333, 0.0, 0.333]
    >>> graph.neighbours(0), graph.period, len(graph.edges)
    ((1, 3), 1, 4)
    >>> round(one_peer_exponential(8).rho, 6)
    0.333333
    """

    name: str
    matrices: tuple[Matrix, ...]

    def __post_init__(self) -> None:
        if not self.matrices:
            raise InputError(f"{self.name} has no matrix; give at least one W")
        if self.period > LARGEST:
            raise InputError(f"{self.name} has a period of {self.period} steps; the maximum is {LARGEST}")
        for W in {id(W): W for W in self.matrices}.values():
            check_matrix(W, self.name)
        if len({W.shape for W in self.matrices}) > 1:
            raise InputError(f"{self.name}: all W must be of one size")
        check_connected(self._links(), self.name)

    def __eq__(self, other: object) -> bool:
        """Whether two topologies have equal matrices at every step, whatever their names."""
        if not isinstance(other, Topology):
            return NotImplemented
        return self.matrices is other.matrices or self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of one period of matrices; equal for equal topologies.

        >>> parse("every:1/ring:4").fingerprint == ring(4).fingerprint != ring(5).fingerprint
        True
        """
        words = [len(W).to_bytes(8, "little") + (W + 0.0).astype("<f8").tobytes() for W in self.matrices]  # -0.0 is 0.0
        periods = (p for p in range(1, len(words) + 1) if words == words[:p] * (len(words) // p))
        return hashlib.sha256(b"".join(words[: next(periods)])).hexdigest()[:16]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Topology {self.name}: n = {self.n}, period {self.period}>"

    @property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.matrices[0])

    @property
    def period(self) -> int:
        """Number of steps after which W repeats; 1 for a fixed graph."""
        return len(self.matrices)

    def weights(self, t: int = 1) -> Matrix:
        """W at step t = 1, 2, …, as a fresh [n, n] array."""
        if t < 1:
            raise InputError(f"steps count from 1, got t = {t}")
        return self.matrices[(t - 1) % self.period].copy()

    def neighbours(self, i: int, t: int | None = None) -> tuple[int, ...]:
        """The nodes that node i receives from at step t, or over a whole period."""
        return tuple(np.flatnonzero(self._links(t)[i]).tolist())

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges over a period: pairs i < j if every W is symmetric, else (sender, receiver)."""
        receivers, senders = np.nonzero(self._links())
        pairs = zip(senders.tolist(), receivers.tolist(), strict=True)
        return tuple(sorted((j, i) for j, i in pairs if j < i or not self.is_symmetric))

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether every W equals its transpose."""
        return all(np.allclose(W, W.T, rtol=0, atol=TOLERANCE) for W in self.matrices)

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether the columns also sum to 1, so that mixing keeps the nodes' mean, and no weight is negative."""
        return self.keeps_mean and all(W.min() >= -TOLERANCE for W in self.matrices)

    @cached_property
    def keeps_mean(self) -> bool:
        """Whether the columns of every W sum to 1."""
        return all(np.allclose(W.sum(axis=0), 1, rtol=0, atol=TOLERANCE) for W in self.matrices)

    @property
    def lambda_2(self) -> float | None:
        """The second largest eigenvalue of a fixed symmetric W."""
        return None if self._eigenvalues is None or self.n < 2 else float(self._eigenvalues[-2])

    @property
    def lambda_min(self) -> float | None:
        """The smallest eigenvalue of a fixed symmetric W. D² needs it above −1/3."""
        return None if self._eigenvalues is None else float(self._eigenvalues[0])

    @cached_property
    def rho(self) -> float | None:
        """The paper's ρ: mixing multiplies ‖X − X̄‖² by at most 1 − ρ, on average over a period.

        1 − σ₂(W)² for a fixed W; in general 1 − λ_max of the mean of (W − J)ᵀ(W − J) over a period. Defined
        for doubly stochastic W only.
        """
        if not self.is_doubly_stochastic:
            return None
        J = np.full((self.n, self.n), 1 / self.n)
        shrink = sum((W - J).T @ (W - J) for W in self.matrices) / self.period
        rho = 1 - float(np.linalg.eigvalsh(shrink)[-1])
        return min(max(rho, 0.0), 1.0)

    @property
    def largest_beta(self) -> float | None:
        """The largest momentum that the paper's theorem covers: β/(1 − β) ≤ ρ/21."""
        return None if self.rho is None else self.rho / (21 + self.rho)

    def bytes_per_step(self, d: int, bytes_per_number: int = 4) -> float:
        """Bytes that a node sends to mix a d-parameter model once, averaged over nodes and a period."""
        sent = sum(int(self._links(t).sum()) for t in range(1, self.period + 1))
        return sent * d * bytes_per_number / (self.n * self.period)

    def lazy(self) -> Topology:
        """(I + W)/2: the same neighbours with half the weights; no eigenvalue is below 0 if W is symmetric."""
        return Topology(f"lazy/{self.name}", tuple((np.eye(self.n) + W) / 2 for W in self.matrices))

    def every(self, k: int) -> Topology:
        """Gossip at every k-th step; W = I in between (local steps)."""
        if whole(k) is None or k < 1 or k * self.period > LARGEST:
            raise InputError(
                f"every needs a whole number of steps >= 1, and at most {LARGEST} in a period, got {k}"
            )
        local = [np.eye(self.n)] * (k - 1)
        steps = [W for gossip in self.matrices for W in (*local, gossip)]
        return Topology(f"every:{k}/{self.name}", tuple(steps))

    def _links(self, t: int | None = None) -> NDArray[np.bool_]:
        """Boolean [n, n]: whether node i receives from another node j at step t, or at any step of a period."""
        chosen = self.matrices if t is None else [self.weights(t)]
        links = np.any([W != 0 for W in {id(W): W for W in chosen}.values()], axis=0)
        np.fill_diagonal(links, False)
        return np.asarray(links)

    @cached_property
    def _eigenvalues(self) -> Matrix | None:
        if self.period > 1 or not self.is_symmetric:
            return None
        return np.asarray(np.linalg.eigvalsh(self.matrices[0]), dtype=np.float64)


def ring(n: int) -> Topology:
    """Ring of n ≥ 3 nodes; weight 1/3 for each neighbour and the node itself."""
    if _nodes("ring", n) < 3:
        raise InputError(f"ring needs n >= 3, got {n}; use {f'complete({n})' if n > 0 else 'ring(3)'}")
    W = sum(np.roll(np.eye(n), shift, axis=1) for shift in (-1, 0, 1)) / 3
    return Topology(f"ring:{n}", (np.asarray(W),))


def torus(n: int) -> Topology:
    """Square grid of n = side² ≥ 9 nodes, opposite edges joined; weight 1/5 for each neighbour and the node itself."""
    side = math.isqrt(max(_nodes("torus", n), 0))
    if side * side != n or side < 3:
        near = max(3, round(math.sqrt(max(n, 0)))) ** 2
        raise InputError(f"torus needs n = side * side with side >= 3, got {n}; use torus({near})")
    graph = nx.relabel_nodes(nx.grid_2d_graph(side, side, periodic=True), lambda at: at[0] * side + at[1])
    return Topology(f"torus:{n}", (metropolis(graph, range(n)),))


def complete(n: int) -> Topology:
    """Complete graph: every node with every other, weights 1/n; complete(1) is a single node."""
    if _nodes("complete", n) < 1:
        raise InputError(f"complete needs n >= 1, got {n}")
    return Topology(f"complete:{n}", (np.full((n, n), 1 / n),))


def star(n: int) -> Topology:
    """Star: node 0 in the centre and n − 1 ≥ 1 leaves, Metropolis weights."""
    if _nodes("star", n) < 2:
        raise InputError(f"star needs n >= 2, got {n}; use complete(1)")
    return Topology(f"star:{n}", (metropolis(nx.star_graph(n - 1), range(n)),))


def social() -> Topology:
    """The paper's social network: the Davis Southern women graph, 32 nodes, 89 edges, Metropolis weights."""
    graph = nx.davis_southern_women_graph()
    return Topology("social", (metropolis(graph, list(graph)),))


def one_peer_exponential(n: int) -> Topology:
    """At step t, node i averages only with node i − 2^((t − 1) mod p), p = ⌈log₂ n⌉.

    M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning.
    ICML 2019.
    """
    if _nodes("one-peer-exponential", n) < 2:
        raise InputError(f"one-peer-exponential needs n >= 2, got {n}; use complete(1)")
    hops = [2**k for k in range(math.ceil(math.log2(n)))]
    matrices = tuple((np.eye(n) + np.roll(np.eye(n), hop, axis=0)) / 2 for hop in hops)
    return Topology(f"one-peer-exponential:{n}", matrices)


def from_graph(graph: nx.Graph[Any], weight: str | None = None, name: str = "graph") -> Topology:
    """Build a topology from a connected networkx graph; node i is `list(graph)[i]`.

    An undirected graph gets Metropolis weights 1/(1 + max degree). If `weight` is given, and always for a
    directed graph (default "weight"), the edge attribute of that name sets w: an edge u → v of weight w means
    that v receives u's model with weight w. Weights of parallel edges add up. A node's own weight is 1 minus
    the sum of the others, unless a self-loop sets it.

    >>> import networkx as nx
    >>> from_graph(nx.path_graph(3)).weights()[0].round(3).tolist()
    [0.667, 0.333, 0.0]
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

    >>> from_neighbours({"a": ["b"], "b": ["a", "c"], "c": ["b"]}).weights()[0].round(3).tolist()
    [0.667, 0.333, 0.0]
    """
    return from_graph(graph_of_neighbours(neighbours), name="neighbours")


SIZED: dict[str, Callable[[int], Topology]] = {
    "ring": ring,
    "torus": torus,
    "complete": complete,
    "star": star,
    "one-peer-exponential": one_peer_exponential,
}
"""Constructors that `parse` accepts as `name:n`."""


Graph: TypeAlias = "str | os.PathLike[str] | Topology | nx.Graph[Any] | Mapping[Any, Any]"
"""A topology as text or object: see `parse`."""


def parse(text: Graph) -> Topology:
    """Parse a topology given as text or path; accept a `Topology`, a networkx graph or a dict of neighbours too.

    ring:16, torus:16, complete:4, star:5, social, one-peer-exponential:16, file:graph.edgelist, every:4/ring:16
    (local steps), lazy/ring:16 ((I + W)/2), a CSV or edge-list file by its name, or your own as package.module:name,
    where name is a Topology, a graph, a dict of neighbours, or a function that returns one.

    >>> parse("every:4/ring:16")
    <Topology every:4/ring:16: n = 16, period 4>
    """
    if isinstance(text, Topology):
        return text
    if isinstance(text, nx.Graph):
        return from_graph(text)
    if isinstance(text, Mapping):
        return from_neighbours(text)
    if isinstance(text, os.PathLike):
        return from_file(os.fspath(text))
    if not isinstance(text, str):
        raise InputError(f"a topology is a name, a Topology, a graph or a dict, got {text!r}; try 'ring:16'")
    name, _, argument = text.partition(":")
    if is_own(text):
        return _stored(text)
    if text.startswith("lazy/"):
        return parse(text.removeprefix("lazy/")).lazy()
    if name == "file":
        return from_file(argument)
    if name == "every":
        k, _, rest = argument.partition("/")
        return parse(rest).every(_whole(k, text))
    if text == "social":
        return social()
    if name == "social":
        raise InputError(f"social has its own 32 nodes, got {text!r}; write social")
    if name in SIZED:
        return SIZED[name](_whole(argument, text))
    if (split := re.fullmatch(r"([a-z-]+?)\(?(\d+)\)?", text)) and split[1] in SIZED:      # ring16, ring(16)
        raise InputError(f"unknown topology {text!r}; write {split[1]}:{split[2]}")
    if text.endswith(SUFFIXES):
        return from_file(text)
    if is_path(text):
        found = imported(text, "topology")
        found = found() if callable(found) else found
        if not isinstance(found, Topology | nx.Graph | Mapping):
            raise InputError(f"{text} is not a Topology, a graph or a dict, nor a function that returns one")
        return parse(found)
    if name in ("", "lazy"):
        raise InputError(f"a topology is missing in {text!r}; write one, as in ring:16, every:4/ring:16, lazy/ring:16")
    raise unknown("topology", name, [*SIZED, "social", "file", "every", "lazy"])


def _stored(text: str) -> Topology:
    """A topology given from Python, or its stored weights."""
    facts = facts_of(text)
    if "weights" not in facts:
        raise InputError(f"the topology {readable(text)} is defined in a Python script; run that script again")
    return Topology(text, tuple(from_entries(found, facts["n"]) for found in facts["weights"]))


def count_nodes(text: str) -> int:
    """Number of nodes of a topology given as text; cached unless `is_external`."""
    return parse(text).n if is_external(text) else _count_nodes(text)


@lru_cache
def _count_nodes(text: str) -> int:
    return parse(text).n


def is_external(text: str) -> bool:
    """Whether a text refers to a file or to Python code, which may change while the text does not.

    >>> is_external("lazy/file:graph.edgelist"), is_external("every:4/ring:16")
    (True, False)
    """
    while text.startswith(("lazy/", "every:")):
        text = text.partition("/")[2]
    name = text.partition(":")[0]
    return name == "file" or text.endswith(SUFFIXES) or (name not in SIZED and is_path(text))


def _whole(digits: str, text: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise InputError(f"topology {text!r} needs a whole number, as in ring:16, every:4/ring:16") from None


def _nodes(name: str, n: int) -> int:
    nodes = whole(n)
    if nodes is None:
        raise InputError(f"{name} needs a whole number of nodes, got {n!r}")
    if nodes > LARGEST:
        raise InputError(f"{name} has at most {LARGEST} nodes here, got {n}: W is a dense matrix")
    return nodes
