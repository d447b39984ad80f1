"""DSGD with adaptive consensus: weaker mixing as the learning rate decays.

Z. Wang, M. Johansson: Decentralized SGD with controlled disagreement finds flatter minima. 2026.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class DSGDAC(Algorithm):
    """Mixes with strength γ, which falls with the learning rate, and steps along the node's own direction.

        γ ← (η / largest η so far)^p
        m_i ← β m_i + g_i
        x_i ← (1 − γ) x_i + γ Σ_j w_ij x_j − η m_i              (Nesterov: g_i + β m_i in place of m_i)

    Differs from `dsgd` in letting the nodes disagree in the end, which is meant to find flatter minima; the averaged
    model is the one to use. During warm-up γ is 1. It is meant for data that are alike at all nodes: on heterogeneous
    data the nodes drift towards their own minima once η decays, and a warning says so.
    """

    citation: ClassVar[str] = "Wang & Johansson 2026"
    limits: ClassVar[dict[str, str]] = Algorithm.limits | {"p": "[0, inf)"}

    p: float = 3.0
    beta: float = 0.0
    nesterov: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "lr_max") | (zeros(x, "m") if self.beta else {})

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        lr_max = torch.maximum(state["lr_max"], node.lr)
        gamma = (node.lr / lr_max.clamp_min(torch.finfo(x.dtype).tiny)) ** self.p       # 0 while the rate is 0
        memory, direction = {}, g
        if self.beta:
            m, direction = momentum(state["m"], g, self.beta, self.nesterov)
            memory = {"m": m}
        mixed = torch.lerp(x, node.mix(x), gamma)
        return descend(mixed, node.lr, direction), {"lr_max": lr_max} | memory

    @property
    def needs(self) -> Needs:
        return Needs(alike_data=True, refuses_base="averages before the local step")
