"""Combine while adapt: models travel while the gradients are computed.

J. Chen, A. H. Sayed: Diffusion adaptation strategies for distributed optimization and learning over networks. IEEE
Transactions on Signal Processing 2012, compare the two orders of the steps.
X. Lian, C. Zhang, H. Zhang, C.-J. Hsieh, W. Zhang, J. Liu: Can decentralized algorithms outperform centralized
algorithms? NeurIPS 2017, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.adam import DAdam, QGDAdam
from quasiglobal.algorithms.base import Node, NodeView, OneOrMore, State, Wrapper
from quasiglobal.algorithms.needs import Needs
from quasiglobal.algorithms.quasi_global import QGDSGDm
from quasiglobal.algorithms.sgd import DSGD, DSGDm
from quasiglobal.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Overlap(Wrapper):
    """`base`, with the average of the models before its local step instead of after it.

        x_i⁺ ← Σ_j w_ij x_j − η u_i             u_i: the base's update from the gradient at x_i

    Differs from its base, x_i⁺ ← Σ_j w_ij (x_j − η u_j), in that the neighbours' updates arrive one step later. The
    models x_j are known before the gradients, so an engine may send them while the gradients are computed.
    """

    citation: ClassVar[str] = "Lian et al. 2017"

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.base
        once = isinstance(base, DSGD | DAdam | QGDAdam | QGDSGDm) or (isinstance(base, DSGDm) and base.sync == "none")
        if not once:
            raise InputError(
                "overlap needs an algorithm that makes a local step and then averages the models, and nothing else: "
                f"dsgd, dsgdm, dsgdm-n (without sync), dadam, dadamw, qg-dsgdm, qg-dsgdm-n or qg-dadam, got {base}"
            )

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, g, state, _Combined(node, x, node.mix(x)))

    @property
    def needs(self) -> Needs:
        return super().needs._replace(refuses_base="averages the models before the local step")


class _Combined(NodeView):
    """Node view in which the models are averaged already: `mix` adds a local step to their average."""

    def __init__(self, node: Node, x: Tensor, mixed: Tensor) -> None:
        super().__init__(node)
        self.x, self.mixed = x, mixed

    def mix(self, *tensors: Tensor) -> OneOrMore:
        (v,) = tensors
        return self.mixed + (v - self.x)
