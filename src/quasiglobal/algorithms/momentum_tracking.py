"""Momentum Tracking: each node's momentum is corrected towards the mean momentum of all nodes.

Y. Takezawa, H. Bao, K. Niwa, R. Sato, M. Yamada: Momentum Tracking: momentum acceleration for decentralized deep
learning on heterogeneous data. TMLR 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class MomentumTracking(Algorithm):
    """Local momentum u, minus a correction c that tracks how far u is from the mean momentum of all nodes.

        u_i ← β u_i + g_i
        x_i⁺ ← Σ_j w_ij x_j − η (u_i − c_i)
        c_i⁺ ← Σ_j w_ij (c_j − u_j) + u_i

    Differs from `dsgdm-gt` in the tracked quantity: momentum, instead of the gradient from which each node then builds
    its own momentum. On a fixed W the order of these two linear filters has no effect, and both methods take the same
    path; this one needs less memory. With exact gradients it reaches the exact minimiser. It sends two models in one
    message.

    u and c start at 0. `init=mean` starts both at (g − ḡ)/(1 − β), with ḡ the exact mean of the first gradients, as in
    the authors' code.
    """

    citation: ClassVar[str] = "Takezawa et al. 2023"
    limits: ClassVar[dict[str, str]] = {"beta": "[0, 1)"}

    beta: float = 0.9
    init_: Literal["zero", "mean"] = "zero"

    def init(self, x: Tensor) -> State:
        return zeros(x, "u", "c")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        u, c = state["u"], state["c"]
        if self.init_ == "mean" and node.t == 1:
            u = c = (g - node.mean(g)) / (1 - self.beta)
        u = self.beta * u + g
        Wx, mixed = node.mix(x, c - u)
        return descend(Wx, node.lr, u - c), {"u": u, "c": mixed + u}

    @property
    def needs(self) -> Needs:
        return Needs(
            refuses_drift=True, loss="harmed",
            refuses_base="steps along a tracked mean of all nodes' momenta, after the average",
        )
