"""Average consensus: an algorithm without its gradients.

L. Xiao, S. Boyd: Fast linear iterations for distributed averaging. Systems & Control Letters 2004.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Node, NodeView, State, Wrapper
from quasiglobal.algorithms.needs import Needs


@dataclass(frozen=True, kw_only=True)
class Gossip(Wrapper):
    """`base` with gradient 0 and step size 1: the nodes converge to the mean of their starting points.

        x ← W x                                         base `dsgd`
        x⁺ ← W (x − β m),  m ← μ m + (1 − μ)(x − x⁺)     base `qg-dsgdm` (the paper's section 4.1)

    Differs from its base in using no gradients: it shows the speed of mixing alone. On rings, quasi-global
    gossip is faster up to a moderate precision and can be slower beyond it.
    """

    citation: ClassVar[str] = "Xiao & Boyd 2004"

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, torch.zeros_like(g), state, UnitStep(node))

    @property
    def needs(self) -> Needs:
        inner = super().needs
        return inner._replace(
            divides_by_lr=False, needs_full_precision=inner.full_precision, refuses_base="uses no gradients"
        )


class UnitStep(NodeView):
    """Node view with a learning rate of 1."""

    @property
    def lr(self) -> Tensor:
        return torch.ones_like(self.node.lr)
