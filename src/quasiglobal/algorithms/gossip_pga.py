"""Gossip-PGA: gossip with a periodic global average.

Y. Chen, K. Yuan, Y. Zhang, P. Pan, Y. Xu, W. Yin: Accelerating gossip SGD with periodic global averaging. ICML 2021.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class GossipPGA(Algorithm):
    """DSGD in which every τ-th average is over all nodes.

        m_i ← β m_i + g_i
        x_i ← Σ_j w_ij (x_j − η m_j)            (Nesterov: g_j + β m_j in place of m_j)
        x_i ← mean of (x_j − η m_j)             after steps τ, 2τ, …

    Differs from `slowmo` in having no outer momentum. With heterogeneous data its bias is smaller than that of `dsgd`,
    since the nodes cannot drift apart for longer than τ steps. `beta` adds the local momentum of `dsgdm`.
    """

    citation: ClassVar[str] = "Chen et al. 2021"

    beta: float = 0.0
    nesterov: bool = False
    tau: int = 16

    def init(self, x: Tensor) -> State:
        return zeros(x, "m") if self.beta else {}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        direction = g
        if self.beta:
            m, direction = momentum(state["m"], g, self.beta, self.nesterov)
            state = {"m": m}
        average = node.mean if self.phase(node.t) else node.mix
        return average(descend(x, node.lr, direction)), state

    def phase(self, t: int) -> Hashable:
        """Whether step t ends with the average over all nodes."""
        return t % self.tau == 0

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="adds momentum of its own to the local step" if self.beta else None)
