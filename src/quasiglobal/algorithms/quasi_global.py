"""Quasi-global momentum, the method of the paper.

T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: Quasi-Global Momentum: Accelerating Decentralized
Deep Learning on Heterogeneous Data. ICML 2021.

Its single-worker case is quasi-hyperbolic momentum:
J. Ma, D. Yarats: Quasi-hyperbolic momentum and Adam for deep learning. ICLR 2019.
I. Gitman, H. Lang, P. Zhang, L. Xiao: Understanding the role of momentum in stochastic gradient methods. NeurIPS 2019.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class QGDSGDm(Algorithm):
    """Momentum from the difference of two consecutive synchronized models (Algorithm 1).

        m_i ← β m̂_i + g_i
        x_i⁺ ← Σ_j w_ij (x_j − η m_j)           (Nesterov: g_j + β m_j in place of m_j)
        m̂_i ← μ m̂_i + (1 − μ) (x_i − x_i⁺)/η

    Differs from `dsgdm` only in the buffer: m̂ averages the movement of the synchronized model instead of
    the node's own gradients. It needs no further message. It is not exact: with exact gradients its fixed
    point is that of DSGD with the same η (Nesterov: with η(1 + β)).

    `tau` is the multiple-step variant: m̂ is updated only after steps τ, 2τ, … `released=true` follows the
    authors' code: differences are summed since the last update and divided by τ, m̂ is updated after steps
    1, 1 + τ, …, and μ is 0.9 by default, whatever β is.
    """

    citation: ClassVar[str] = "Lin et al. 2021"

    beta: float = 0.9
    mu: float | None = None             # None: μ = β, as in the paper
    nesterov: bool = False
    tau: int = 1
    released: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "m_hat", "total") if self._sums else zeros(x, "m_hat")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m_hat, mu = state["m_hat"], self._mu
        _, direction = momentum(m_hat, g, self.beta, self.nesterov)             # line 5
        x_new = node.mix(descend(x, node.lr, direction))                        # lines 6-7
        d = (x - x_new) / node.lr                                               # line 8
        if not self._sums:
            m_hat = torch.lerp(d, m_hat, mu) if self.phase(node.t) else m_hat   # line 9: μ m̂ + (1 − μ) d
            return x_new, {"m_hat": m_hat}
        total = state["total"] + d
        if not self.phase(node.t):
            return x_new, {"m_hat": m_hat, "total": total}
        return x_new, {"m_hat": torch.lerp(total / self.tau, m_hat, mu)} | zeros(x, "total")

    def phase(self, t: int) -> Hashable:
        """Whether m̂ is updated after step t."""
        return (t - self.released) % self.tau == 0

    @property
    def _mu(self) -> float:
        if self.mu is not None:
            return self.mu
        return 0.9 if self.released else self.beta

    @property
    def _sums(self) -> bool:
        return self.released and self.tau > 1

    @property
    def needs(self) -> Needs:
        return Needs(
            divides_by_lr=True,
            refuses_base="adds quasi-global momentum to the local step, which would be combined with the base's",
        )


@dataclass(frozen=True, kw_only=True)
class QHM(Algorithm):
    """Quasi-hyperbolic momentum, the single-worker case of quasi-global momentum.

        m ← β m₋ + g
        x ← x − η (m − μ m₋)                     m − μ m₋ = (1 − μ/β) m + (μ/β) g

    Differs from `sgdm` (μ = 0) by a share of the plain gradient in the direction. `qg-sgdm` with options
    β, μ equals this with μ + (1 − μ)β in place of β; `qg-sgdm-n` equals it with μ + (1 − μ)β² and η(1 + β).
    The defaults here match `qg-sgdm`.
    """

    citation: ClassVar[str] = "Ma & Yarats 2019; Gitman et al. 2019"

    beta: float = 0.99
    mu: float = 0.9

    def init(self, x: Tensor) -> State:
        return zeros(x, "m")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m = self.beta * state["m"] + g
        return node.mix(descend(x, node.lr, m - self.mu * state["m"])), {"m": m}

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="adds momentum of its own to the local step")
