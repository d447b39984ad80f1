"""The `node` that an engine passes to an algorithm for one step."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from quasiglobal.algorithms.base import Messages
from quasiglobal.algorithms.edges import Edges
from quasiglobal.errors import InputError


class Engine(Protocol):
    """Operations that every engine provides for the rows of x that it hosts."""

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Average each tensor with the neighbours' by W(t); `time` is t as a tensor, for a captured step."""

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Add what each node's senders push to it by P(t)."""

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Exchange [rows, degree, c] along the links of step t, or of step `at`; return what came, and its mask."""

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """Compress v to q by the wire; return q and Σ_j w_ij q_j."""

    def edges(self, x: Tensor) -> Edges:
        """Return the neighbours of the nodes here, for models like x."""

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the exact mean over all nodes of each run, or over the nodes in the mask `among`."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """Return a mask of a random fraction of each run's nodes."""

    def mix_sometimes(self, p: float, t: int, tensors: tuple[Tensor, ...], time: Tensor) -> tuple[Tensor, ...]:
        """Mix with probability p, all nodes of a run together; otherwise return the tensors unchanged."""


@dataclass(frozen=True)
class StepNode:
    """Implementation of `quasiglobal.algorithms.Node` for step t of an engine; `lazy` mixes with (I + W)/2."""

    t: int
    time: Tensor
    lr: Tensor
    engine: Engine
    x: Tensor
    further: Callable[[Tensor], Tensor]
    """The gradient of the step's batch elsewhere."""
    full: Callable[[Tensor], Tensor]
    weight_decay: float | Tensor = 0.0
    lazy: bool = False

    def mix(self, *tensors: Tensor) -> Any:
        self._check("mix", tensors)
        return self._mixed(tensors, self.engine.mix(self.t, tensors, self.time))

    def mix_sometimes(self, p: float, *tensors: Tensor) -> Any:
        self._check("mix_sometimes", tensors)
        if not 0 <= p <= 1:
            raise InputError(f"node.mix_sometimes needs a probability in [0, 1], got {p}")
        return self._mixed(tensors, self.engine.mix_sometimes(p, self.t, tensors, self.time))

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        self._check("mean", (tensor,))
        return self.engine.mean(tensor, among)

    def push(self, *tensors: Tensor) -> Any:
        self._check("push", tensors)
        pushed = self.engine.push(self.t, tensors, self.time)
        return pushed[0] if len(tensors) == 1 else pushed

    @property
    def edges(self) -> Edges:
        return self.engine.edges(self.x)

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[Any, Tensor]:
        stacked = tuple(self._stacked(one) for one in messages)
        _check_types("exchange", stacked)
        received, arrived = self.engine.exchange(self.t, stacked, self.time, at)
        return received[0] if len(messages) == 1 else received, arrived

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        self._check("tell", (v,))
        return self.engine.tell(self.t, v, self.time, draw)

    def gradient(self, y: Tensor) -> Tensor:
        if not isinstance(y, Tensor) or y.shape != self.x.shape:
            raise InputError(f"node.gradient takes models like x, of shape {list(self.x.shape)}, got {_said(y)}")
        return self.further(y)

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.full(x)

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        if not 0 < fraction <= 1:
            raise InputError(f"node.sample needs a fraction in (0, 1], got {fraction}")
        return self.engine.sample(fraction, draw)

    def _check(self, what: str, tensors: tuple[Tensor, ...]) -> None:
        """Raise InputError unless all are [k, c], of one type of floating-point numbers."""
        k = len(self.x)
        for v in tensors:
            if not isinstance(v, Tensor) or v.ndim != 2 or len(v) != k:
                raise InputError(f"node.{what} takes tensors of shape [{k}, c], a row for each node, got {_said(v)}")
        _check_types(what, tensors)

    def _stacked(self, messages: Messages) -> Tensor:
        """Messages as [k, degree, c]."""
        k, degree = len(self.x), self.edges.degree
        if isinstance(messages, Mapping):
            if set(messages) != set(range(degree)):
                got = ", ".join(map(str, messages))
                raise InputError(f"node.exchange needs a message for each slot 0 to {degree - 1}, got {got}")
            for v in messages.values():
                if not isinstance(v, Tensor) or v.ndim != 2 or v.shape != messages[0].shape:
                    raise InputError(f"node.exchange needs messages of one shape [{k}, c], got {_said(v)}")
            messages = torch.stack([messages[j] for j in range(degree)], dim=1) if degree else self.x[:, None]
        if not isinstance(messages, Tensor) or messages.ndim != 3 or len(messages) != k or (
            messages.shape[1] not in (1, degree)
        ):
            raise InputError(
                f"node.exchange takes messages of shape [{k}, {degree}, c], or a dict of them, got {_said(messages)}"
            )
        return messages.expand(k, degree, messages.shape[2])

    def _mixed(self, tensors: tuple[Tensor, ...], mixed: tuple[Tensor, ...]) -> Any:
        if self.lazy:
            mixed = tuple(torch.lerp(v, Wv, 0.5) for v, Wv in zip(tensors, mixed, strict=True))
        return mixed[0] if len(tensors) == 1 else mixed


def _check_types(what: str, tensors: tuple[Tensor, ...]) -> None:
    """Raise InputError unless the tensors of a message have one type of floating-point numbers."""
    types = {v.dtype for v in tensors}
    if len(types) != 1 or not tensors[0].is_floating_point():
        got = " and ".join(sorted(str(one).removeprefix("torch.") for one in types)) or "nothing"
        raise InputError(f"node.{what} takes tensors of one floating-point type, got {got}; convert them")


def _said(value: object) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def happens(probability: float, key: Tensor) -> Tensor:
    """Mask the hashes whose first 53 bits, read as a fraction, are below the probability."""
    return (key >> 11 & (1 << 53) - 1) < round(probability * 2**53)


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
