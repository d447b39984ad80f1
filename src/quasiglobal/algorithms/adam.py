"""Decentralized Adam, local and quasi-global.

D. P. Kingma, J. Ba: Adam: a method for stochastic optimization. ICLR 2015.
I. Loshchilov, F. Hutter: Decoupled weight decay regularization. ICLR 2019.
T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: Quasi-Global Momentum. ICML 2021, appendix, QG-DAdam.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class _Adam(Algorithm):
    """Options and formulas shared by `DAdam` and `QGDAdam`. The paper uses β₂ = 0.99."""

    limits: ClassVar[dict[str, str]] = {"beta1": "[0, 1)", "beta2": "[0, 1)", "eps": "(0, inf)"}

    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-8

    def _moments(self, m: Tensor, v: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        return self.beta1 * m + (1 - self.beta1) * g, self.beta2 * v + (1 - self.beta2) * g * g

    def _unbiased(self, m: Tensor, v: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        return m / (1 - self.beta1**time), v / (1 - self.beta2**time)

    def _direction(self, m: Tensor, v: Tensor) -> Tensor:
        return m / (v.sqrt() + self.eps)


@dataclass(frozen=True, kw_only=True)
class DAdam(_Adam):
    """Adam at each node, then an average of the models with the neighbours.

        m_i ← β₁ m_i + (1 − β₁) g_i
        v_i ← β₂ v_i + (1 − β₂) g_i²
        x_i ← Σ_j w_ij (x_j − η m̃_j / (√ṽ_j + ε))     m̃ = m/(1 − β₁ᵗ), ṽ = v/(1 − β₂ᵗ)

    Differs from `adam` (centralized) in its moments: each node has its own; they are never averaged.
    """

    citation: ClassVar[str] = "Kingma & Ba 2015"

    def init(self, x: Tensor) -> State:
        return zeros(x, "m", "v")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m, v = self._moments(state["m"], state["v"], g)
        direction = self._direction(*self._unbiased(m, v, node.time))
        return node.mix(descend(x, node.lr, direction)), {"m": m, "v": v}

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="scales the local step by moments of its own")


@dataclass(frozen=True, kw_only=True)
class DAdamW(DAdam):
    """`dadam` with decoupled weight decay.

        m_i, v_i as in `dadam`
        x_i ← Σ_j w_ij (x_j − η (m̃_j / (√ṽ_j + ε) + λ x_j))

    Differs from `dadam` in the decay λ, which acts on the model and not on the gradient, so that Adam does not rescale
    it. λ is the run's weight decay. If `lam` is given, λ is `lam`, and the run's weight decay is added to the gradient.
    """

    citation: ClassVar[str] = "Loshchilov & Hutter 2019"
    limits: ClassVar[dict[str, str]] = _Adam.limits | {"lam": "[0, inf)"}

    lam: float | None = None

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m, v = self._moments(state["m"], state["v"], g)
        direction = self._direction(*self._unbiased(m, v, node.time))
        decay = node.weight_decay if self.lam is None else self.lam
        return node.mix(descend(x, node.lr, direction + decay * x)), {"m": m, "v": v}

    @property
    def needs(self) -> Needs:
        return super().needs._replace(
            decouples_decay=self.lam is None, keeps_mean=not self.lam, rests=not self.lam
        )


@dataclass(frozen=True, kw_only=True)
class QGDAdam(_Adam):
    """Adam whose two moments follow the normalised movement of the synchronized model.

        m_i ← β₁ m̂_i + (1 − β₁) g_i,   v_i ← β₂ v̂_i + (1 − β₂) g_i²
        x_i⁺ ← Σ_j w_ij (x_j − η m_j / (√v_j + ε))
        d̂_i ← (x_i − x_i⁺) / max(‖x_i − x_i⁺‖, ε)
        m̂_i ← β₁ m̂_i + (1 − β₁) d̂_i,   v̂_i ← β₂ v̂_i + (1 − β₂) d̂_i²

    Differs from `dadam` in its stored moments, which average the movement d̂ instead of g, and in having no
    bias correction. The paper's pseudocode uses ĝ without defining it; here it is g. The paper divides by ‖d‖
    without ε, which turns the rounding error of a converged model into a step: hence the ε. Since each node
    has its own ‖d‖, the nodes' mean is not kept.

    `released=true` follows the authors' code: only v is quasi-global, m is Adam's own, both are
    bias-corrected, and ε is added to the norm.
    """

    citation: ClassVar[str] = "Lin et al. 2021, appendix"

    released: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "m_hat", "v_hat")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m, v = self._moments(state["m_hat"], state["v_hat"], g)                 # lines 4-5
        direction = self._direction(*(self._unbiased(m, v, node.time) if self.released else (m, v)))
        x_new = node.mix(descend(x, node.lr, direction))                        # lines 6-7
        d = x - x_new                                                           # line 8
        norm = d.norm(dim=-1, keepdim=True)
        d_hat = d / (norm + self.eps if self.released else norm.clamp_min(self.eps))    # line 9
        m_hat, v_hat = self._moments(state["m_hat"], state["v_hat"], d_hat)     # lines 10-11
        return x_new, {"m_hat": m if self.released else m_hat, "v_hat": v_hat}

    @property
    def needs(self) -> Needs:
        return Needs(
            needs_full_precision=True, keeps_mean=self.released,
            refuses_base="scales the local step by quasi-global moments, which would be combined with the base's",
        )
