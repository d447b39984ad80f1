"""Nodes spread over processes and machines: mixing by peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import itertools
import logging
import math
import threading
from collections.abc import Hashable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing.util import Finalize
from typing import Any

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.blocks import BlockSteps, Mixed
from quasiglobal.engines.distributed.edge import Edge, Moment
from quasiglobal.engines.distributed.gloo import Group, Meeting, Store, open_group
from quasiglobal.engines.distributed.membership import Membership
from quasiglobal.engines.distributed.routes import Routes, Slots
from quasiglobal.engines.host import Host
from quasiglobal.engines.links import check_push
from quasiglobal.engines.rows import Rows
from quasiglobal.engines.wire import Wire
from quasiglobal.errors import InputError
from quasiglobal.gradients.precision import full_precision
from quasiglobal.topology import Topology

log = logging.getLogger("quasiglobal")

MARGIN = 8
"""Message size limit, as a multiple of the first message's size."""


def spread(n: int, processes: int) -> list[tuple[int, ...]]:
    """Assign nodes to processes in contiguous blocks.

    >>> spread(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if not 1 <= processes <= n:
        raise InputError(f"{n} nodes need 1 to {n} processes, got {processes}")
    size, rest = divmod(n, processes)
    starts = [rank * size + min(rank, rest) for rank in range(processes + 1)]
    return [tuple(range(first, last)) for first, last in itertools.pairwise(starts)]


class Distributed(Host):
    """Engine with the nodes of process `rank`; it finds the other processes through `store`.

    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a lost message returns to the receiver. `exchange` sends each
    neighbouring process the messages to its nodes only. An exact mean is an
    all-reduce and needs all processes. No communication takes place before `connect`.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store,
        rank: int,
        hosted: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int] = (0,),
        shared: int | None = None,
        rounded: bool = False,
        wire: Wire | None = None,
        timeout: float = 60.0,
        host: str = "127.0.0.1",
        experiment: str = "",
    ) -> None:
        super().__init__(topology, nodes=hosted[rank], seeds=seeds, shared=shared, rounded=rounded, wire=wire)
        self.rank, self.hosted, self.timeout, self.host = rank, hosted, timeout, host
        self._store = Meeting(store)
        self.routes = Routes(topology, rank, hosted)
        self._moment: Moment = (0, 0)
        self._at_exit: Finalize | None = None
        self._latest: Rows | None = None
        self._ahead: tuple[Moment, dict[int, Edge], Tensor] | None = None
        """A message sent ahead: its moment, on which edges, and its memory."""
        self.writing = threading.Lock()
        self._in_blocks = BlockSteps(self, self._empty_message, self._exchange_blocks, self._sent_ahead)
        self._deltas: dict[Hashable, tuple[Tensor | None, tuple[Tensor, ...]]] = {}
        self.members = Membership(
            self._store, rank, self.routes.neighbours, timeout=timeout, host=host,
            agreement=f"{experiment} {topology.fingerprint}".encode(), model_here=self._mean_here,
        )

    def connect(self, step: int = 0, patience: float | None = None) -> Distributed:
        """Connect to all neighbours within `patience` seconds (default: the timeout of a step).

        `step` is the last step completed here.
        """
        self._at_exit = Finalize(None, self.close, exitpriority=0)      # `atexit` is skipped in forked processes
        self._moment, self.members.step = (step, 0), step
        self.members.find(patience or self.timeout)
        return self

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm, and keep its models for processes that join later."""
        x, state = super().advance(algorithm, x, g, state, node)
        self._latest = Rows([x])
        return x, state

    def step_in_place(
        self, algorithm: Algorithm, x: Rows, g: Rows, state: State, *, ahead: bool = False, **how: Any
    ) -> None:
        """Run a step in blocks of columns if possible (`engines/blocks.py`).

        With `ahead`, send the new x at once, for the next step, whose first mix must be that of x.
        """
        like = x.pieces[0]
        message = self._empty_message(1, self.columns(x.shape[1]), like.dtype) if ahead else None
        if not self._in_blocks.step(algorithm, x, g, state, copy=message, **how):
            super().step_in_place(algorithm, x, g, state, **how)
            if message is not None:
                message[0].copy_(self.by_run(x.whole()))
        self._latest = x
        if message is not None:
            self._send_ahead(how["t"] + 1, message)

    def _send_ahead(self, t: int, message: Tensor) -> None:
        """Send the message of the first mix of step t."""
        members, moment = self.members, (t, 0)
        to = {}
        with members.waiting():
            for there, rows in self.routes.to_others(t, message).items():
                if (edge := members.edges.get(there)) is not None:
                    with members.watched(there):
                        edge.send(moment, rows, self.timeout)
                        to[there] = edge
        self._ahead = moment, to, message

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and move towards the received rows, always in full precision."""
        own = [self.by_run(v) for v in tensors]
        received = self._rows_from_others(t, self._message(own), tensors[0])
        with full_precision(tensors[0].device.type):
            return self._mixed_with(received, t, tensors)

    def _mixed_with(
        self, received: dict[int, Tensor], t: int, tensors: tuple[Tensor, ...], columns: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Move these columns of the models towards the received rows."""
        own = [self.by_run(v) for v in tensors]
        told = [self.told(rows) for rows in own]
        return self._moved(t, tensors, own, told, {node: rows[..., columns] for node, rows in received.items()})

    def _exchange_blocks(self, t: int, message: Tensor, like: Tensor) -> Mixed:
        return partial(self._mixed_with, self._rows_from_others(t, message, like), t)

    def _sent_ahead(self, t: int) -> Tensor | None:
        """The message of the first mix of step t, if it was sent ahead."""
        return self._ahead[2] if self._ahead and self._ahead[0] == (t, 0) else None

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """Send the compressed rows as they are packed; neighbours restore them."""
        rows, nothing = self.by_run(v), torch.zeros_like(v)
        wire, c = self.wire, rows.shape[2]
        if wire is None:
            q = self.with_own(self.told(rows), nothing)
            return q, self.mix(t, (q,), time)[0]
        key = self.wire_key(self.nodes, time, draw, c)
        parts = wire.parts(rows, key)
        own = wire.restored(parts, c, key)
        packed = wire.packed(parts, c)
        came, received = self._rows_from_others(t, self._message([packed]), packed, raw=True), {}
        for node, words in came.items():
            key = self.wire_key([node], time, draw, c)
            restored = wire.restored(wire.unpacked(words[0][:, None], c, rows.dtype), c, key)
            received[node] = restored.transpose(0, 1)
        q = self.with_own(own, nothing)
        with full_precision(v.device.type):
            return q, self._moved(t, (q,), [own], [own], received)[0]

    def _moved(
        self, t: int, tensors: tuple[Tensor, ...], own: Sequence[Tensor], told: Sequence[Tensor],
        received: dict[int, Tensor],
    ) -> tuple[Tensor, ...]:
        """Move towards the received rows, [tensors, runs, columns] of each remote node; called in full precision."""
        here, remote = self._delta(t, tuple(received), own[0])
        if not received and here is None:
            return tensors
        mixed = []
        for k, (rows, v) in enumerate(zip(own, tensors, strict=True)):
            first = told[k][:, :1]
            if len(self.nodes) == len(received) == 1 and told[k] is rows:
                moved = torch.lerp(rows, next(iter(received.values()))[k][:, None], remote[0])  # in one pass
            else:
                moved = rows if here is None else rows + here @ (told[k] - first)
                for weights, row in zip(remote, received.values(), strict=True):
                    moved = torch.addcmul(moved, weights, row[k][:, None] - first)
            mixed.append(self.with_own(moved, v))
        return tuple(mixed)

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and add what came, weighted by P(t)."""
        check_push(self.topology)
        cut = [self.by_run(v) for v in tensors]
        own = torch.cat(cut, dim=2)
        told = self.told(own)
        received = self._rows_from_others(t, self._message([told]), own)
        kept, sent = self.push_weights(t, own)
        with full_precision(own.device.type):
            pushed = kept * own + sent[:, list(self.nodes)] @ told
            for node, row in received.items():
                pushed = torch.addcmul(pushed, sent[:, node, None], row[0][:, None])
        parts = torch.split(pushed, [part.shape[2] for part in cut], dim=2)
        return tuple(self.with_own(part, v) for part, v in zip(parts, tensors, strict=True))

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Send each neighbouring process the messages to its nodes, in one tensor [messages, runs, columns]."""
        runs, k, degree, like = len(self.seeds), len(self.nodes), self.links.degree, messages[0]
        widths = [self.columns(v.shape[2]) for v in messages]
        own = torch.cat([v[..., :width] for v, width in zip(messages, widths, strict=True)], dim=2)
        told = self.told(own).view(runs, k, degree, -1).permute(1, 2, 0, 3)
        came, arrived = torch.zeros_like(told), torch.zeros(k, degree, dtype=torch.bool)
        routes = dict(self._slots[self.topology.position(t if at is None else at)])
        out, into = routes.pop(self.rank)
        came[into], arrived[into] = told[out], True
        dtype = self._wire(told.dtype)
        sent = {there: told[out].to("cpu", dtype).contiguous() for there, (out, _) in routes.items() if len(out[0])}
        shapes = {there: (len(into[0]), runs, own.shape[2]) for there, (_, into) in routes.items() if len(into[0])}
        largest = own.nbytes // k * max(map(len, self.hosted))
        for there, rows in self._exchanged(t, sent, shapes, like, largest).items():
            into = routes[there][1]
            came[into], arrived[into] = rows, True
        parts = torch.split(came.permute(2, 0, 1, 3), widths, dim=3)
        return self.all_received(parts, arrived.to(like.device), [v.shape[2] for v in messages])

    def mix_sometimes(self, p: float, t: int, tensors: tuple[Tensor, ...], time: Tensor) -> tuple[Tensor, ...]:
        """Mix with probability p; send nothing at a step at which no run mixes."""
        return super().mix_sometimes(p, t, tensors, time) if bool(self.coin(p, time).any()) else tensors

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the exact mean, by an all-reduce over all processes."""
        rows = self.by_run(tensor)
        return self.with_own(self.averaged(rows, among), tensor)

    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean of [runs, nodes here, columns] over all processes, or over the nodes in the mask `among`."""
        weights = torch.ones_like(rows[..., :1]) if among is None else among.view(*rows.shape[:2], 1)
        total = torch.cat([(weights * rows).sum(dim=1), weights.sum(dim=1)], dim=-1).cpu().contiguous()
        try:
            self._world.allreduce([total]).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(
                "an exact mean over all nodes lost a process and cannot continue; run the same command again to resume"
            ) from None
        total = total.to(rows)
        return (total[:, :-1] / total[:, -1:])[:, None]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Broadcast the tensor of process `root` to all processes; return it."""
        value = tensor.cpu().contiguous().clone()
        try:
            self._world.broadcast(value, root).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(f"broadcast of process {root}'s model failed: not all processes are connected") from None
        return value.to(tensor)

    def mean_of_neighbours(self, like: Tensor) -> Tensor | None:
        """Average the models sent by neighbours that already train, for every row here; None if there are none."""
        fitting = [model for model in self.members.models if model.numel() * len(self.nodes) == like.numel()]
        if not fitting:
            return None
        mean = torch.stack(fitting).mean(dim=0).to(like)
        return mean.view(len(self.seeds), 1, -1).expand(-1, len(self.nodes), -1).reshape(like.shape).contiguous()

    @property
    def lost(self) -> dict[int, str]:
        """Neighbours that this process continues without, and the reasons."""
        return self.members.lost

    def accounts(self) -> dict[str, dict[str, float]]:
        """Return the traffic statistics of each edge, by the process at its other end."""
        return self.members.accounts()

    def close(self) -> None:
        """Close all edges and end all threads."""
        if self._at_exit is not None:
            self._at_exit.cancel()
        self.members.close()

    def _rows_from_others(self, t: int, message: Tensor, like: Tensor, raw: bool = False) -> dict[int, Tensor]:
        """Exchange rows with the neighbours; return [tensors, runs, columns] like `like` for each remote node received.

        `raw` rows may hold any bits.
        """
        messages, sent = self.routes.rows(t), self.routes.to_others(t, message)
        runs, columns = len(self.seeds), message.shape[-1]
        shapes = {there: (len(message), runs, len(of), columns) for there, (_, of) in messages.items() if of}
        largest = message.numel() * like.element_size() // len(self.nodes) * max(map(len, self.hosted))
        came = self._exchanged(t, sent, shapes, like, largest, raw)
        received = {j: rows[:, :, k] for there, rows in came.items() for k, j in enumerate(messages[there][1])}
        return {node: received[node] for node in sorted(received)}

    def _exchanged(
        self, t: int, sent: dict[int, Tensor], shapes: Mapping[int, Sequence[int]], like: Tensor, largest: int,
        raw: bool = False,
    ) -> dict[int, Tensor]:
        """Send a tensor to each process in `sent`; return the tensor of the given shape that each other process sent.

        Sent tensors must not change afterwards, since a send may outlast the exchange. `largest` is the size in bytes
        that a message is expected to have at most. Numbers that are not finite are ignored, unless they are `raw` bits.
        """
        last, exchange = self._moment
        self._moment = moment = (t, exchange + 1 if last == t else 0)
        members = self.members
        members.step = t
        if not members.begun:
            members.begin(largest=MARGIN * largest)
        members.take_back()
        early = self._ahead[1] if self._ahead and self._ahead[0] == moment else {}
        self._ahead = None
        with members.waiting():
            for there, edge in list(members.edges.items()):
                if there in sent and edge is not early.get(there):          # an edge may have been reopened since
                    with members.watched(there):
                        edge.send(moment, sent[there], self.timeout)
            received = self._receive(moment, shapes, like)
        wrong = [] if raw else [there for there, rows in received.items() if not _finite(rows)]
        for there in wrong:
            members.edges[there].account.missed += 1
            log.warning("process %d sent numbers that are not finite at step %d: ignored", there, t)
        return {there: rows for there, rows in received.items() if there not in wrong}

    def _receive(self, moment: Moment, shapes: Mapping[int, Sequence[int]], like: Tensor) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}
        for there, edge in list(self.members.edges.items()):
            if there not in shapes:
                continue
            shape = shapes[there]
            with self.members.watched(there):
                rows = edge.receive(moment, math.prod(shape), self._wire(like.dtype), self.timeout)
                if rows is None:
                    edge.account.missed += 1
                else:
                    received[there] = rows.view(*shape).to(like)
        return received

    def _message(self, parts: Sequence[Tensor]) -> Tensor:
        """Copy [runs, nodes, columns] of each part to memory that can be sent."""
        message = self._empty_message(len(parts), parts[0].shape[2], parts[0].dtype)
        for out, rows in zip(message, parts, strict=True):
            out.copy_(rows)
        return message

    def _empty_message(self, parts: int, columns: int, dtype: torch.dtype) -> Tensor:
        shape = parts, len(self.seeds), len(self.nodes), columns
        return self.members.buffers.empty(math.prod(shape), self._wire(dtype)).view(shape)

    def _wire(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of payloads."""
        return torch.bfloat16 if self.rounded else dtype

    def _mean_here(self) -> Tensor | None:
        """The mean of the models here, all runs in one row; None before the first step."""
        if self._latest is None:
            return None
        with self.writing:
            latest = self._latest.whole()
            return latest.view(len(self.seeds), len(self.nodes), -1).mean(dim=1).flatten().cpu()

    def _delta(self, t: int, came: tuple[int, ...], like: Tensor) -> tuple[Tensor | None, tuple[Tensor, ...]]:
        """W(t) − I: [nodes here, nodes here], and a column for each received remote node; rows sum to 0.

        The first is None if it changes nothing: it is 0, or there is one node, whose difference to itself is 0.
        """
        key = (self.routes.key(t), came, like.dtype, like.device)
        if key not in self._deltas:
            if self.topology.is_drawn(t):
                self._deltas.clear()                        # never needed again
            k = len(self.nodes)
            W = torch.from_numpy(self.topology.weights(t))[list(self.nodes)][:, [*self.nodes, *came]]
            W[:, :k].fill_diagonal_(0)
            W[:, :k] -= torch.diag(W.sum(dim=1))
            W = W.to(like)
            self._deltas[key] = W[:, :k] if k > 1 and W[:, :k].any() else None, W[:, k:, None].unbind(dim=1)
        return self._deltas[key]

    @cached_property
    def _slots(self) -> list[dict[int, tuple[Slots, Slots]]]:
        return self.routes.slots(self.links)

    @cached_property
    def _world(self) -> Group:
        """Group of all processes, for exact means and broadcasts; opened on first use."""
        return open_group(Meeting(self._store, "world/0"), self.rank, len(self.hosted), self.host, self.timeout)


def _finite(rows: Tensor) -> bool:
    """Whether all numbers are finite; testing their sum is much faster, unless the sum overflows."""
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())
