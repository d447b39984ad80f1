"""DFedAvgM: decentralized federated averaging with momentum.

T. Sun, D. Li, B. Wang: Decentralized federated averaging. IEEE Transactions on Pattern Analysis and Machine
Intelligence 2023.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros


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
    def refuses_base(self) -> str:
        return "adds momentum of its own to the local step"
