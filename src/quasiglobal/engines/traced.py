"""The step of an algorithm as a function of tensors, in which the exchange between nodes is opaque.

It is recorded as a program (`stacked/step.py`), and run to count its messages (`costs.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Edges
from quasiglobal.engines.host import Host
from quasiglobal.engines.simulator import Simulator
from quasiglobal.stacked.recording import Untraceable
from quasiglobal.stacked.step import EXCHANGE, LINKED, MEAN, MIX, OPAQUE, Update, Wiring

if TYPE_CHECKING:
    from quasiglobal.algorithms import Algorithm


@dataclass(frozen=True)
class Message:
    """A message of a step: how it is sent, and its tensors."""

    how: str
    """mix, push, exchange, tell, mean, or sometimes: drawn with probability `p`."""
    tensors: tuple[Tensor, ...]
    p: float = 1.0


class TracedEngine(Host):
    """Engine whose operations are opaque: nothing comes back. `sent` has the messages, in order.

    Without `mixes`, as at a step without gossip, a mix changes nothing.
    """

    def __init__(self, engine: Host, mixes: bool = True) -> None:
        super().__init__(engine.topology, nodes=engine.nodes, seeds=engine.seeds, shared=engine.shared)
        self.mixes = mixes
        self.sent: list[Message] = []

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self.sent.append(Message("mix", tensors))
        return tuple(MIX(list(tensors))) if self.mixes else tensors

    def mix_sometimes(self, p: float, t: int, tensors: tuple[Tensor, ...], time: Tensor) -> tuple[Tensor, ...]:
        self.sent.append(Message("sometimes", tensors, p))
        return tuple(OPAQUE(list(tensors), "a coin"))

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self.sent.append(Message("push", tensors))
        return tuple(OPAQUE(list(tensors), "a push"))

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        self.sent.append(Message("tell", (v,)))
        q, Wq = OPAQUE([v, v], "a compressed message")
        return q, Wq

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        self.sent.append(Message("exchange", messages))
        step = self.topology.position(t if at is None else at) + 1
        return tuple(EXCHANGE(v, step) for v in messages), self._linked(max(messages, key=lambda v: v.shape[2]), step)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        self.sent.append(Message("mean", (tensor,)))
        plain = among is None and self.topology.shares is None
        mean: Tensor = MEAN(tensor) if plain else OPAQUE([tensor], "a mean with weights")[0]
        return mean

    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        raise NotImplementedError("no step asks for a mean without faults")

    def edges(self, x: Tensor) -> Edges:
        if self.topology.period is None:
            return super().edges(x)
        return Edges(self.topology.n, self.links.degree, self.topology.period, self._linked(x, 0), self._linked(x, -1))

    def _linked(self, like: Tensor, t: int) -> Tensor:
        width = like.shape[-1]
        mask: Tensor = LINKED(like, self.links.degree, 1 if self.columns(width) == width else width, t)
        return mask


def traced_step(
    algorithm: Algorithm, engine: Host, weight_decay: float | Tensor, t: int, names: Sequence[str]
) -> Update:
    """A step of the kind of t as a function of tensors, with opaque operations (`step_of_tensors`)."""
    graph = engine.topology
    mixes = graph.is_drawn(t) or bool((graph.weights(t) != np.eye(graph.n)).any())
    return step_of_tensors(algorithm, TracedEngine(engine, mixes), weight_decay, t, names)


def step_of_tensors(
    algorithm: Algorithm, engine: Host, weight_decay: float | Tensor, t: int, names: Sequence[str]
) -> Update:
    """A step as a function of (x, g, time, lr, *state), which returns the new x and the new state.

    A further argument is the weight decay. Raises `Untraceable` if the algorithm needs further gradients.
    """
    def step(x: Tensor, g: Tensor, time: Tensor, lr: Tensor, *values: Tensor) -> list[Tensor]:
        state = dict(zip(names, values, strict=False))
        decay = values[len(names)] if len(values) > len(names) else weight_decay
        new, state = engine.step(
            algorithm, x, g, state, t=t, time=time, lr=lr, full_gradient=_no_further_gradients,
            gradient=_no_further_gradients, weight_decay=decay,
        )
        return [new, *(state[name] for name in names)]

    return step


def _no_further_gradients(x: Tensor) -> Tensor:
    raise Untraceable("the step needs further gradients")


def wiring_of(engine: Host, t: int, x: Tensor) -> Wiring | None:
    """Description of step t for a kernel; None if something changes the messages on their way.

    The senders are those of all steps: one source serves all positions of a topology.
    """
    if type(engine) is not Simulator or engine.faults or engine.rounded:
        return None
    graph, drawn = engine.topology, engine.topology.is_drawn(t)
    weights = engine.drawn(t, x) if drawn else torch.from_numpy(graph.weights(t)).to(x.device, x.dtype)
    senders = [np.flatnonzero(row).tolist() for row in graph.links()]
    return Wiring(graph.n, weights, senders, drawn, engine.shared, lambda: engine.links)
