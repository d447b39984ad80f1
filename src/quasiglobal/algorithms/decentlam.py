"""DecentLaM: momentum of the whole movement of a DSGD step, which keeps its bias free of momentum.

K. Yuan, Y. Chen, X. Huang, Y. Zhang, P. Pan, Y. Xu, W. Yin: DecentLaM: decentralized momentum SGD for large-batch deep
training. ICCV 2021.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class DecentLaM(Algorithm):
    """Heavy-ball momentum with the movement of a DSGD step in place of the gradient.

        g̃_i ← (x_i − Σ_j w_ij (x_j − η g_j)) / η
        m_i ← β m_i + g̃_i
        x_i ← x_i − η m_i

    Differs from `dsgdm` in the input of the momentum, which includes the average with the neighbours. Differs from
    `qg-dsgdm` in its step, which follows the momentum alone. With exact gradients its fixed point is that of DSGD with
    the same η. The momentum of the mixing is unstable if W is directed or changes, as it does when messages are lost.
    """

    citation: ClassVar[str] = "Yuan et al. 2021"

    beta: float = 0.9

    def init(self, x: Tensor) -> State:
        return zeros(x, "m")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        m = self.beta * state["m"] + (x - node.mix(descend(x, node.lr, g))) / node.lr
        return descend(x, node.lr, m), {"m": m}

    @property
    def needs(self) -> Needs:
        """Measured on quadratics with β = 0.9: it diverges on one-peer and on directed exponential graphs."""
        return Needs(
            fixed=True, symmetric=True, loss="refused", divides_by_lr=True,
            refuses_base="adds momentum of its own to the local step",
        )
