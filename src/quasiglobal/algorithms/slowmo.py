"""SlowMo: a slow outer momentum around any base algorithm.

J. Wang, V. Tantia, N. Ballas, M. Rabbat: SlowMo: improving communication-efficient distributed SGD with
slow momentum. ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from quasiglobal.algorithms.base import Edges, Node, State, Wrapper, named, unnamed, zeros
from quasiglobal.algorithms.needs import Needs, needs_of


@dataclass(frozen=True, kw_only=True)
class SlowMo(Wrapper):
    """τ steps of `base`, an exact average, then a momentum step from the round's starting point.

        x_τ ← mean of the nodes' x                      average=false: each node's own x
        m ← β m + (x₀ − x_τ)/η
        x₀ ← x₀ − α η m

    Differs from `qg-dsgdm` in that the local steps do not use the slow buffer, and in the exact average.
    `buffers=average` also averages the base's buffers at each round. `released=true` makes the outer step
    after steps 1, 1 + τ, …, as in the authors' code, instead of τ, 2τ, …
    """

    citation: ClassVar[str] = "Wang et al. 2020"

    alpha: float = 1.0
    beta: float = 0.7
    tau: int = 12
    average: bool = True
    buffers: Literal["maintain", "average"] = "maintain"
    released: bool = False

    def init(self, x: Tensor) -> State:
        return {"x0": x} | zeros(x, "slow_m") | named(self.base.init(x))

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        return named(self.base.init_edges(x, edges))

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x0, m = state["x0"], state["slow_m"]
        x, inner = self.base.step(x, g, unnamed(state), node)
        if self._outer(node.t):
            x_tau = node.mean(x) if self.average else x
            m = self.beta * m + (x0 - x_tau) / node.lr
            x = x0 = x0 - self.alpha * node.lr * m
            if self.buffers == "average":
                inner = {name: node.mean(value) for name, value in inner.items()}
        return x, {"x0": x0, "slow_m": m} | named(inner)

    def phase(self, t: int) -> Hashable:
        return self._outer(t), self.base.phase(t)

    @property
    def needs(self) -> Needs:
        inner = needs_of(self.base)
        reason = inner.refuses_base and f"wraps {type(self.base).__name__}, which {inner.refuses_base}"
        if self.buffers == "average":
            reason = "averages buffers with buffers=average, but the base's buffers stay on their node"
        return inner._replace(divides_by_lr=True, needs_full_precision=inner.full_precision, refuses_base=reason)

    def _outer(self, t: int) -> bool:
        return (t - self.released) % self.tau == 0
