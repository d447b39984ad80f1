"""DFedAvgM and DFedSAM: decentralized federated averaging, with momentum or with sharpness-aware local steps.

T. Sun, D. Li, B. Wang: Decentralized federated averaging. IEEE Transactions on Pattern Analysis and Machine
Intelligence 2023.
DFedSAM: Y. Shi, L. Shen, K. Wei, Y. Sun, B. Yuan, X. Wang, D. Tao: Improving the model consistency of decentralized
federated learning. ICML 2023.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class DFedAvgM(Algorithm):
    """Rounds of τ local heavy-ball steps, then an average with the neighbours.

        m_i ← β m_i + g_i,   x_i ← x_i − η m_i              τ times, from m_i = 0
        x_i ← Σ_j w_ij x_j

    Differs from `dsgdm` on the topology every:τ/… in its momentum, which starts at 0 in each round. With heterogeneous
    data and a constant η it converges near the minimiser, not to it.
    """

    citation: ClassVar[str] = "Sun et al. 2023"

    beta: float = 0.9
    tau: int = 5

    def init(self, x: Tensor) -> State:
        return zeros(x, "m")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m = torch.add(g, state["m"], alpha=self.beta)
        x = descend(x, node.lr, m)
        return (node.mix(x), zeros(x, "m")) if self.phase(node.t) else (x, {"m": m})

    def phase(self, t: int) -> Hashable:
        """Whether step t ends a round."""
        return t % self.tau == 0

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="adds momentum of its own to the local step")


@dataclass(frozen=True, kw_only=True)
class DFedSAM(DFedAvgM):
    """Rounds of τ sharpness-aware local steps, then averages with the neighbours.

        g̃_i ← the gradient of the same batch at x_i + ρ g_i/‖g_i‖          ‖·‖ over the whole model of a node
        m_i ← β m_i + g̃_i,   x_i ← x_i − η m_i                             τ times, from m_i = 0
        x_i ← Σ_j w_ij x_j                                                 `gossips` times

    Differs from `dfedavgm` in the point of the gradient, uphill of x, which leads to flatter minima, for two gradients
    per step; and in its β, which is 0. The paper's DFedSAM-MGS has more than one gossip per round, such as gossips=4.
    """

    citation: ClassVar[str] = "Shi et al. 2023"
    limits: ClassVar[dict[str, str]] = Algorithm.limits | {"rho": "[0, inf)", "gossips": "[1, inf)"}

    beta: float = 0.0
    rho: float = 0.01
    gossips: int = 1

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        norm = g.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(g.dtype).tiny)        # 0 stays 0
        x, state = super().step(x, node.gradient(x + self.rho * g / norm), state, node)
        for _ in range(self.gossips - 1 if self.phase(node.t) else 0):
            x = node.mix(x)
        return x, state

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="takes the gradient elsewhere than at x")
