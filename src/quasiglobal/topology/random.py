"""Graphs that are drawn anew at each step: W(t) is a function of (seed, t), the same at all nodes and engines."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from quasiglobal.common.randomness import generator
from quasiglobal.errors import InputError, whole
from quasiglobal.topology.mixing import (
    TOLERANCE,
    Alike,
    Matrix,
    check_matrix,
    mixing_rate,
    shrinkage,
    stochastic,
    weighted,
)
from quasiglobal.topology.topology import Topology, check_nodes, check_range

__all__ = ["RandomTopology", "epidemic", "equidyn", "from_function", "matching"]

SAMPLE, SAMPLED = 400, 2**22
"""Number of draws from which properties of a random topology are estimated, and limit on their entries in total."""

COMPARED = 20
"""Number of gossip steps by which random topologies are compared."""

Draws = Callable[[], Iterable[Matrix]]

KEY = 17
"""Separates these draws from others with the same seed."""


class RandomTopology(Topology):
    """W(t) = `draw(t / gap)` at every gap-th step, I in between.

    The seed is the topology's own, as in `equidyn:16:seed=1`: runs with other seeds train over the same graphs.
    """

    period = None
    exact_after = None
    """None, since a random sequence is not known to average exactly."""

    draw: Callable[[int], Matrix]
    gap: int
    all_draws: Draws | None
    alike: Alike

    def __init__(
        self, name: str, draw: Callable[[int], Matrix], gap: int = 1, all_draws: Draws | None = None,
        shares: Matrix | None = None, alike: Alike = "",
    ) -> None:
        """`draw` maps t = 1, 2, … to a fresh W; `all_draws` returns all W, if they are few and equally likely.

        `alike` is the symmetry of the draws; see `Alike`.
        """
        first = draw(1)
        check_matrix(first, name)
        vars(self).update(                                  # the class is frozen
            name=name, draw=draw, gap=gap, all_draws=all_draws, shares=shares, n=len(first), alike=alike
        )

    @cached_property
    def matrices(self) -> tuple[Matrix, ...]:
        """A sample of equally likely draws; ρ, ν, traffic and symmetry are estimated from it."""
        if self.all_draws is not None:
            return tuple(self.all_draws())
        return tuple(self.draw(t) for t in range(1, max(2, min(SAMPLE, SAMPLED // self.n**2)) + 1))

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the first matrices; equal for equal topologies."""
        drawn = b"".join((self.draw(t) + 0.0).astype("<f8").tobytes() for t in range(1, COMPARED + 1))
        return hashlib.sha256(f"random {self.n} {self.gap} ".encode() + drawn).hexdigest()[:16]

    @property
    def rounds(self) -> int:
        """Number of steps in which every node waits for all others, up to a negligible probability."""
        return self.n * self.gap

    @property
    def positions(self) -> int:
        """Number of positions between two gossips."""
        return self.gap

    def position(self, t: int) -> int:
        """Position of step t between two gossips."""
        return t % self.gap

    def is_drawn(self, t: int) -> bool:
        """Whether W(t) is drawn, and not the identity between two gossips."""
        return t % self.gap == 0

    def weights(self, t: int = 1) -> Matrix:
        if t < 1:
            raise InputError(f"steps count from 1, got t = {t}")
        return self.draw(t // self.gap) if self.is_drawn(t) else np.eye(self.n)

    @cached_property
    def rho(self) -> float | None:
        """The paper's ρ, of the mean of (W − J)ᵀ(W − J) over the draws."""
        if not self.is_doubly_stochastic:
            return None
        return mixing_rate(self._similar_matrices, self._root, self.alike) / self.gap

    @cached_property
    def nu(self) -> float | None:
        """ν with the eigenvalues of the mean of (W − J)ᵀ(W − J) in place of λ².

        This is exact for W that commute, and for draws that treat all pairs of nodes alike; for others it is within
        0.1 % on the graphs here. k steps between two gossips add up: kν, and (k − 1)/2 on average until the next one.
        """
        if not self.is_doubly_stochastic or self.shares is not None:
            return None
        squares = shrinkage(self.matrices, alike=self.alike)
        once = (squares / (1 - squares)).sum() / self.n if (squares < 1 - TOLERANCE).all() else np.inf
        return float(self.gap * once + (self.gap - 1) / 2 * (1 - 1 / self.n))

    @property
    def sampled_steps(self) -> int:
        """Number of steps that `matrices` stand for."""
        return len(self.matrices) * self.gap

    def lazy(self) -> Topology:
        """(I + W)/2: the same neighbours with half the weights."""
        def half(W: Matrix) -> Matrix:
            return np.asarray((np.eye(self.n) + W) / 2)

        name, all_draws = f"lazy/{self.name}", lambda: map(half, self.matrices)
        return RandomTopology(name, lambda t: half(self.draw(t)), self.gap, all_draws, self.shares, self.alike)

    def every(self, k: int) -> Topology:
        """Gossip at every k-th step; W = I in between (local steps)."""
        if whole(k) is None or k < 1:
            raise InputError(f"every needs a whole number of steps >= 1, got {k}")
        name, gap = f"every:{k}/{self.name}", self.gap * k
        return RandomTopology(name, self.draw, gap, lambda: self.matrices, self.shares, self.alike)

    def weighted(self, weights: ArrayLike) -> Topology:
        """Let node i count by its share of the weights; every draw has to be undirected."""
        shares = self._shares_of(weights)

        def draw(t: int) -> Matrix:
            return weighted(self.draw(t), shares, self.name)

        return RandomTopology(self.name, draw, self.gap, shares=shares)

    def links(self, t: int | None = None) -> NDArray[np.bool_]:
        """Boolean [n, n]: whether node i receives from another node j at step t; over time, from all others."""
        return ~np.eye(self.n, dtype=bool) if t is None else super().links(t)


def from_function(draw: Callable[[int], ArrayLike], name: str = "function") -> RandomTopology:
    """Build a topology that never repeats from a function of the step, t = 1, 2, …, to W(t).

    The function has to return the same W whenever it is called with the same t, in every process.

    >>> def meet(t):
    ...     i, j = np.random.default_rng(t).permutation(3)[:2]
    ...     W = np.eye(3)
    ...     W[np.ix_([i, j], [i, j])] = 0.5
    ...     return W
    >>> from_function(meet).weights(1).tolist()
    [[0.5, 0.5, 0.0], [0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]
    """
    def drawn(t: int) -> Matrix:
        (W,) = stochastic([draw(t)], name)
        check_matrix(W, name)
        return W

    return RandomTopology(name, drawn)


def equidyn(n: int, *, undirected: bool = False, seed: int = 0) -> Topology:
    """One random peer: at each step all nodes i average with node i + p, p drawn from 1 … n − 1; weights 1/2.

    Z. Song, W. Li, K. Jin, L. Shi, M. Yan, W. Yin, K. Yuan: Communication-efficient topologies for decentralized
    learning with O(1) consensus rate. NeurIPS 2022, OD-EquiDyn. Their weight η(n − 1)/n is 1/2 for the best η, which
    is 0.53 for 16 nodes. `undirected` (OU-EquiDyn) pairs nodes i and i + p, from a random first node on.

    >>> [equidyn(8).neighbours(0, t) for t in (1, 2, 3)]
    [(6,), (7,), (4,)]
    >>> round(equidyn(16).rho, 2), round(equidyn(16, undirected=True).rho, 2)
    (0.53, 0.46)
    """
    check_nodes("equidyn", n, 2, "complete(1)")
    options = f"{':undirected=true' if undirected else ''}{_seed('equidyn', seed)}"

    def shifted(hop: int) -> Matrix:
        return np.asarray((np.eye(n) + np.roll(np.eye(n), hop, axis=1)) / 2)

    def meeting(hop: int, first: int) -> Matrix:
        pairs, free = [], np.ones(n, dtype=bool)
        for i in ((np.arange(n) + first) % n).tolist():
            j = (i + hop) % n
            if free[i] and free[j]:
                pairs.append((i, j))
                free[[i, j]] = False
        return _paired(n, pairs)

    def draw(t: int) -> Matrix:
        rng = generator(KEY, seed, n, t)
        hop, first = int(rng.integers(1, n)), int(rng.integers(n))
        return meeting(hop, first) if undirected else shifted(hop)

    def hops() -> Iterable[Matrix]:                         # from node 0 on: other first nodes rotate these
        return (meeting(hop, 0) if undirected else shifted(hop) for hop in range(1, n))

    few = n * n * n <= SAMPLED
    alike: Alike = "rotated" if undirected else "permuted"
    return RandomTopology(f"equidyn:{n}{options}", draw, all_draws=hops if few else None, alike=alike)


def matching(n: int, *, seed: int = 0) -> Topology:
    """Random pairs: at each step the nodes are paired at random, and the two of a pair average; if n is odd, one rests.

    S. Boyd, A. Ghosh, B. Prabhakar, D. Shah: Randomized gossip algorithms. 2006.

    >>> graph = matching(8)
    >>> graph.peers, graph.is_symmetric
    ((1.0, 1), True)
    """
    check_nodes("matching", n, 2, "complete(1)")

    def draw(t: int) -> Matrix:
        order = generator(KEY, seed, n, t).permutation(n).tolist()
        return _paired(n, list(zip(order[::2], order[1::2], strict=False)))

    return RandomTopology(f"matching:{n}{_seed('matching', seed)}", draw, alike="permuted")


def epidemic(n: int, peers: int, *, seed: int = 0) -> Topology:
    """At each step every node sends to `peers` random others; a node averages what it receives with its own model.

    M. de Vos, S. Farhadkhani, R. Guerraoui, A.-M. Kermarrec, R. Pires, R. Sharma: Epidemic learning: boosting
    decentralized learning with randomized communication. NeurIPS 2023. W is row stochastic only: nodes receive
    from different numbers of others, so the nodes' mean moves. With `equidyn` and `matching` it does not.

    >>> graph = epidemic(16, 4)
    >>> graph.peers, graph.is_doubly_stochastic
    ((4.0, 4), False)
    """
    check_nodes("epidemic", n, 2, "complete(1)")
    check_range("epidemic", "a number of peers", peers, 1, n - 1)

    def draw(t: int) -> Matrix:
        order = generator(KEY, seed, n, t).random((n, n))
        np.fill_diagonal(order, 2)
        W = np.eye(n)
        W[np.argsort(order, axis=1)[:, :peers].T, np.arange(n)] = 1
        return np.asarray(W / W.sum(axis=1, keepdims=True))

    return RandomTopology(f"epidemic:{n}:{peers}{_seed('epidemic', seed)}", draw)


def _paired(n: int, pairs: list[tuple[int, int]]) -> Matrix:
    """W in which the nodes of each pair average, and the others keep their models."""
    W = np.eye(n)
    if pairs:
        i, j = np.transpose(pairs)
        W[i, i] = W[j, j] = W[i, j] = W[j, i] = 0.5
    return W


def _seed(name: str, seed: int) -> str:
    """The seed as part of the name."""
    check_range(name, "a seed", seed, 0, 2**63 - 1)
    return f":seed={seed}" if seed else ""
