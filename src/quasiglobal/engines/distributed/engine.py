"""Nodes spread over processes and machines: mixing by peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from multiprocessing.util import Finalize

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.distributed.checks import Expected, Rejected, check_numbers
from quasiglobal.engines.distributed.edge import Moment
from quasiglobal.engines.distributed.gloo import Group, Meeting, Store
from quasiglobal.engines.distributed.membership import Membership
from quasiglobal.engines.distributed.opening import GlooOpener, Opener
from quasiglobal.engines.host import Host
from quasiglobal.engines.links import check_push
from quasiglobal.engines.wire import Wire
from quasiglobal.errors import InputError
from quasiglobal.gradients.precision import full_precision
from quasiglobal.topology import Topology

Sent = dict[int, tuple[list[int], list[int]]]
"""For each neighbouring process: local indices of nodes to send, and nodes to receive."""

Slots = tuple[Tensor, Tensor]
"""Index of messages per edge: places of nodes, and slots."""

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
    """Engine with the nodes of process `rank`; it finds the other processes through `store`, a store or an opener.

    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a lost message returns to the receiver. `exchange` sends each
    neighbouring process the messages to its nodes only. An exact mean is an all-reduce and needs all processes.
    `trust` bounds what a neighbour's message to `mix` counts (`trust.py`). `connect` comes before all communication.
    """

    def __init__(
        self,
        topology: Topology,
        store: Store | Opener,
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
        trust: float = math.inf,
    ) -> None:
        super().__init__(topology, nodes=hosted[rank], seeds=seeds, shared=shared, rounded=rounded, wire=wire)
        if math.isfinite(trust) and max(map(len, hosted)) > 1:
            raise InputError(f"trust needs one node per process; start {topology.n} processes, or leave it out")
        self.rank, self.hosted, self.timeout, self.host = rank, hosted, timeout, host
        self._home = {node: process for process, nodes in enumerate(hosted) for node in nodes}
        self._opener = store if isinstance(store, Opener) else GlooOpener(Meeting(store), host)
        self._moment: Moment = (0, 0)
        self._at_exit: Finalize | None = None
        self._latest: Tensor | None = None
        self._deltas: dict[Hashable, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._sent_and_wanted: dict[int, Sent] = {}
        self.members = Membership(
            self._opener, rank, self._neighbouring_processes(), timeout=timeout,
            experiment=experiment, topology=topology.fingerprint, trust=trust, model_here=self._mean_here,
        )

    def connect(
        self, step: int = 0, patience: float | None = None, last_step: float = math.inf, models: Tensor | None = None
    ) -> Distributed:
        """Connect to all neighbours within `patience` seconds (default: the timeout of a step).

        `step` is the last step completed here, `last_step` that of the run. `models` are the rows here, if neighbours
        that already train shall send theirs.
        """
        self.members.last_step = last_step
        if models is not None:
            self.members.model = Expected(models.numel() // len(self.nodes), models.dtype)
        self._at_exit = Finalize(None, self.close, exitpriority=0)      # `atexit` is skipped in forked processes
        self._moment, self.members.step = (step, 0), step
        self.members.find(patience or self.timeout)
        return self

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm, and keep its models for processes that join later."""
        self._latest, state = super().advance(algorithm, x, g, state, node)
        return self._latest, state

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and move towards the received rows, always in full precision."""
        own = [self.by_run(v) for v in tensors]
        told = [self.told(rows) for rows in own]
        received = self._rows_from_others(t, torch.stack(told) if len(told) > 1 else told[0][None])
        guard, exchange = self.members.guard, self._moment[1]
        if guard is None:
            return self._moved(t, tensors, own, told, received)
        mixed = self._moved(t, tensors, own, told, guard.clipped(exchange, own, received))
        guard.averaged(exchange, [self.by_run(v) for v in mixed])
        return mixed

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
        received = {}
        for node, words in self._rows_from_others(t, wire.packed(parts, c)[None], raw=True).items():
            key = self.wire_key([node], time, draw, c)
            try:
                restored = wire.restored(wire.unpacked(words[0][:, None], c, rows.dtype), c, key)
                check_numbers(restored)
            except (Rejected, RuntimeError):                # such as a place beyond the model
                self.members.say_once(self._home[node], "is ignored: it sent numbers that cannot be restored")
                continue
            received[node] = restored.transpose(0, 1)
        q = self.with_own(own, nothing)
        return q, self._moved(t, (q,), [own], [own], received)[0]

    def _moved(
        self, t: int, tensors: tuple[Tensor, ...], own: Sequence[Tensor], told: Sequence[Tensor],
        received: dict[int, Tensor],
    ) -> tuple[Tensor, ...]:
        """Move towards the received rows, [tensors, runs, columns] of each remote node."""
        here, remote = self._delta(t, tuple(received), own[0])
        if not received and not here.any():
            return tensors
        with full_precision(tensors[0].device.type):
            mixed = []
            for k, (rows, v) in enumerate(zip(own, tensors, strict=True)):
                first = told[k][:, :1]
                moved = rows + here @ (told[k] - first) if len(self.nodes) > 1 else rows   # a single row adds 0
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
        received = self._rows_from_others(t, told[None])
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
        routes = dict(self._routes[self.topology.position(t if at is None else at)])
        out, into = routes.pop(self.rank)
        came[into], arrived[into] = told[out], True
        sent = {there: self._buffer(told[out]) for there, (out, _) in routes.items() if len(out[0])}
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
        if not self.members.models:
            return None
        mean = torch.stack(self.members.models).mean(dim=0).to(like)
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

    def _rows_from_others(self, t: int, own: Tensor, raw: bool = False) -> dict[int, Tensor]:
        """Send the own rows; return [tensors, runs, columns] of each remote node received. `raw` rows hold any bits."""
        messages = self._messages(t)
        copies: dict[tuple[int, ...], Tensor] = {}          # one buffer for neighbours that receive the same rows
        sent: dict[int, Tensor] = {}
        for there in self.members.neighbours:
            if rows := tuple(messages[there][0]):
                if rows not in copies:
                    copies[rows] = self._buffer(own if len(rows) == len(self.nodes) else own[:, :, rows])
                sent[there] = copies[rows]
        runs, columns = len(self.seeds), own.shape[-1]
        shapes = {there: (len(own), runs, len(of), columns) for there, (_, of) in messages.items() if of}
        largest = own.nbytes // len(self.nodes) * max(map(len, self.hosted))
        came = self._exchanged(t, sent, shapes, own, largest, raw)
        received = {j: rows[:, :, k] for there, rows in came.items() for k, j in enumerate(messages[there][1])}
        return {node: received[node] for node in sorted(received)}

    def _exchanged(
        self, t: int, sent: dict[int, Tensor], shapes: Mapping[int, Sequence[int]], like: Tensor, largest: int,
        raw: bool = False,
    ) -> dict[int, Tensor]:
        """Send a tensor to each process in `sent`; return the tensor of the given shape that each other process sent.

        Sent tensors must not change afterwards, since a send may outlast the exchange. `largest` is the size in bytes
        that a message is expected to have at most; `raw` messages are packed bits. Rejected messages do not count.
        """
        last, exchange = self._moment
        self._moment = moment = (t, exchange + 1 if last == t else 0)
        members = self.members
        members.step = t
        if not members.begun:
            members.begin(largest=MARGIN * largest)
        members.take_back()
        with members.waiting():
            for there, edge in list(members.edges.items()):
                if there in sent:
                    with members.watched(there):
                        edge.send(moment, sent[there], self.timeout)
            return self._receive(moment, shapes, like, raw)

    def _receive(
        self, moment: Moment, shapes: Mapping[int, Sequence[int]], like: Tensor, raw: bool
    ) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}
        for there, edge in list(self.members.edges.items()):
            if there not in shapes:
                continue
            shape = shapes[there]
            with self.members.watched(there):
                expected = Expected(math.prod(shape), self._wire(like), self.members.last_step, packed=raw)
                try:
                    rows = edge.receive(moment, expected, self.timeout)
                except Rejected as error:
                    self.members.say_once(there, f"is ignored: {error}")
                    rows = None
                if rows is None:
                    edge.account.missed += 1
                else:
                    received[there] = rows.view(*shape).to(like)
        return received

    def _buffer(self, rows: Tensor) -> Tensor:
        """Copy rows to send."""
        return torch.empty(rows.shape, dtype=self._wire(rows)).copy_(rows)

    def _wire(self, own: Tensor) -> torch.dtype:
        """Return the dtype of payloads."""
        return torch.bfloat16 if self.rounded else own.dtype

    def _mean_here(self) -> Tensor | None:
        """The mean of the models here, all runs in one row; None before the first step."""
        latest = self._latest
        if latest is None:
            return None
        return latest.view(len(self.seeds), len(self.nodes), -1).mean(dim=1).flatten().cpu()

    def _delta(self, t: int, came: tuple[int, ...], like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """W(t) − I: [nodes here, nodes here], and a column for each received remote node; rows sum to 0."""
        key = (self._key(t), came, like.dtype, like.device)
        if key not in self._deltas:
            if self.topology.is_drawn(t):
                self._deltas.clear()                        # never needed again
            k = len(self.nodes)
            W = torch.from_numpy(self.topology.weights(t))[list(self.nodes)][:, [*self.nodes, *came]]
            W[:, :k].fill_diagonal_(0)
            W[:, :k] -= torch.diag(W.sum(dim=1))
            W = W.to(like)
            self._deltas[key] = W[:, :k], W[:, k:, None].unbind(dim=1)
        return self._deltas[key]

    def _key(self, t: int) -> int:
        """Key of the steps with the weights of step t: its position in the period, or the step itself if W is drawn."""
        return -t if self.topology.is_drawn(t) else self.topology.position(t)

    def _neighbouring_processes(self) -> list[int]:
        """The processes that host a neighbour of a node here, in either direction."""
        links = self.topology.links()
        either = (links | links.T)[list(self.nodes)].any(axis=0)
        return sorted({self._home[j] for j in np.flatnonzero(either).tolist()} - {self.rank})

    def _messages(self, t: int) -> Sent:
        """For each neighbour at step t: local indices of nodes to send, and nodes to receive."""
        key = self._key(t)
        if key not in self._sent_and_wanted:
            if self.topology.is_drawn(t):
                self._sent_and_wanted.clear()
            links, here = self.topology.links(t), list(self.nodes)
            self._sent_and_wanted[key] = {
                there: (
                    np.flatnonzero(links[list(hosted)][:, here].any(axis=0)).tolist(),
                    [hosted[k] for k in np.flatnonzero(links[here][:, list(hosted)].any(axis=0)).tolist()],
                )
                for there, hosted in ((there, self.hosted[there]) for there in self.members.neighbours)
            }
        return self._sent_and_wanted[key]

    @cached_property
    def _routes(self) -> list[dict[int, tuple[Slots, Slots]]]:
        """For each step of a period and each process, this one too: the slots here of messages to it, and from it."""
        here = {node: place for place, node in enumerate(self.nodes)}
        periods = []
        for t in range(1, self.links.period + 1):
            messages = self.links.messages(t)
            periods.append({
                there: (
                    _slots((here[j], s) for j, s, i, _ in messages if j in here and self._home[i] == there),
                    _slots((here[i], s) for j, _, i, s in messages if i in here and self._home[j] == there),
                )
                for there in (self.rank, *self.members.neighbours)
            })
        return periods

    @cached_property
    def _world(self) -> Group:
        """Group of all processes, for exact means and broadcasts; opened on first use."""
        return self._opener.group(self.rank, len(self.hosted), self.timeout)


def _slots(places: Iterable[tuple[int, int]]) -> Slots:
    """Places and slots as an index."""
    found = torch.tensor(list(places), dtype=torch.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]

