"""Base class of engines, which host nodes of one or several runs as rows of every tensor, and their `Node`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Edges, Node, State
from quasiglobal.algorithms.base import Messages, OneOrMore
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.engines.draws import choose, happens, hashed
from quasiglobal.engines.links import Links
from quasiglobal.engines.wire import Wire
from quasiglobal.errors import InputError, whole
from quasiglobal.stacked.capture import overwrite
from quasiglobal.stacked.step_blocks import ModelRows, write
from quasiglobal.topology import Topology
from quasiglobal.topology.mixing import column_stochastic


class Host(ABC):
    """Base class of engines. Row r·k + i of every tensor is the i-th of the k nodes hosted here, of run r.

    `mix` and `mean` act within a run; a mean weighs the nodes by the topology's shares. Only the first `shared` columns
    are communicated (default: all). With `rounded`, they are rounded to bfloat16, r(v): mixing is then
    v + (W − I) r(v), which preserves the mean and leaves nodes that agree unchanged. `wire` compresses what `tell`
    sends, and nothing else.
    """

    waits_for_nobody = False
    """Whether a step needs no message from other processes, so that it can be captured as a CUDA graph."""

    skipped = 0
    """Steps skipped to catch up with other processes."""

    def __init__(
        self,
        topology: Topology,
        *,
        nodes: Sequence[int] | None = None,
        seeds: Sequence[int] = (0,),
        shared: int | None = None,
        rounded: bool = False,
        wire: Wire | None = None,
    ) -> None:
        if not seeds or not all(whole(seed) is not None and 0 <= seed < 2**63 for seed in seeds):
            raise InputError(f"an engine needs a seed for each run, whole numbers >= 0, got {list(seeds)}")
        self.topology = topology
        self.nodes = tuple(range(topology.n) if nodes is None else nodes)
        self.seeds = tuple(seeds)
        self.shared, self.rounded, self.wire = shared, rounded, wire
        self.writing: AbstractContextManager[object] = nullcontext()
        """Held while `step_in_place` writes."""
        self._seeds: dict[torch.device, Tensor] = {}
        self._shares: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._pushes: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor]] = {}
        self._places: dict[tuple[tuple[int, ...], torch.device], Tensor] = {}
        self._edges: dict[tuple[int, torch.device], Edges] = {}

    @property
    def rows(self) -> int:
        """Number of rows of x here: hosted nodes × runs."""
        return len(self.nodes) * len(self.seeds)

    def begin(self, algorithm: Algorithm, x: Tensor) -> State:
        """Return the algorithm's state before the first step, per node and per edge."""
        if self.shared is not None and self.shared > x.shape[1]:
            raise InputError(f"{self.shared} columns are shared, but x has {x.shape[1]}; share fewer")
        narrow = x[:, :1]
        if not algorithm.init_edges(narrow, self.edges(narrow)):
            return algorithm.init(x)                        # the masks of all columns may be larger than the models
        return algorithm.init(x) | algorithm.init_edges(x, self.edges(x))

    def step(
        self,
        algorithm: Algorithm,
        x: Tensor,
        g: Tensor,
        state: State,
        *,
        t: int,
        lr: Tensor,
        full_gradient: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor], Tensor] | None = None,
        weight_decay: float | Tensor = 0.0,
        time: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Run one step of all hosted nodes; return the new x and the new state.

        Weight decay, a number or a tensor that broadcasts to x, is added to every gradient here and nowhere else, or
        passed on to an algorithm that decouples it.
        `gradient` computes the gradient of the step's batch at another point.
        `time` is t as a tensor that persists between steps, for a captured step.
        """
        if time is None:
            time = torch.tensor(t, dtype=x.dtype, device=x.device)

        needs = needs_of(algorithm)
        decoupled: float | Tensor = 0.0
        if needs.decouples_decay:
            decoupled, weight_decay = weight_decay, 0.0

        def further(at: Tensor) -> Tensor:
            return (gradient or no_further_gradient)(at) + weight_decay * at

        def full(at: Tensor) -> Tensor:
            return full_gradient(at) + weight_decay * at

        if isinstance(weight_decay, Tensor):
            g = g + weight_decay * x
        elif weight_decay:
            g = torch.add(g, x, alpha=weight_decay)         # one pass; golden results depend on its rounding
        lazy = needs.lazy and not needs.allow(self.topology.lambda_min)
        node = StepNode(t, time, lr, self, x, further, full, decoupled, lazy)
        return self.advance(algorithm, x, g, dict(state), node)

    def step_in_place(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, keeps_state: bool = False, **how: Any
    ) -> None:
        """Run `step` with the options `how`; overwrite x and, unless `keeps_state`, the state."""
        whole = x.whole()
        new, after = self.step(algorithm, whole, g.whole().contiguous(), state, **how)
        names = [] if keeps_state else [*state]
        with self.writing:
            overwrite([whole, *(state[name] for name in names)], [new, *(after[name] for name in names)])
            write(x.all, whole)

    def catch_up(self, t: int, x: Tensor) -> tuple[int, Tensor | None] | None:
        """The step to make in place of step t if other processes are far ahead, and their model; else None."""
        return None

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm; subclasses may wrap the call."""
        stepped = algorithm.step(x, g, state, node)
        if not isinstance(stepped, tuple) or len(stepped) != 2:
            raise InputError(
                f"step of {type(algorithm).__name__} returns a {type(stepped).__name__}; it has to return (x, state)"
            )
        if not isinstance(stepped[0], Tensor) or stepped[0].shape != x.shape or not isinstance(stepped[1], Mapping):
            raise InputError(
                f"step of {type(algorithm).__name__} has to return x, a tensor of shape {list(x.shape)} as before, and "
                "the state, a dict"
            )
        return stepped

    def prepare(self, t: int, like: Tensor) -> None:
        """Move the data of step t to the device of x, so that the step can be traced without computing it."""
        self.seeds_on(like.device)
        self.edges(like)
        self.shares(like)
        self.push_weights(t, like)
        self.wire_key(self.nodes, like.new_zeros(()), 0, 1)

    def refresh(self, t: int) -> None:  # noqa: B027
        """Update the tensors that a captured step reads to step t; called before the step."""

    @abstractmethod
    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Average each tensor with the neighbours' by W(t); `time` is t as a tensor, for a captured step."""

    @abstractmethod
    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return p_ii v_i + Σ_j p_ij v_j over the messages that arrive; the columns of P(t) sum to 1."""

    @abstractmethod
    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """Compress v to q by the wire; return q and Σ_j w_ij q_j. Columns that are not shared are 0."""

    @abstractmethod
    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Exchange [rows, degree, c] along the links of step t, or of step `at`; return received messages and mask."""

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return, at each row here, the exact mean over the run's nodes, or over the nodes in the mask `among`."""
        return self.with_own(self.averaged(self.by_run(tensor), among), tensor)

    @abstractmethod
    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean of [runs, nodes here, columns] over a run's nodes, or those in `among`; no faults."""

    def shares(self, like: Tensor) -> Tensor | None:
        """Return the weight of each node here in a mean, [nodes, 1]; None if all nodes count alike."""
        if self.topology.shares is None:
            return None
        key = like.dtype, like.device
        if key not in self._shares:
            own = torch.from_numpy(self.topology.shares)[list(self.nodes), None]
            self._shares[key] = own.to(like.device, like.dtype)
        return self._shares[key]

    def sample(self, fraction: float, draw: Tensor) -> Tensor:
        """Return a mask of the rows here: a fraction of each run's nodes, at least one, drawn from (run seed, draw)."""
        n = self.topology.n
        chosen = choose(self.seeds_on(draw.device), draw, n, max(1, round(fraction * n)))
        return chosen[:, list(self.nodes)].to(draw.dtype).view(self.rows, 1)

    @cached_property
    def links(self) -> Links:
        """The topology's edges in numbered slots."""
        return Links(self.topology)

    def edges(self, x: Tensor) -> Edges:
        """Return the neighbours of the nodes here, for models like x.

        If the graph is drawn anew at each step, one slot stands for all neighbours, and `exchange` is refused.
        """
        key = x.shape[1], x.device
        if key not in self._edges:
            n, period = self.topology.n, self.topology.period
            drawn = np.ones((n, 1), dtype=bool)
            slots = (drawn, drawn) if period is None else (self.links.has_sender, self.links.has_receiver)
            masks = (self._mask(torch.from_numpy(of[list(self.nodes)]).to(x.device), x.shape[1]) for of in slots)
            self._edges[key] = Edges(n, slots[0].shape[1], period or 1, *masks)
        return self._edges[key]

    def columns(self, width: int) -> int:
        """Return how many columns of a tensor of this width are communicated."""
        return width if self.shared is None else min(self.shared, width)

    def push_weights(self, t: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows of P(t) of the nodes here: their own weights, [nodes, 1], and the others', [nodes, n]."""
        key = (self.topology.position(t), like.dtype, like.device)
        if key not in self._pushes or self.topology.is_drawn(t):
            P, own = torch.from_numpy(column_stochastic(self.topology.weights(t))), list(self.nodes)
            kept = P[own, own][:, None]
            P[own, own] = 0.0
            self._pushes[key] = kept.to(like), P[own].to(like)
        return self._pushes[key]

    def all_received(
        self, parts: Sequence[Tensor], arrived: Tensor, widths: Sequence[int]
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Return received messages [rows, degree, width], 0 where none arrived, and the mask of the widest.

        `parts` are [runs, nodes, degree, columns] for each message of the given widths; `arrived` is a mask
        [nodes, degree] or [runs, nodes, degree]. Columns that are not shared never arrive.
        """
        values, masks = [], {}
        for part, width in zip(parts, widths, strict=True):
            masks[width] = mask = self._mask(arrived, width)
            rows = part.reshape(self.rows, *part.shape[2:])
            rows = torch.nn.functional.pad(rows, (0, width - rows.shape[-1])) if rows.shape[-1] < width else rows
            values.append(torch.where(mask, rows, 0.0))
        return tuple(values), masks[max(widths)]

    def _mask(self, of: Tensor, width: int) -> Tensor:
        """Expand a mask ([runs,] nodes, degree) to [rows, degree, 1], or to the width if some columns stay here."""
        mask = of.expand(len(self.seeds), *of.shape[-2:]).reshape(self.rows, of.shape[-1], 1)
        columns = self.columns(width)
        return mask if columns == width else mask & (torch.arange(width, device=of.device) < columns)

    def mix_sometimes(self, p: float, t: int, tensors: tuple[Tensor, ...], time: Tensor) -> tuple[Tensor, ...]:
        """Mix with probability p, all nodes of a run together, drawn from (run seed, step); else change nothing."""
        rows = self.coin(p, time).repeat_interleave(len(self.nodes))[:, None]
        return tuple(torch.where(rows, Wv, v) for v, Wv in zip(tensors, self.mix(t, tensors, time), strict=True))

    def coin(self, p: float, time: Tensor) -> Tensor:
        """Draw for each run at this step; True with probability p, the same in every process.

        Integer arithmetic on the device: CPU and GPU agree, and a captured graph draws anew at each replay.
        """
        return happens(p, hashed(self.seeds_on(time.device), COIN, time.to(torch.int64)))

    def seeds_on(self, device: torch.device) -> Tensor:
        """Return the seeds of the runs as a tensor on the device, which stays there: captured steps read it."""
        if device not in self._seeds:
            self._seeds[device] = torch.tensor(self.seeds, device=device)
        return self._seeds[device]

    def by_run(self, v: Tensor) -> Tensor:
        """Return v's shared columns as [runs, nodes here, columns]; v may be narrower than a model."""
        columns = self.columns(v.shape[1])
        return v[:, :columns].reshape(len(self.seeds), len(self.nodes), columns)

    def wire_key(self, nodes: Sequence[int], time: Tensor, draw: int, c: int) -> Tensor | None:
        """Return a hash for each of c numbers of each node, [runs, nodes, c], if the wire draws random numbers."""
        if self.wire is None or not self.wire.random:
            return None
        known = tuple(nodes), time.device
        if known not in self._places:                       # a captured step copies nothing to the device
            self._places[known] = torch.tensor(nodes, device=time.device)[:, None]
        seeds, column = self.seeds_on(time.device)[:, None, None], torch.arange(c, device=time.device)
        return hashed(seeds, WIRE, draw, time.to(torch.int64), self._places[known], column)

    def told(self, rows: Tensor) -> Tensor:
        """Return the rows as neighbours receive them."""
        return rows.bfloat16().to(rows.dtype) if self.rounded else rows

    def with_own(self, shared: Tensor, v: Tensor) -> Tensor:
        """Return v with its shared columns replaced; the other columns stay."""
        result = shared.expand(len(self.seeds), len(self.nodes), -1).reshape(self.rows, -1)
        return result if result.shape[1] == v.shape[1] else torch.cat([result, v[:, result.shape[1] :]], dim=1)


@dataclass(frozen=True)
class StepNode:
    """Implementation of `quasiglobal.algorithms.Node` for step t of an engine; `lazy` mixes with (I + W)/2."""

    t: int
    time: Tensor
    lr: Tensor
    engine: Host
    x: Tensor
    further: Callable[[Tensor], Tensor]
    """The gradient of the step's batch at another point."""
    full: Callable[[Tensor], Tensor]
    weight_decay: float | Tensor = 0.0
    lazy: bool = False

    def mix(self, *tensors: Tensor) -> OneOrMore:
        self._check("mix", tensors)
        return self._mixed(tensors, self.engine.mix(self.t, tensors, self.time))

    def mix_sometimes(self, p: float, *tensors: Tensor) -> OneOrMore:
        self._check("mix_sometimes", tensors)
        if not 0 <= p <= 1:
            raise InputError(f"node.mix_sometimes needs a probability in [0, 1], got {p}")
        return self._mixed(tensors, self.engine.mix_sometimes(p, self.t, tensors, self.time))

    def mean(self, tensor: Tensor, among: Tensor | None = None) -> Tensor:
        self._check("mean", (tensor,))
        return self.engine.mean(tensor, among)

    def push(self, *tensors: Tensor) -> OneOrMore:
        self._check("push", tensors)
        pushed = self.engine.push(self.t, tensors, self.time)
        return pushed[0] if len(tensors) == 1 else pushed

    @property
    def edges(self) -> Edges:
        return self.engine.edges(self.x)

    def exchange(self, *messages: Messages, at: int | None = None) -> tuple[OneOrMore, Tensor]:
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

    def _mixed(self, tensors: tuple[Tensor, ...], mixed: tuple[Tensor, ...]) -> OneOrMore:
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


COIN, WIRE = 3, 4
"""Hash keys that separate the draws of `coin` and of compressed messages from those of `Faults`."""


def no_further_gradient(y: Tensor) -> Tensor:
    """Refuse `node.gradient` if the engine cannot compute the gradient of a batch again."""
    raise InputError("this algorithm needs the gradient of its batch at another point, which is not available here")
