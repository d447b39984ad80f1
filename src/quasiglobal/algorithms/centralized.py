"""One model for all: any algorithm on the exact mean of all gradients.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Needs, Node, NodeView, State, Wrapper


@dataclass(frozen=True, kw_only=True)
class Centralized(Wrapper):
    """`base` on the mean gradient of all nodes, as an all-reduce gives it.

        g ← mean of g_j over all nodes, then base's step without neighbours

    Differs from its decentralized twin in that all nodes hold one model, momentum included: the upper
    bound that the paper compares with. All nodes must start from the same x. On one node it is the plain
    method: `sgdm-n` is torch.optim.SGD(nesterov=True), `qg-sgdm` is quasi-hyperbolic momentum.
    """

    citation: ClassVar[str] = "Goyal et al. 2017"

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, node.mean(g), state, Alone(node))

    @property
    def needs(self) -> Needs:
        return Needs(doubly_stochastic=False)


class Alone(NodeView):
    """The step seen by nodes that hold one model: there is nothing left to average."""

    def mix(self, *tensors: Tensor) -> Any:
        return tensors[0] if len(tensors) == 1 else tensors

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        return tensor

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.node.mean(self.node.full_gradient(x))
