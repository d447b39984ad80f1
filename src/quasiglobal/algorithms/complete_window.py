"""A window of full communication: exact averages over all nodes in place of gossip, in some steps of a run.

T. Zhu, T. Zhang, M. Wang, Z. Zhou, C. Wang: On the surprising effectiveness of a single global merging in
decentralized learning. ICLR 2026.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from quasiglobal.algorithms.base import Messages, Node, NodeView, State, Wrapper
from quasiglobal.errors import InputError


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

    def mix(self, *tensors: Tensor) -> Any:
        means = tuple(self.node.mean(v) for v in tensors)
        return means[0] if len(means) == 1 else means

    def push(self, *tensors: Tensor) -> Any:
        return self.mix(*tensors)

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        return v, self.node.mean(v)

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[Any, Tensor]:
        raise InputError("an algorithm with messages per edge has no step with an average over all nodes")
