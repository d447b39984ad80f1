"""GUT: tracks the neighbours' model updates, without sending a second model.

S. A. Aketi, A. Hashemi, K. Roy: Global update tracking: a decentralized learning algorithm for heterogeneous data.
NeurIPS 2023.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class GUT(Algorithm):
    """Follows the difference of two consecutive updates; gradients are taken at the average x = W X.

        u ← x − X,   δ ← g − u/η₋
        y ← δ − μ ((x − x₋ + b u₋)/η₋ + δ₋)             b = 1 + β, with Nesterov 1 + β + β²
        m ← β m + y
        X⁺ ← X − η m                                    (Nesterov: y + β m in place of m)
        x⁺ ← W X⁺                                       X = x, u = u₋ = δ₋ = 0 at the first step

    η₋ is the learning rate of the last step. The model x, which is tested and saved, is the average W X; the node's own
    model X is part of the state.

    Differs from `dsgd-gt` in tracking updates, which the models themselves show, so that it sends one model; it is not
    exact: with exact gradients its fixed point is that of DSGD with η (1 − μ)/(1 − μ + μb). The authors tune μ for each
    data set. If W changes over time or is directed it diverges.
    """

    citation: ClassVar[str] = "Aketi et al. 2023"

    mu: float = 0.9
    beta: float = 0.0
    nesterov: bool = False

    def init(self, x: Tensor) -> State:
        return {"X": x} | zeros(x, "pull", "past") | (zeros(x, "m") if self.beta else {})

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        X, u = state["X"], x - state["X"]
        delta = g - state["pull"]
        y = delta - state["past"]
        memory, direction = {}, y
        if self.beta:
            m, direction = momentum(state["m"], y, self.beta, self.nesterov)
            memory = {"m": m}
        X_new = descend(X, node.lr, direction)
        x_new = node.mix(X_new)
        b = 1 + self.beta + (self.beta**2 if self.nesterov else 0)
        past = self.mu * ((x_new - x + b * u) / node.lr + delta)
        return x_new, {"X": X_new, "pull": (x_new - X_new) / node.lr, "past": past} | memory

    @property
    def needs(self) -> Needs:
        """On quadratics it diverges if W changes or is directed; with momentum also if messages are lost."""
        return Needs(
            fixed=True, symmetric=True, loss="refused" if self.beta > 0 else "tolerated", divides_by_lr=True,
            refuses_base="keeps the gradients in its corrections, which the base's step does not show",
        )
