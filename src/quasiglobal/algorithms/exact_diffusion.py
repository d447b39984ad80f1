"""Exact diffusion, plain and with momentum, in a form that is safe under changing learning rates.

K. Yuan, B. Ying, X. Zhao, A. H. Sayed: Exact diffusion for distributed optimization and learning. IEEE Transactions on
Signal Processing 2019.
EDM: Y. Hu, X. Chen, W. Liu, X. Mao: A bias-correction decentralized stochastic gradient algorithm with momentum
acceleration. 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class ExactDiffusion(Algorithm):
    """Each step repeats the last movement and adds the change of the momentum.

        m ← β m₋ + (1 − β) g
        x⁺ ← W̃ (x − η ((x₋ − x)/η₋ + m − m₋))         the first step is W̃ (x − η m)

    W̃ is W, or (I + W)/2 if λ_min(W) ≤ −1/3. η₋ is the learning rate of the last step.

    Differs from `d2+` (the same with β = 0) in its momentum, and in making W lazy where that is needed. Differs from
    the published form, which has η in place of η₋, while η changes: the published form then keeps a bias. With exact
    gradients it reaches the exact minimiser. It sends one model.
    """

    citation: ClassVar[str] = "Yuan et al. 2019; EDM: Hu et al. 2025"

    beta: float = 0.0

    def init(self, x: Tensor) -> State:
        return zeros(x, "moved", "m")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m = torch.lerp(g, state["m"], self.beta) if self.beta else g
        x_new = node.mix(descend(x, node.lr, state["moved"] + m - state["m"]))
        return x_new, {"moved": (x - x_new) / node.lr, "m": m}

    @property
    def needs(self) -> Needs:
        """A base can make the step without momentum, x⁺ = W̃ (x½ + (x − x½₋) η/η₋)."""
        return Needs(
            refuses_drift=True, lambda_min_above=-1 / 3, lazy=True, loss="harmed", divides_by_lr=True,
            refuses_base="adds momentum of its own to the local step" if self.beta else None,
        )
