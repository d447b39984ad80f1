"""Base class of algorithms, and the `Node` interface that they communicate through."""

from __future__ import annotations

import math
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from types import NoneType
from typing import Any, ClassVar, Literal, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quasiglobal.algorithms.edges import Edges
from quasiglobal.algorithms.needs import Needs
from quasiglobal.errors import InputError, unknown, whole

State = dict[str, Tensor]
"""An algorithm's memory between steps: named tensors, each with one row per hosted node."""

Messages = Tensor | Mapping[int, Tensor]
"""What each node sends along its edges: [k, degree, c], or {j: v} with a tensor [k, c] for each slot j."""


class Node(Protocol):
    """Interface of the hosted nodes during one step. An engine passes it to `Algorithm.step`."""

    @property
    def t(self) -> int:
        """The step, 1, 2, …, for control flow only: steps with equal `Algorithm.phase(t)` take the same branches."""

    @property
    def time(self) -> Tensor:
        """The step as a tensor, for arithmetic such as Adam's bias correction."""

    @property
    def lr(self) -> Tensor:
        """The learning rate; broadcasts to [k, d]: a scalar, [k, 1] or [1, d]."""

    @property
    def weight_decay(self) -> float | Tensor:
        """The weight decay, for an algorithm that decouples it (`decouples_decay`); else 0, since g includes it."""

    def mix(self, *tensors: Tensor) -> Any:
        """Σ_j w_ij v_j for each node i, in one message to each neighbour; a tensor, or a tuple for several tensors."""

    def push(self, *tensors: Tensor) -> Any:
        """Σ_j p_ij v_j for each node i, where P's columns sum to 1: each node j divides v_j among its receivers.

        P is W if its columns sum to 1; otherwise p_ij = 1/(1 + the number of j's receivers). The tensors are [k, c] of
        any widths c. A lost message is lost, also to its sender.
        """

    @property
    def edges(self) -> Edges:
        """The neighbours of each node, in numbered slots."""

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[Any, Tensor]:
        """Send a message of its own along each edge; return those received, and who was not missing.

        `messages` is [k, degree, c], or {j: v} with a tensor [k, c] for each slot j of `edges`; [k, 1, c] sends the
        same to all. What is received is [k, degree, c] (a tuple for several messages), 0 where nothing came; the mask
        of what came is [k, degree, 1] (or [k, degree, c], see `Edges`). Links are those of step t, or of step `at`.
        """

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Send v compressed to q by the run's wire; return q, which the neighbours know too, and Σ_j w_ij q_j.

        Without compression q = v. Several calls in one step need different numbers `draw`.
        """

    def mix_sometimes(self, p: float, *tensors: Tensor) -> Any:
        """`mix` with probability p, all nodes together, drawn from (the run's seed, t); else the tensors unchanged."""

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        """The exact mean over all nodes of a run, or over the nodes where the [k, 1] mask `among` is 1."""

    def gradient(self, y: Tensor) -> Tensor:
        """The gradient of the step's own batch at another point y, weight decay included."""

    def full_gradient(self, x: Tensor) -> Tensor:
        """Each node's gradient over all of its own data at x, weight decay included."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """A [k, 1] mask of a random `fraction` of the nodes, a function of (the run's seed, draw)."""


class NodeView:
    """Node that a wrapper passes to its base: forwards everything that a subclass does not override."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def t(self) -> int:
        return self.node.t

    @property
    def time(self) -> Tensor:
        return self.node.time

    @property
    def lr(self) -> Tensor:
        return self.node.lr

    @property
    def weight_decay(self) -> float | Tensor:
        return self.node.weight_decay

    def mix(self, *tensors: Tensor) -> Any:
        return self.node.mix(*tensors)

    def push(self, *tensors: Tensor) -> Any:
        return self.node.push(*tensors)

    @property
    def edges(self) -> Edges:
        return self.node.edges

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[Any, Tensor]:
        return self.node.exchange(*messages, at=at)

    def mix_sometimes(self, p: float, *tensors: Tensor) -> Any:
        return self.node.mix_sometimes(p, *tensors)

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        return self.node.mean(tensor, among)

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        return self.node.tell(v, draw)

    def gradient(self, y: Tensor) -> Tensor:
        return self.node.gradient(y)

    def full_gradient(self, x: Tensor) -> Tensor:
        return self.node.full_gradient(x)

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        return self.node.sample(fraction, draw)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """A decentralized optimization method: the options are its fields, the update is `step`.

    >>> class SignSGD(Algorithm):
    ...     '''Each node moves by the signs of its gradient, then averages with its neighbours.'''
    ...     def step(self, x, g, state, node):
    ...         return node.mix(x - node.lr * g.sign()), state
    >>> import quasiglobal as qg
    >>> result = qg.minimize(lambda x, t: x, [[4.0], [8.0], [6.0]], SignSGD(), "ring:3", lr=1.0, steps=5)
    >>> result.x.flatten().tolist()
    [1.0, 1.0, 1.0]
    """

    citation: ClassVar[str] = ""
    limits: ClassVar[dict[str, str]] = {"beta": "[0, 1]", "mu": "[0, 1]", "tau": "[1, inf)"}
    """Valid interval of each bounded numeric option."""

    def __post_init__(self) -> None:
        hints = option_types(type(self))
        for field in fields(self):
            value = checked(hints[field.name], getattr(self, field.name), field.name.removesuffix("_"))
            if value is not None and field.name in self.limits and not _within(self.limits[field.name], value):
                raise InputError(f"{field.name} must be in {self.limits[field.name]}, got {value}")

    def init(self, x: Tensor) -> State:
        """The state before the first step; x is [k, d], one row per hosted node."""
        return {}

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        """The state per edge before the first step: further tensors [k, edges.degree, …]."""
        return {}

    def step(self, x: Tensor, g: Tensor, state: State, node: Node) -> tuple[Tensor, State]:
        """Compute the new x and the new state from x, the gradients g at x, the state and `node`.

        Pure: it mutates nothing. It may return its inputs: the engine owns storage and copies.
        """
        raise InputError(f"{type(self).__name__} has no step; define step(self, x, g, state, node)")

    def phase(self, t: int) -> Hashable:
        """A key of step t: steps with equal keys take the same branches, so an engine can capture one graph per key."""
        return t == 1

    @property
    def divides_by_lr(self) -> bool:
        """Whether `step` divides by the learning rate, so that a schedule may not reach 0."""
        return False

    @property
    def decouples_decay(self) -> bool:
        """Whether `step` applies `node.weight_decay` to the model; else the engine adds weight_decay · x to g."""
        return False

    @property
    def needs_full_precision(self) -> bool:
        """Whether `step` uses small differences of mixed models, which the rounding of bf16 messages would hide."""
        return self.divides_by_lr

    @property
    def compresses(self) -> bool:
        """Whether all messages are sent by `node.tell`, and the state holds the error of their compression."""
        return False

    @property
    def follows_messages(self) -> bool:
        """Whether the state has to agree with what was sent and received, so that no step's state may be discarded."""
        return False

    @property
    def bears_clipping(self) -> bool:
        """Whether a neighbour's message may be clipped: it is a model, and losing a part of it is tolerated."""
        return self.needs.loss == "tolerated" and not self.follows_messages

    @property
    def keeps_mean(self) -> bool:
        """Whether the nodes' mean does not change while g = 0 and W is doubly stochastic."""
        return True

    @property
    def rests(self) -> bool:
        """Whether nodes that agree stay where they are while g = 0."""
        return True

    @property
    def needs(self) -> Needs:
        """Requirements on W, the links and the data."""
        return Needs()

    @property
    def refuses_base(self) -> str | None:
        """Why no torch optimizer can make the local step, to continue a sentence about the algorithm; None if one can.

        The optimizer replaces x − ηg by its own result x½, and the algorithm continues with x½ and gradient 0. This is
        the same algorithm only if steps from (x, g) and (x − ηg, 0) agree, also while η changes.
        """
        return "is not known to be a local step followed by an average of the models"


@dataclass(frozen=True, kw_only=True)
class Wrapper(Algorithm):
    """Algorithm around a base algorithm; options that it lacks are set on the base."""

    base: Algorithm

    def init(self, x: Tensor) -> State:
        return self.base.init(x)

    def init_edges(self, x: Tensor, edges: Edges) -> State:
        return self.base.init_edges(x, edges)

    def phase(self, t: int) -> Hashable:
        return self.base.phase(t)

    @property
    def divides_by_lr(self) -> bool:
        return self.base.divides_by_lr

    @property
    def decouples_decay(self) -> bool:
        return self.base.decouples_decay

    @property
    def needs_full_precision(self) -> bool:
        return self.base.needs_full_precision

    @property
    def compresses(self) -> bool:
        return self.base.compresses

    @property
    def follows_messages(self) -> bool:
        return self.base.follows_messages

    @property
    def keeps_mean(self) -> bool:
        return self.base.keeps_mean

    @property
    def rests(self) -> bool:
        return self.base.rests

    @property
    def needs(self) -> Needs:
        return self.base.needs


def option_types(kind: type[Algorithm]) -> dict[str, Any]:
    """The type of each option of an algorithm class; Any if it cannot be resolved."""
    if kind not in _OPTION_TYPES:
        try:
            hints = typing.get_type_hints(kind)
        except (NameError, TypeError):
            hints = {}
        _OPTION_TYPES[kind] = {field.name: hints.get(field.name, Any) for field in fields(kind)}
    return _OPTION_TYPES[kind]


_OPTION_TYPES: WeakKeyDictionary[type[Algorithm], dict[str, Any]] = WeakKeyDictionary()     # experiments look them up


def checked(hint: Any, value: Any, what: str) -> Any:
    """Return `value` if it has the option's type, else raise InputError."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal and value not in choices:
        raise unknown(what, str(value), map(str, choices))
    if NoneType in choices:
        return None if value is None else checked(choices[0], value, what)
    if hint is bool and not isinstance(value, bool):
        raise InputError(f"{what} must be true or false, got {value!r}")
    if hint is int and whole(value) is None:
        raise InputError(f"{what} must be a whole number, got {value!r}")
    if hint is float and (isinstance(value, bool) or not isinstance(value, Real)):
        raise InputError(f"{what} must be a number, got {value!r}")
    if hint is float and not math.isfinite(value):
        raise InputError(f"{what} must be finite, got {value}")
    if hint is Algorithm and not isinstance(value, Algorithm):
        raise InputError(f"{what} must be an algorithm, got {value!r}")
    return value


def _within(interval: str, value: float) -> bool:
    """Whether a value lies in an interval written as in mathematics, such as [0, 1)."""
    low, high = (float(end) for end in interval[1:-1].split(","))
    above = value >= low if interval[0] == "[" else value > low
    return above and (value <= high if interval[-1] == "]" else value < high)


def momentum(m: Tensor, g: Tensor, beta: float, nesterov: bool) -> tuple[Tensor, Tensor]:
    """The momentum m⁺ = βm + g and the update direction: m⁺, or g + βm⁺ in Nesterov's form.

    Nesterov's form is PyTorch's, with the gradient at x. The paper prints x + βm, which diverges; its tables used this.
    """
    m = torch.add(g, m, alpha=beta)
    return m, torch.add(g, m, alpha=beta) if nesterov else m


def descend(x: Tensor, lr: Tensor, direction: Tensor) -> Tensor:
    """x − lr · direction, in one pass over the memory."""
    return torch.addcmul(x, direction, lr, value=-1)


def zeros(x: Tensor, *names: str) -> State:
    """State with a tensor of zeros like x for each name."""
    return {name: torch.zeros_like(x) for name in names}


def named(inner: State) -> State:
    """A base's state, under names of its own in the state of its wrapper."""
    return {f"base.{name}": value for name, value in inner.items()}


def unnamed(state: State) -> State:
    """The base's state in the state of its wrapper."""
    return {name.removeprefix("base."): value for name, value in state.items() if name.startswith("base.")}
