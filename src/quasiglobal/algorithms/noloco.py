"""NoLoCo: many local steps, then a momentum step towards the average with few others.

J. Kolehmainen, N. Blagoev, J. Donaghy, O. Ersoy, C. Nies: NoLoCo: no-all-reduce low communication training method for
large models. 2025.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Node, State, Wrapper, named, unnamed, zeros
from quasiglobal.algorithms.local_base import Local, check_local, refuses_optimizer
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class NoLoCo(Wrapper):
    """τ steps of `base` at each node, without neighbours; then a momentum step from the round's starting point x₀.

        m_i ← β m_i + η_s (Σ_j w_ij x_j − x₀_i)          after steps τ, 2τ, …; η_s: `server_lr`
        x₀_i ← x₀_i + m_i,   x_i ← x₀_i

    The paper averages in random pairs: use the topology `matching:N`. The two averages that its code sends, of
    x − x₀ and of x₀, add up to the average of x, which is sent here.

    Differs from `diloco` in its average, with neighbours instead of all nodes, so that each node has its own x₀, and in
    its momentum, which is not Nesterov's. With heterogeneous data and a constant η it converges near the minimiser,
    not to it. The inner moments stay at their node.
    """

    citation: ClassVar[str] = "Kolehmainen et al. 2025"
    limits: ClassVar[dict[str, str]] = Wrapper.limits | {"server_lr": "(0, inf)"}

    server_lr: float = 0.7
    beta: float = 0.5
    tau: int = 50

    def __post_init__(self) -> None:
        super().__post_init__()
        check_local(self.base, "noloco")

    def init(self, x: Tensor) -> State:
        return {"x0": x} | zeros(x, "outer_m") | named(self.base.init(x))

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        x0, m = state["x0"], state["outer_m"]
        x, inner = self.base.step(x, g, unnamed(state), Local(node))
        if self._outer(node.t):
            m = self.beta * m + self.server_lr * (node.mix(x) - x0)
            x = x0 = x0 + m
        return x, {"x0": x0, "outer_m": m} | named(inner)

    def phase(self, t: int) -> Hashable:
        return self._outer(t), self.base.phase(t)

    @property
    def needs(self) -> Needs:
        return super().needs._replace(refuses_base=refuses_optimizer(self.base))

    def _outer(self, t: int) -> bool:
        return t % self.tau == 0
