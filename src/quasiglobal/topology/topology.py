"""Topology: a deterministic map t → W(t), t = 1, 2, …, from steps to mixing matrices.

X⁺ = W X: row i of W holds the weights of the models that node i receives, so its neighbours are the non-zeros of row i.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.errors import InputError, whole
from quasiglobal.topology.mixing import (
    TOLERANCE,
    Matrix,
    check_connected,
    check_matrix,
    lasting_noise,
    mixing_rate,
    steps_to_consensus,
    weighted,
)

LARGEST = 10_000
"""Maximum number of nodes, and of steps in a period: W is a dense matrix."""


@dataclass(frozen=True, eq=False)
class Topology:
    """The mixing matrices of one period, W(1), …, W(p); W(t + p) = W(t).

    >>> from quasiglobal.topology import one_peer_exponential, ring
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
    shares: Matrix | None = None
    """Weights p of the nodes with Σ p_i = 1; None: all count alike. See `weighted`."""

    def __post_init__(self) -> None:
        if not self.matrices:
            raise InputError(f"{self.name} has no matrix; give at least one W")
        if len(self.matrices) > LARGEST:
            raise InputError(f"{self.name} has a period of {self.period} steps; the maximum is {LARGEST}")
        for W in self._distinct:
            check_matrix(W, self.name)
        if len({W.shape for W in self.matrices}) > 1:
            raise InputError(f"{self.name}: all W must be of one size")
        check_connected(self.links(), self.name)

    def __eq__(self, other: object) -> bool:
        """Whether two topologies have equal matrices at every step, whatever their names."""
        if not isinstance(other, Topology):
            return NotImplemented
        return self is other or self.fingerprint == other.fingerprint

    def __hash__(self) -> int:
        return hash(self.fingerprint)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of one period of matrices; equal for equal topologies.

        >>> from quasiglobal.topology import parse, ring
        >>> parse("every:1/ring:4").fingerprint == ring(4).fingerprint != ring(5).fingerprint
        True
        """
        words = [len(W).to_bytes(8, "little") + (W + 0.0).astype("<f8").tobytes() for W in self.matrices]  # -0.0 is 0.0
        periods = (p for p in range(1, len(words) + 1) if words == words[:p] * (len(words) // p))
        return hashlib.sha256(b"".join(words[: next(periods)])).hexdigest()[:16]

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<Topology {self.name}: n = {self.n}, {f'period {self.period}' if self.period else 'random'}>"

    @cached_property
    def n(self) -> int:
        """The number of nodes."""
        return len(self.matrices[0])

    @property
    def period(self) -> int | None:
        """Number of steps after which W repeats; 1 for a fixed graph, None if W is drawn at random."""
        return len(self.matrices)

    @property
    def rounds(self) -> int:
        """Number of steps in which every node waits for all its neighbours."""
        return len(self.matrices)

    @property
    def positions(self) -> int:
        """Number of positions of steps in the period."""
        return len(self.matrices)

    def position(self, t: int) -> int:
        """Position of step t in the period. Steps at one position have the same W, unless it `is_drawn`."""
        return (t - 1) % len(self.matrices)

    def is_drawn(self, t: int) -> bool:
        """Whether W(t) is drawn at random, anew for each step."""
        return False

    def weights(self, t: int = 1) -> Matrix:
        """W at step t = 1, 2, …, as a fresh [n, n] array."""
        if t < 1:
            raise InputError(f"steps count from 1, got t = {t}")
        return self.matrices[self.position(t)].copy()

    def neighbours(self, i: int, t: int | None = None) -> tuple[int, ...]:
        """The nodes that node i receives from at step t, or over a whole period."""
        return tuple(np.flatnonzero(self.links(t)[i]).tolist())

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Edges over a period: pairs i < j if every W is symmetric, else (sender, receiver)."""
        receivers, senders = np.nonzero(self.links())
        pairs = zip(senders.tolist(), receivers.tolist(), strict=True)
        return tuple(sorted((j, i) for j, i in pairs if j < i or not self.is_symmetric))

    @cached_property
    def is_symmetric(self) -> bool:
        """Whether every W equals its transpose; for `weighted` nodes, whether p_i w_ij = p_j w_ji."""
        return all(np.allclose(W, W.T, rtol=0, atol=TOLERANCE) for W in map(self._similar, self._distinct))

    @cached_property
    def is_doubly_stochastic(self) -> bool:
        """Whether mixing keeps the nodes' mean (`keeps_mean`), and no weight is negative."""
        return self.keeps_mean and all(W.min() >= -TOLERANCE for W in self._distinct)

    @cached_property
    def keeps_mean(self) -> bool:
        """Whether the columns of every W sum to 1; for `weighted` nodes, whether pᵀ W = pᵀ, so that Σ p_i x_i stays."""
        p = np.ones(self.n) if self.shares is None else self.shares
        return all(np.allclose(p @ W, p, rtol=0, atol=TOLERANCE) for W in self._distinct)

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
        for doubly stochastic W only. For `weighted` nodes ‖X − X̄‖² is Σ p_i ‖x_i − Σ_j p_j x_j‖².
        """
        return mixing_rate(self._similar_matrices, self._root) if self.is_doubly_stochastic else None

    @cached_property
    def nu(self) -> float | None:
        """ν = (1/n) Σ_{i≥2} λ_i²/(1 − λ_i²), eigenvalues of a fixed symmetric W: its factor in the noise of SGD.

        In general the variance between the nodes that noise of variance 1 at each node and step leaves:
        (1/n) Σ_{s≥1} ‖W(t) ⋯ W(t − s + 1) − J‖², averaged over the steps t of a period. Defined for doubly
        stochastic W and nodes that count alike.
        """
        if not self.is_doubly_stochastic or self.shares is not None:
            return None
        if self._eigenvalues is None:
            return lasting_noise(self.matrices)
        squares = self._eigenvalues[:-1] ** 2
        return float((squares / (1 - squares)).sum() / self.n) if (squares < 1 - TOLERANCE).all() else float("inf")

    @cached_property
    def exact_after(self) -> int | None:
        """The number of steps after which mixing has averaged exactly, W(m) ⋯ W(1) = J; None if it never does."""
        return steps_to_consensus(self.matrices, self.shares)

    @property
    def largest_beta(self) -> float | None:
        """The largest momentum that the paper's theorem covers: β/(1 − β) ≤ ρ/21."""
        return None if self.rho is None else self.rho / (21 + self.rho)

    @property
    def sampled_steps(self) -> int:
        """Number of steps that `matrices` stand for."""
        return len(self.matrices)

    @property
    def peers(self) -> tuple[float, int]:
        """Number of nodes that a node sends its model to in a step: the mean over nodes and steps, and the maximum."""
        total, most = self._sent
        return total / (self.n * self.sampled_steps), most

    def messages(self, t: int) -> int:
        """Number of models that all nodes together send at step t.

        >>> from quasiglobal.topology import parse
        >>> [parse("every:2/ring:4").messages(t) for t in (1, 2)]
        [0, 8]
        """
        known = self.is_drawn(t) and self._same_traffic
        return _messages(self.matrices[0] if known else self.weights(t))

    def bytes_per_step(self, d: int, bytes_per_number: int = 4) -> float:
        """Bytes that a node sends to mix a d-parameter model once, averaged over nodes and a period."""
        return self._sent[0] * d * bytes_per_number / (self.n * self.sampled_steps)

    def lazy(self) -> Topology:
        """(I + W)/2: the same neighbours with half the weights; no eigenvalue is below 0 if W is symmetric."""
        return Topology(f"lazy/{self.name}", tuple((np.eye(self.n) + W) / 2 for W in self.matrices), self.shares)

    def every(self, k: int) -> Topology:
        """Gossip at every k-th step; W = I in between (local steps)."""
        if whole(k) is None or k < 1 or k * len(self.matrices) > LARGEST:
            raise InputError(
                f"every needs a whole number of steps >= 1, and at most {LARGEST} in a period, got {k}"
            )
        local = [np.eye(self.n)] * (k - 1)
        steps = [W for gossip in self.matrices for W in (*local, gossip)]
        return Topology(f"every:{k}/{self.name}", tuple(steps), self.shares)

    def weighted(self, weights: ArrayLike) -> Topology:
        """Let node i count by its share p_i of the weights, such as its number of examples: mixing keeps Σ p_i x_i.

        Algorithms then minimise Σ p_i f_i, as if node i were weights[i] nodes with its data. For undirected graphs.

        >>> from quasiglobal.topology import complete
        >>> complete(3).weighted([300, 100, 100]).weights()[1].round(3).tolist()
        [0.6, 0.2, 0.2]
        """
        shares = self._shares_of(weights)
        found = {id(W): weighted(W, shares, self.name) for W in self._distinct}
        return Topology(self.name, tuple(found[id(W)] for W in self.matrices), shares)

    def links(self, t: int | None = None) -> NDArray[np.bool_]:
        """Boolean [n, n]: whether node i receives from another node j at step t, or at any step."""
        links = np.any([W != 0 for W in (self._distinct if t is None else [self.weights(t)])], axis=0)
        np.fill_diagonal(links, False)
        return np.asarray(links)

    def _shares_of(self, weights: ArrayLike) -> Matrix:
        """Shares that sum to 1, from one weight per node."""
        if self.shares is not None:
            raise InputError(f"the nodes of {self.name} already have weights; give them once")
        try:
            p = np.asarray(weights, dtype=np.float64)
        except (TypeError, ValueError):
            raise InputError(f"weights must be one number for each node, got {weights!r}") from None
        if p.shape != (self.n,):
            raise InputError(f"{self.name} needs one weight for each of its {self.n} nodes, got {p.size}")
        if not (np.isfinite(p).all() and p.min() > 0):
            raise InputError(f"the weight of a node must be > 0 and finite, got {p.min():g}; give every node a weight")
        return np.asarray(p / p.sum())

    def _similar(self, W: Matrix) -> Matrix:
        """√p_i w_ij / √p_j: with the same eigenvalues as W, and symmetric if p_i w_ij = p_j w_ji."""
        return W if self._root is None else self._root[:, None] * W / self._root

    @cached_property
    def _root(self) -> Matrix | None:
        return None if self.shares is None else np.sqrt(self.shares)

    @property
    def _similar_matrices(self) -> tuple[Matrix, ...]:
        found = {id(W): self._similar(W) for W in self._distinct}
        return tuple(found[id(W)] for W in self.matrices)

    @cached_property
    def _distinct(self) -> list[Matrix]:
        """The distinct matrices: some occur several times, such as the identity of local steps."""
        return list({id(W): W for W in self.matrices}.values())

    @cached_property
    def _sent(self) -> tuple[int, int]:
        """Models sent by all nodes over a period, and the most by one node in a step."""
        sent = {id(W): (W != 0).sum(axis=0) - (W.diagonal() != 0) for W in self.matrices}
        return sum(int(sent[id(W)].sum()) for W in self.matrices), max(int(one.max()) for one in sent.values())

    @cached_property
    def _same_traffic(self) -> bool:
        """Whether the same number of models is sent in all steps."""
        return len({_messages(W) for W in self.matrices}) == 1

    @cached_property
    def _eigenvalues(self) -> Matrix | None:
        if self.period != 1 or not self.is_symmetric:
            return None
        found = np.linalg.eigvalsh(self._similar(self.matrices[0]))
        return np.where(np.abs(found) < TOLERANCE, 0.0, found)


def _messages(W: Matrix) -> int:
    """Number of models that are sent to mix by W."""
    return int((W != 0).sum() - (W.diagonal() != 0).sum())


# -------------------------------------------------------------------------------------- checks of parameters


def check_nodes(name: str, n: int, least: int, instead: str) -> None:
    """Raise unless n is a whole number of nodes from `least` to `LARGEST`; `instead` is the remedy."""
    if whole(n) is None:
        raise InputError(f"{name} needs a whole number of nodes, got {n!r}")
    if n > LARGEST:
        raise InputError(f"{name} has at most {LARGEST} nodes here, got {n}: W is a dense matrix")
    if n < least:
        raise InputError(f"{name} needs n >= {least}, got {n}; use {instead}")


def check_range(name: str, what: str, value: float, least: float, most: float) -> None:
    """Raise unless a parameter of a topology lies within its bounds; with whole bounds it must be a whole number."""
    number = whole(value) if isinstance(least, int) else value
    if number is None or isinstance(number, bool) or not least <= number <= most:
        kind = "a whole number" if isinstance(least, int) else "a number"
        raise InputError(f"{name} needs {what}, {kind} from {least:g} to {most:g}, got {value!r}")
