"""The `node` that an engine passes to an algorithm for one step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Engine(Protocol):
    """Operations that every engine provides for the rows of x that it hosts."""

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Average each tensor with the neighbours' by W(t); `time` is t as a tensor, for a captured step."""

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the exact mean over all nodes of each run, or over the nodes in the mask `among`."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """Return a mask of a random fraction of each run's nodes."""


@dataclass(frozen=True)
class StepNode:
    """Implementation of `quasiglobal.algorithms.Node` for step t of an engine."""

    t: int
    time: Tensor
    lr: Tensor
    engine: Engine
    gradient: Callable[[Tensor], Tensor]

    def mix(self, *tensors: Tensor) -> Any:
        mixed = self.engine.mix(self.t, tensors, self.time)
        return mixed[0] if len(tensors) == 1 else mixed

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        return self.engine.mean(tensor, among)

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.gradient(x)

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        return self.engine.sample(fraction, draw)


def choose(seeds: Tensor, draw: Tensor, n: int, count: int) -> Tensor:
    """Return a [runs, n] mask of `count` of n nodes for each run's seed: the nodes with the smallest hashes.

    Integer arithmetic on the device (splitmix64), so that both engines, CPU and GPU, choose the same nodes
    and a captured graph draws new nodes at each replay.

    >>> choose(torch.tensor([0, 1]), torch.tensor(3.0), n=4, count=2).sum(dim=1).tolist()
    [2, 2]
    """
    nodes = torch.arange(n, device=seeds.device)
    key = hashed(seeds[:, None], draw.to(torch.int64), nodes)
    return key <= key.sort(dim=1).values[:, count - 1 : count]


def hashed(key: Tensor, *numbers: Tensor | int) -> Tensor:
    """Hash whole numbers, which broadcast, to 64 bits (splitmix64, one round per number)."""
    for number in numbers:
        key = _scramble(key) + number
    return _scramble(key)


def _scramble(key: Tensor) -> Tensor:
    key = key - 0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        key = (key ^ (key >> shift & (1 << 64 - shift) - 1)) * factor
    return key ^ (key >> 31 & (1 << 33) - 1)
