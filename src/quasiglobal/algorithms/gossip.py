"""Average consensus: what is left of an algorithm without gradients.

L. Xiao, S. Boyd: Fast linear iterations for distributed averaging. Systems & Control Letters 2004.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Node, NodeView, State, Wrapper


@dataclass(frozen=True, kw_only=True)
class Gossip(Wrapper):
    """`base` with gradient 0 and step size 1: the nodes agree on the mean of their starting points.

        x ← W x                                         of `dsgd`
        x⁺ ← W (x − β m),  m ← μ m + (1 − μ)(x − x⁺)     of `qg-dsgdm` (the paper's section 4.1)

    Differs from its base in having nothing to learn: it shows how fast the mixing alone is. Quasi-global
    gossip is the faster one to a moderate precision on rings, and can be the slower one beyond.
    """

    citation: ClassVar[str] = "Xiao & Boyd 2004"

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, torch.zeros_like(g), state, UnitStep(node))

    @property
    def divides_by_lr(self) -> bool:
        return False


class UnitStep(NodeView):
    """The step with a learning rate of one."""

    @property
    def lr(self) -> Tensor:
        return torch.ones_like(self.node.lr)
