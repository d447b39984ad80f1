"""DMSGD: momentum from a mixture of the node's own movement and that of the neighbours' average.

A. Balu, Z. Jiang, S. Y. Tan, C. Hedge, Y. M. Lee, S. Sarkar: Decentralized deep learning using momentum-
accelerated consensus. 2020. In the form of the quasi-global momentum paper's appendix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class DMSGD(Algorithm):
    """Averages first, then steps with a mixture of two movements.

        v_i ← Σ_j w_ij x_j
        m̂_i ← μ (x_i − x_i₋) + (1 − μ) (v_i − v_i₋)     0 at the first step
        x_i ← v_i − η g_i + β m̂_i                       option 1
        x_i ← x_i − η g_i + β m̂_i                       option 2

    Differs from `qg-dsgdm` in its momentum: it holds only the last movement, not a running average, and
    a fraction μ of it is the node's own. On quadratics it diverges if W is directed, or changes over several steps.
    """

    citation: ClassVar[str] = "Balu et al. 2020"

    beta: float = 0.9
    mu: float = 0.5
    option: Literal[1, 2] = 1

    def init(self, x: Tensor) -> State:
        return zeros(x, "x_old", "v_old")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        v = node.mix(x)
        if node.t == 1:
            m_hat = torch.zeros_like(x)
        else:
            m_hat = self.mu * (x - state["x_old"]) + (1 - self.mu) * (v - state["v_old"])
        start = v if self.option == 1 else x
        return start - node.lr * g + self.beta * m_hat, {"x_old": x, "v_old": v}

    @property
    def needs(self) -> Needs:
        return Needs(                                       # v − v₋ is the movement of an average by the same W
            fixed=True, symmetric=True, refuses_base="adds momentum of its own to the local step, after the average"
        )
