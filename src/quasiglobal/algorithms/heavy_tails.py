"""Methods for gradients with heavy-tailed noise, as of transformers: normalized tracking, and clipping.

S. Yu, D. Jakovetić, S. Kar: Decentralized nonconvex optimization under heavy-tailed noise: normalization and optimal
convergence. ICLR 2026. Its experiments include DSGD with clipped gradients.
R. Pascanu, T. Mikolov, Y. Bengio: On the difficulty of training recurrent neural networks. ICML 2013. (clipping)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Algorithm, Node, State, descend, zeros
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class GTNSGDm(Algorithm):
    """Gradient tracking of a momentum; each node moves by η along its normalized tracker.

        v_i ← β v_i₋ + (1 − β) g_i
        y_i ← Σ_j w_ij (y_j + v_j − v_j₋)
        x_i ← Σ_j w_ij (x_j − η y_j/‖y_j‖)              ‖·‖ over the whole model of a node

    Differs from `dsgd-gt` in the length of a step, which is η whatever the gradient, so η must decay; with η ~ 1/t and
    exact gradients the nodes approach the minimiser. Normalizing y, an estimate of the mean over all nodes, and not the
    node's own gradient, keeps heterogeneous data from biasing the direction. It sends two models, in two messages.
    """

    citation: ClassVar[str] = "Yu et al. 2026"

    beta: float = 0.9

    def init(self, x: Tensor) -> State:
        return zeros(x, "v", "y")

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        v = torch.lerp(g, state["v"], self.beta)
        y = node.mix(state["y"] + v - state["v"])
        norm = y.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(y.dtype).tiny)        # 0 stays 0
        return node.mix(descend(x, node.lr, y / norm)), {"v": v, "y": y}

    @property
    def needs(self) -> Needs:
        return Needs(
            refuses_drift=True, loss="harmed", refuses_base="steps along a tracked mean of all nodes' gradients"
        )


@dataclass(frozen=True, kw_only=True)
class ClippedDSGD(Algorithm):
    """DSGD with gradients of bounded length.

        x_i ← Σ_j w_ij (x_j − η min(1, c/‖g_j‖) g_j)        c: `clip`; ‖·‖ over the whole model of a node

    Differs from `dsgd` in the length of a step, at most ηc. On heterogeneous data clipping changes the optimum: the
    clipped gradients, not the gradients, balance each other. Differs from the option `--clip`, which every algorithm
    has, in acting on g with weight decay included.
    """

    citation: ClassVar[str] = "Pascanu et al. 2013; Yu et al. 2026"
    limits: ClassVar[dict[str, str]] = {"clip": "(0, inf)"}

    clip: float = 1.0

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        norm = g.norm(dim=-1, keepdim=True).clamp_min(self.clip)
        return node.mix(descend(x, node.lr, g * (self.clip / norm))), state

    @property
    def needs(self) -> Needs:
        return Needs(refuses_base="clips the gradient, which the base's step does not show")
