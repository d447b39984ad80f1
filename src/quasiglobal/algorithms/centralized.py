"""Centralized training: any algorithm on the exact mean of all nodes' gradients.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. 2017.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Messages, Node, NodeView, State, Wrapper
from quasiglobal.algorithms.needs import Needs
from quasiglobal.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Centralized(Wrapper):
    """`base` on the mean gradient of all nodes, computed by an all-reduce.

        g ← mean of g_j over all nodes, then base's step without neighbours

    Differs from its decentralized base in that all nodes hold the same model and momentum: the upper
    bound in the paper's comparison. All nodes must start from the same x. On one node it is the plain
    method: `sgdm-n` is torch.optim.SGD(nesterov=True), `qg-sgdm` is quasi-hyperbolic momentum.
    """

    citation: ClassVar[str] = "Goyal et al. 2017"

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, node.mean(g), state, Alone(node))

    @property
    def needs(self) -> Needs:
        return Needs(doubly_stochastic=False)

    @property
    def refuses_base(self) -> str:
        return "averages the gradients before the step, whereas a base steps on this node's gradient"


class Alone(NodeView):
    """Node view for nodes that hold the same model: `mix` and `mean` change nothing."""

    def mix(self, *tensors: Tensor) -> Any:
        return tensors[0] if len(tensors) == 1 else tensors

    def push(self, *tensors: Tensor) -> Any:
        return self.mix(*tensors)

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        return v, v

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[Any, Tensor]:
        raise InputError("an algorithm that exchanges messages with each neighbour has no centralized form")

    def mix_sometimes(self, p: float, *tensors: Tensor) -> Any:
        return self.mix(*tensors)

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        return tensor

    def gradient(self, y: Tensor) -> Tensor:
        return self.node.mean(self.node.gradient(y))

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.node.mean(self.node.full_gradient(x))
