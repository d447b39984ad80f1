"""Averages over all nodes in place of neighbours: centralized training, and windows of full communication.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. 2017.
T. Zhu, T. Zhang, M. Wang, Z. Zhou, C. Wang: On the surprising effectiveness of a single global merging in
decentralized learning. ICLR 2026.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from quasiglobal.algorithms.base import Messages, Node, NodeView, OneOrMore, State, Wrapper
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
        return super().needs.of_step()._replace(
            refuses_base="averages the gradients before the step, whereas a base steps on this node's gradient"
        )


@dataclass(frozen=True, kw_only=True)
class CompleteWindow(Wrapper):
    """`base`, with W = 11ᵀ/n in steps `first` to `last`.

    Differs from `base` on a complete graph in that the nodes need no links to all others: an average over all nodes is
    an all-reduce.
    """

    first: int
    last: int

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        return self.base.step(x, g, state, Everybody(node) if self._inside(node.t) else node)

    def phase(self, t: int) -> Hashable:
        return self._inside(t), self.base.phase(t)

    def _inside(self, t: int) -> bool:
        return self.first <= t <= self.last


class Everybody(NodeView):
    """Node view in which `mix` and `push` average over all nodes."""

    def mix(self, *tensors: Tensor) -> OneOrMore:
        means = tuple(self.mean(v) for v in tensors)
        return means[0] if len(means) == 1 else means

    def push(self, *tensors: Tensor) -> OneOrMore:
        return self.mix(*tensors)

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        return v, self.mean(v)

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[OneOrMore, Tensor]:
        raise InputError("an algorithm with messages per edge cannot average over all nodes instead")


class Alone(Everybody):
    """Node view for nodes that hold the same model, which is its own average."""

    def mix_sometimes(self, p: float, *tensors: Tensor) -> OneOrMore:
        return self.mix(*tensors)

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        return tensor

    def gradient(self, y: Tensor) -> Tensor:
        return self.node.mean(self.node.gradient(y))

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.node.mean(self.node.full_gradient(x))
