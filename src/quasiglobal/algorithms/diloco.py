"""DiLoCo: many local AdamW steps, then a Nesterov step on the mean movement.

A. Douillard, Q. Feng, A. A. Rusu, R. Chhaparia, Y. Donchev, A. Kuncoro, M. Ranzato, A. Szlam, J. Shen: DiLoCo:
distributed low-communication training of language models. 2023.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Node, State, Wrapper, momentum, named, unnamed, zeros
from quasiglobal.algorithms.local_base import Local, check_local
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Wrapper):
    """τ steps of `base` at each node, without neighbours; then a momentum step from the round's starting point.

        d ← x₀ − mean of the nodes' x                   after steps τ, 2τ, …
        m ← β m + d
        x₀ ← x₀ − η_s (d + β m)                         η_s: `server_lr`; nesterov=false: m in place of d + β m

    Differs from `slowmo` in its local steps, which are not averaged with neighbours, and in its outer rate η_s, which
    does not follow the learning rate. The inner moments stay at their node. All nodes must start from the same x.
    """

    citation: ClassVar[str] = "Douillard et al. 2023"
    limits: ClassVar[dict[str, str]] = Wrapper.limits | {"server_lr": "(0, inf)"}

    server_lr: float = 0.7
    beta: float = 0.9
    nesterov: bool = True
    tau: int = 500

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local(self.base, "diloco")

    def init(self, x: Tensor) -> State:
        return {"x0": x} | zeros(x, "outer_m") | named(self.base.init(x))

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x0, m = state["x0"], state["outer_m"]
        x, inner = self.base.step(x, g, unnamed(state), Local(node))
        if self._outer(node.t):
            m, direction = momentum(m, x0 - node.mean(x), self.beta, self.nesterov)
            x = x0 = x0 - self.server_lr * direction
        return x, {"x0": x0, "outer_m": m} | named(inner)

    def phase(self, t: int) -> Hashable:
        return self._outer(t), self.base.phase(t)

    @property
    def needs(self) -> Needs:
        return super().needs._replace(doubly_stochastic=False)

    def _outer(self, t: int) -> bool:
        return t % self.tau == 0
