"""Push-sum methods, for directed graphs: each node divides its values among its receivers.

M. Assran, N. Loizou, N. Ballas, M. Rabbat: Stochastic gradient push for distributed deep learning. ICML 2019.
A. Nedić, A. Olshevsky, W. Shi: Achieving geometric convergence for distributed optimization over time-varying graphs.
SIAM Journal on Optimization 2017. (Push-DIGing)
R. Xin, U. A. Khan: A linear algorithm for optimization over directed graphs with geometric convergence. 2018. (AB)
C. N. Hadjicostis, N. H. Vaidya, A. D. Domínguez-García: Robust distributed average consensus via exchange of running
sums. IEEE Transactions on Automatic Control 2016.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import (
    Algorithm,
    Edges,
    Node,
    State,
    Wrapper,
    descend,
    momentum,
    named,
    unnamed,
    zeros,
)
from quasiglobal.algorithms.local_base import Local, check_local
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class SGP(Wrapper):
    """A local step of `base`, then a push; the weight w corrects for nodes that receive more or less than others.

        x̃_i ← the base's local step from x̃_i, with the gradient at x_i
        x̃_i ← Σ_j p_ij x̃_j,   w_i ← Σ_j p_ij w_j,   x_i ← x̃_i / w_i          w = 1 at the start

    Differs from `dsgd` in its weights: the columns of P sum to 1, not its rows, as any node of a directed graph can
    arrange without knowing the others. If P is doubly stochastic, w stays 1 and both are the same. On heterogeneous
    data it converges near the minimiser, like `dsgd`. A lost message is lost for x̃ and w alike, so that w shrinks.
    """

    citation: ClassVar[str] = "Assran et al. 2019"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local(self.base, "sgp")

    def init(self, x: Tensor) -> State:
        return named(self.base.init(x)) | {"w": torch.ones_like(x[:, :1])}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        pushed, inner = self.base.step(x * _weight(state["w"], node), g, unnamed(state), Local(node))
        pushed, w = node.push(pushed, state["w"])
        return pushed / _weight(w, node), named(inner) | {"w": w}

    @property
    def needs(self) -> Needs:
        return super().needs._replace(
            doubly_stochastic=False, loss="harmed", absence="harmed", needs_full_precision=True, follows_messages=True
        )


@dataclass(frozen=True, kw_only=True)
class QGSGP(Algorithm):
    """Quasi-global momentum on directed graphs: momentum from two consecutive models of `sgp`.

        m_i ← β m̂_i + g_i
        x̃_i ← Σ_j p_ij (x̃_j − η m_j),   w_i ← Σ_j p_ij w_j,   x_i⁺ ← x̃_i / w_i          (Nesterov: g_j + β m_j)
        m̂_i ← μ m̂_i + (1 − μ) (x_i − x_i⁺)/η                                            w = 1, m̂ = 0 at the start

    Differs from `qg-dsgdm` in its weights, which any node of a directed graph can arrange (see `sgp`); if P is doubly
    stochastic, both are the same. Differs from S. A. Aketi's code for quasi-global momentum with SGP in m̂ if w ≠ 1:
    there the gossip's share of the movement is divided by w, the gradient's share is not, so that they do not cancel.
    """

    citation: ClassVar[str] = "Lin et al. 2021; Assran et al. 2019"

    beta: float = 0.9
    mu: float | None = None             # None: μ = β
    nesterov: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "m_hat") | {"w": torch.ones_like(x[:, :1])}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m_hat, mu = state["m_hat"], self.beta if self.mu is None else self.mu
        _, direction = momentum(m_hat, g, self.beta, self.nesterov)
        pushed, w = node.push(descend(x * _weight(state["w"], node), node.lr, direction), state["w"])
        x_new = pushed / _weight(w, node)
        return x_new, {"m_hat": torch.lerp((x - x_new) / node.lr, m_hat, mu), "w": w}

    @property
    def needs(self) -> Needs:
        return PUSHED._replace(
            loss="refused", divides_by_lr=True,             # w shrinks, and m̂ grows by 1/w
            refuses_base="adds quasi-global momentum to the local step, which would be combined with the base's",
        )


@dataclass(frozen=True, kw_only=True)
class PushDIGing(Algorithm):
    """Gradient tracking by pushes.

        v_i ← β v_i + (1 − β) g_i,   y_i ← y_i + v_i − v_i of the last step          both 0 at the start
        x̃_i ← Σ_j p_ij (x̃_j − η y_j),   y_i ← Σ_j p_ij y_j,   w_i ← Σ_j p_ij w_j,   x_i ← x̃_i / w_i

    With `sums=true`, a node sends each receiver the running sum of all its shares, and a receiver takes the difference
    to the last sum that arrived: the next message contains a lost one, so nothing is lost. Sums grow, so they are kept
    and sent in float64. All of a node's receivers over the topology's period get equal shares.
    With noisy gradients and loss use momentum, such as β = 0.9. A node that is cut off for many steps offers its mass
    to nobody: w shrinks at each step, and x̃/w diverges.

    Differs from `dsgd-gt` in the weights, which a directed graph can have (see `sgp`), and in mixing after the step.
    """

    citation: ClassVar[str] = "Nedić et al. 2017"

    beta: float = 0.0
    sums: bool = False

    def init(self, x: Tensor) -> State:
        state = zeros(x, "y", "v") | {"w": torch.ones_like(x[:, :1])}
        return state | ({f"sum_{name}": torch.zeros_like(v).double() for name, v in _parts(x)} if self.sums else {})

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        if not self.sums:
            return {}
        slots = (len(x), edges.degree)
        return {f"last_{name}": v.new_zeros(*slots, v.shape[1], dtype=torch.float64) for name, v in _parts(x)}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        y, v = _tracked(g, state, self.beta)
        moved = descend(x * _weight(state["w"], node), node.lr, y)
        if self.sums:
            (moved, y, w), books = self._summed((moved, y, state["w"]), state, node)
        else:
            (moved, y, w), books = node.push(moved, y, state["w"]), {}
        return moved / _weight(w, node), {"y": y, "v": v, "w": w} | books

    def _summed(self, values: tuple[Tensor, ...], state: State, node: Node) -> tuple[list[Tensor], State]:
        """Push by running sums; return the nodes' new values and the new sums."""
        shares = [(v / (1 + node.edges.receivers.sum(dim=1)))[:, : v.shape[1]] for v in values]
        sums = [state[f"sum_{name}"] + share for name, share in zip(PARTS, shares, strict=True)]
        came, arrived = node.exchange(*(total[:, None] for total in sums))
        held: list[Tensor] = []
        books: State = {}
        for name, share, total, heard in zip(PARTS, shares, sums, came, strict=True):
            last = state[f"last_{name}"]
            heard = torch.where(arrived[..., : heard.shape[2]], heard, last)
            held.append(share + (heard - last).sum(dim=1).to(share.dtype))
            books |= {f"sum_{name}": total, f"last_{name}": heard}
        return held, books

    @property
    def needs(self) -> Needs:
        return PUSHED._replace(loss="proof" if self.sums else "harmed", absence="harmed", keeps_mean=not self.sums)


