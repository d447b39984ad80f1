"""SlowMo: a slow outer momentum around any base algorithm.

J. Wang, V. Tantia, N. Ballas, M. Rabbat: SlowMo: improving communication-efficient distributed SGD with
slow momentum. ICLR 2020.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from quasiglobal.algorithms.base import Node, State, Wrapper, zeros


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
        inner = {f"base.{name}": value for name, value in self.base.init(x).items()}
        return {"x0": x} | zeros(x, "slow_m") | inner

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x0, m = state["x0"], state["slow_m"]
        inner = {name.removeprefix("base."): v for name, v in state.items() if name.startswith("base.")}
        x, inner = self.base.step(x, g, inner, node)
        if self._outer(node.t):
            x_tau = node.mean(x) if self.average else x
            m = self.beta * m + (x0 - x_tau) / node.lr
            x = x0 = x0 - self.alpha * node.lr * m
            if self.buffers == "average":
                inner = {name: node.mean(value) for name, value in inner.items()}
        return x, {"x0": x0, "slow_m": m} | {f"base.{name}": value for name, value in inner.items()}

    def phase(self, t: int) -> Hashable:
        return self._outer(t), self.base.phase(t)

    @property
    def divides_by_lr(self) -> bool:
        return True

    def _outer(self, t: int) -> bool:
        return (t - self.released) % self.tau == 0
