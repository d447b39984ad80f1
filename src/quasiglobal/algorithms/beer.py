"""BEER and MoTEF: gradient tracking with compressed messages, whose errors each node keeps.

H. Zhao, B. Li, Z. Li, P. Richtárik, Y. Chi: BEER: fast O(1/T) rate for decentralized nonconvex optimization with
communication compression. NeurIPS 2022.
MoTEF: R. Islamov, Y. Gao, S. U. Stich: Towards faster decentralized stochastic optimization with communication
compression. ICLR 2025.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class BEER(Algorithm):
    """Gradient tracking in which neighbours know x̂ and v̂ in place of the models x and the trackers v.

        m_i ← (1 − λ) m_i + λ g_i
        v_i ← v_i + γ (Σ_j w_ij v̂_j − v̂_i) + m_i − m_i of the last step
        send Q(v_i − v̂_i);   v̂_i ← v̂_i + Q(v_i − v̂_i)
        x_i ← x_i + γ (Σ_j w_ij x̂_j − x̂_i) − η v_i
        send Q(x_i − x̂_i);   x̂_i ← x̂_i + Q(x_i − x̂_i)                 all but x are 0 at the start

    Q is the run's wire, such as topk:0.01. `beer` has λ = 1, so that m = g; `motef` has momentum, λ < 1, for noisy
    gradients. γ has to be smaller for stronger compression.

    Differs from `choco` in tracking the mean gradient: with exact gradients it reaches the exact minimiser on
    heterogeneous data, also with compressed messages. Differs from `dsgd-gt` in mixing the last step's x̂ and v̂, at
    strength γ. It sends two messages.
    """

    citation: ClassVar[str] = "Zhao et al. 2022; MoTEF: Islamov et al. 2025"
    limits: ClassVar[dict[str, str]] = {"gamma": "(0, 1]", "lam": "(0, 1]"}

    gamma: float = 0.1
    lam: float = 1.0

    def init(self, x: Tensor) -> State:
        return zeros(x, "m", "v", "v_hat", "x_hat", "mixed_v", "mixed_x")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        v_hat, mixed_v, x_hat, mixed_x = (state[name] for name in ("v_hat", "mixed_v", "x_hat", "mixed_x"))
        m = torch.lerp(state["m"], g, self.lam)
        v = state["v"] + self.gamma * (mixed_v - v_hat) + m - state["m"]
        x = descend(x + self.gamma * (mixed_x - x_hat), node.lr, v)
        q_v, mixed_q_v = node.tell(v - v_hat)
        q_x, mixed_q_x = node.tell(x - x_hat, draw=1)
        hats = {"v_hat": v_hat + q_v, "x_hat": x_hat + q_x}
        return x, {"m": m, "v": v} | hats | {"mixed_v": mixed_v + mixed_q_v, "mixed_x": mixed_x + mixed_q_x}

    @property
    def needs(self) -> Needs:
        return Needs(                                       # W v̂ is a sum over the steps
            refuses_drift=True, fixed=True, symmetric=True, loss="harmed", absence="harmed",
            compresses=True, follows_messages=True, refuses_base="steps along a tracked mean of all nodes' gradients",
        )