@dataclass(frozen=True, kw_only=True)
class AB(Algorithm):
    """Gradient tracking with two matrices: models are averaged by the rows, gradients pushed by the columns.

        v_i ← β v_i + (1 − β) g_i,   y_i ← y_i + v_i − v_i of the last step          both 0 at the start
        x_i ← Σ_j w_ij (x_j − η y_j),   y_i ← Σ_j p_ij y_j

    Also known as Push-Pull. Differs from `push-diging` in that models are averaged (rows of W sum to 1), so that no
    weight has to be corrected for; only the trackers are pushed. If W is doubly stochastic, both are the same.
    """

    citation: ClassVar[str] = "Xin & Khan 2018"

    beta: float = 0.0

    def init(self, x: Tensor) -> State:
        return zeros(x, "y", "v")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        y, v = _tracked(g, state, self.beta)
        return node.mix(descend(x, node.lr, y)), {"y": node.push(y), "v": v}

    @property
    def needs(self) -> Needs:
        return PUSHED._replace(loss="harmed", absence="harmed")


PUSHED = Needs(doubly_stochastic=False, needs_full_precision=True, follows_messages=True)
"""Needs of push methods: weights and sums have to match all sent messages, to the last digit."""

PARTS = ("x", "y", "w")
"""Names of the pushed values of Push-DIGing: models, trackers and weights."""


def _tracked(g: Tensor, state: State, beta: float) -> tuple[Tensor, Tensor]:
    """The tracker y after the change of the momentum v, and v."""
    v = torch.lerp(g, state["v"], beta)
    return state["y"] + v - state["v"], v


def _parts(x: Tensor) -> tuple[tuple[str, Tensor], ...]:
    """Tensors of the shapes of `PARTS`."""
    return tuple(zip(PARTS, (x, x, x[:, :1]), strict=True))


def _weight(w: Tensor, node: Node) -> Tensor:
    """The push-sum weight of each column: 1 for columns that stay at their node."""
    return torch.where(node.edges.receivers.any(dim=1), w, 1.0)
