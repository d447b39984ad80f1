"""Gradient tracking: each node follows an estimate of the mean gradient over all nodes.

S. Pu, A. Nedić: Distributed stochastic gradient tracking methods. Mathematical Programming 2020.
S. Lu, X. Zhang, H. Sun, M. Hong: GNSD: a gradient-tracking based nonconvex stochastic algorithm. 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class GradientTracking(Algorithm):
    """Mixes x, then steps along the node's own, unmixed tracker y (combine, then adapt); y is mixed for the next step.

        y ← W y₋ + g − g₋                              at the first step y = g
        x ← W x − η u                                  u = y, or momentum of y

    Differs from `dsgd` in the direction, an estimate of the mean gradient, so that exact gradients lead to
    the exact minimiser. The cost is a second message of the model's size. Momentum (`beta`, `nesterov`)
    is built from the node's own y, as in the paper's comparison.
    """

    citation: ClassVar[str] = "Pu & Nedić 2020; Lu et al. 2019"

    beta: float = 0.0
    nesterov: bool = False

    def init(self, x: Tensor) -> State:
        return zeros(x, "Wy", "g_old") | (zeros(x, "m") if self.beta else {})

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        y = state["Wy"] + g - state["g_old"]
        memory, direction = {}, y
        if self.beta:
            m, direction = momentum(state["m"], y, self.beta, self.nesterov)
            memory = {"m": m}
        Wx, Wy = node.mix(x, y)
        return descend(Wx, node.lr, direction), {"Wy": Wy, "g_old": g} | memory

    @property
    def needs(self) -> Needs:
        return Needs(
            refuses_drift=True, loss="harmed",
            refuses_base="steps along a tracked mean of all nodes' gradients, after the average",
        )
