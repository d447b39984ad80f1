"""Decentralized SGD, plain and with local momentum.

X. Lian, C. Zhang, H. Zhang, C.-J. Hsieh, W. Zhang, J. Liu: Can decentralized algorithms outperform
centralized algorithms? NeurIPS 2017.
H. Yu, R. Jin, S. Yang: On the linear speedup analysis of communication efficient momentum SGD for distributed
non-convex optimization. ICML 2019.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, momentum, zeros
from quasiglobal.algorithms.needs import Needs
from quasiglobal.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DSGD(Algorithm):
    """A local gradient step, then an average with the neighbours.

        x_i ← Σ_j w_ij (x_j − η g_j)

    Differs from centralized SGD only in the average: over the neighbours instead of over all nodes.
    With heterogeneous data and a constant η it converges near the minimiser, not to it.
    """

    citation: ClassVar[str] = "Lian et al. 2017"

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return node.mix(descend(x, node.lr, g)), state

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base=None)


@dataclass(frozen=True, kw_only=True)
class DSGDm(Algorithm):
    """DSGD with a momentum buffer at each node (Algorithm 1, line 4).

        m_i ← β m_i + g_i
        x_i ← Σ_j w_ij (x_j − η m_j)            (Nesterov: g_j + β m_j in place of m_j)

    Differs from `qg-dsgdm` in the input of the momentum: the node's own gradients, which on heterogeneous
    data point to the node's own minimum. With exact gradients its fixed point is that of DSGD with η/(1 − β).

    `sync` corrects this with a second message: `momentum` averages m after the step, `gradient` averages g
    before it, with the neighbours (`over=graph`) or over all nodes (`over=all`; Yu et al. 2019).
    """

    citation: ClassVar[str] = "Lian et al. 2017"

    beta: float = 0.9
    nesterov: bool = False
    sync: Literal["none", "momentum", "gradient"] = "none"
    over: Literal["graph", "all"] = "graph"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.over == "all" and self.sync == "none":
            raise InputError("over=all says with whom to synchronize, but sync=none; set sync=momentum or gradient")

    def init(self, x: Tensor) -> State:
        return zeros(x, "m")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        synchronize = node.mix if self.over == "graph" else node.mean
        if self.sync == "gradient":
            g = synchronize(g)
        m, direction = momentum(state["m"], g, self.beta, self.nesterov)        # line 4
        x_new = node.mix(descend(x, node.lr, direction))                        # lines 6-7
        return x_new, {"m": synchronize(m) if self.sync == "momentum" else m}

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="adds momentum of its own to the local step")
