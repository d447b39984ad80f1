"""Base class of algorithms, and the `Node` interface that they communicate through."""

from __future__ import annotations

import math
import typing
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from numbers import Real
from types import NoneType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from quasiglobal.algorithms.needs import UNKNOWN, Needs, needs_of
from quasiglobal.errors import InputError, unknown, whole

State = dict[str, Tensor]
"""An algorithm's memory between steps: named tensors, each with one row per hosted node."""

Messages = Tensor | Mapping[int, Tensor]
"""Messages of each node along its edges: [k, degree, c], or {j: v} with a tensor [k, c] for each slot j."""

Option = TypeVar("Option")

OneOrMore = Any
"""A tensor, or a tuple of tensors where several were given."""


@dataclass(frozen=True)
class Edges:
    """The neighbours of each hosted node in numbered slots 0, 1, …, degree − 1.

    On an undirected graph, slot j of a node is its j-th neighbour, to send to and to receive from. On a directed graph
    the slots of senders and of receivers are numbered separately. All nodes have `degree` slots, so that per-edge
    tensors have one shape, [k, degree, …]; the masks are False at slots without a neighbour. If only some columns are
    communicated, the masks are [k, degree, d] and False at the other columns: these have no neighbours.
    """

    n: int
    """Number of nodes of a run."""
    degree: int
    """Number of slots: the most neighbours that a node sends to or receives from over the topology's period."""
    period: int
    """Number of steps after which the topology repeats."""
    senders: Tensor
    """[k, degree, 1] mask of the slots that have a neighbour to receive from."""
    receivers: Tensor
    """[k, degree, 1] mask of the slots that have a neighbour to send to."""


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

    def mix(self, *tensors: Tensor) -> OneOrMore:
        """Σ_j w_ij v_j for each node i, in one message to each neighbour; a tensor, or a tuple for several tensors."""

    def push(self, *tensors: Tensor) -> OneOrMore:
        """Σ_j p_ij v_j for each node i, where P's columns sum to 1: each node j divides v_j among its receivers.

        P is W if its columns sum to 1; otherwise p_ij = 1/(1 + the number of j's receivers). The tensors are [k, c] of
        any widths c. A lost message is lost for its sender too.
        """

    @property
    def edges(self) -> Edges:
        """The neighbours of each node, in numbered slots."""

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[OneOrMore, Tensor]:
        """Send a separate message along each edge; return the received messages and a mask of those that arrived.

        `messages` is [k, degree, c], or {j: v} with a tensor [k, c] for each slot j of `edges`; [k, 1, c] sends the
        same to all. The result is [k, degree, c] (a tuple for several messages), 0 where none arrived; the mask is
        [k, degree, 1] (or [k, degree, c], see `Edges`). The links are those of step t, or of step `at`.
        """

    def tell(self, v: Tensor, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Send v compressed to q by the run's wire; return q, which the neighbours know too, and Σ_j w_ij q_j.

        Without compression q = v. Several calls in one step need different numbers `draw`.
        """

    def mix_sometimes(self, p: float, *tensors: Tensor) -> OneOrMore:
        """`mix` with probability p, all nodes together, drawn from (the run's seed, t); else the tensors unchanged."""

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        """The exact mean over all nodes of a run, or over the nodes where the [k, 1] mask `among` is 1."""

    def gradient(self, y: Tensor) -> Tensor:
        """The gradient of the step's own batch at another point y, weight decay included."""

    def full_gradient(self, x: Tensor) -> Tensor:
        """Each node's gradient over all of its own data at x, weight decay included."""

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """A [k, 1] mask of a random `fraction` of the nodes, a function of (the run's seed, draw)."""


if TYPE_CHECKING:
    _Forwarding = Any                       # has all attributes of a node
else:
    _Forwarding = object


class NodeView(_Forwarding):  # type: ignore[misc]
    """Node that passes everything on to `node`; subclasses change what the algorithm sees."""

    def __init__(self, node: Node) -> None:
        self.node = node

    def __getattr__(self, name: str) -> Any:
        return getattr(self.node, name)


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
    def needs(self) -> Needs:
        """Requirements on W, the links and the data, and properties of the step that engines have to know."""
        return Needs()


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
    def needs(self) -> Needs:
        """The base's needs, except `refuses_base`, which each wrapper decides."""
        return needs_of(self.base)._replace(refuses_base=UNKNOWN)


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


def checked(hint: object, value: Option, what: str) -> Option:
    """Return `value` if it has the option's type, else raise InputError."""
    choices = typing.get_args(hint)
    if typing.get_origin(hint) is Literal and value not in choices:
        raise unknown(what, str(value), map(str, choices))
    if NoneType in choices:
        return value if value is None else checked(choices[0], value, what)
    if hint is bool and not isinstance(value, bool):
        raise InputError(f"{what} must be true or false, got {value!r}")
    if hint is int and whole(value) is None:
        raise InputError(f"{what} must be a whole number, got {value!r}")
    if hint is float:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(f"{what} must be a number, got {value!r}")
        if not math.isfinite(value):
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
    """A base's state with prefixed names, for the state of its wrapper."""
    return {f"base.{name}": value for name, value in inner.items()}


def unnamed(state: State) -> State:
    """The base's state in the state of its wrapper."""
    return {name.removeprefix("base."): value for name, value in state.items() if name.startswith("base.")}
