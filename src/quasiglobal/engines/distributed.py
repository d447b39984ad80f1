"""Nodes spread over processes and machines: mixing by peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from datetime import timedelta
from functools import cached_property, partial
from multiprocessing.util import Finalize
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.host import Host, StepNode
from quasiglobal.engines.links import Links, check_push
from quasiglobal.engines.traced import TracedEngine, step_of_tensors
from quasiglobal.engines.trust import guard_of
from quasiglobal.engines.wire import Wire
from quasiglobal.errors import InputError
from quasiglobal.peers.edge import LOOK, Edge, Expected, Moment, Rejected, check_numbers
from quasiglobal.peers.gloo import GlooOpener, Way
from quasiglobal.peers.membership import FEW, Handover, Membership, Opener, Pace
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.step_blocks import BlockStep, ByColumns, Mix, ModelRows, blocks_of
from quasiglobal.topology import Topology

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Work

log = logging.getLogger("quasiglobal")

MOST_KINDS = 64
"""Number of programs of block steps that are kept, one per kind of step."""

SPELL = 8
"""Number of consecutive unclipped messages that ends a spell of clipping."""

MARGIN = 8
"""Message size limit, as a multiple of the first message's size, or of the algorithm's largest message if larger."""

Movement = tuple[Tensor | None, tuple[Tensor, ...]]
"""W(t) − I: between the nodes here, and a column for each remote node."""

Sent = dict[int, tuple[list[int], list[int]]]
"""For each neighbouring process: local indices of nodes to send, and nodes to receive."""

Slots = tuple[Tensor, Tensor]
"""Index of messages per edge: places of nodes, and slots."""


class MeanLost(InputError):
    """An exact mean over all nodes has lost a process: the run cannot continue without it."""


class Distributed(Host):
    """Engine that hosts the nodes of process `rank`; other processes host the rest.

    Processes find each other through `store`, a store or an opener. No communication takes place before `connect`.
    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a lost message returns to the receiver. `exchange` sends each
    neighbouring process the messages to its nodes only. An exact mean is an all-reduce and needs all processes. A
    finite `trust` clips the messages of neighbours in `mix` (`trust.py`).
    """

    def __init__(
        self,
        topology: Topology,
        store: Way,
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
        round_deadline: float | None = None,
        trust: float = math.inf,
    ) -> None:
        super().__init__(topology, nodes=hosted[rank], seeds=seeds, shared=shared, rounded=rounded, wire=wire)
        self.rank, self.hosted, self.timeout, self.host = rank, hosted, timeout, host
        self.routes = Routes(topology, rank, hosted)
        self._opener = store if isinstance(store, Opener) else GlooOpener(store, host)
        self._moment: Moment = (0, 0)
        self.pace = Pace(round_deadline)
        self._at_exit: Finalize | None = None
        self._latest: ModelRows | None = None
        self._largest = 0
        """Size in bytes that a message may have, before the margin; set by the first step."""
        self._ahead: tuple[Moment, dict[int, Edge], Tensor] | None = None
        """A message sent ahead: its moment, its edges and its memory."""
        self.writing = threading.Lock()
        self.models = LateModels(self._mean_here)
        self.members = Membership(
            self._opener, rank, self.routes.neighbours, timeout=timeout,
            experiment=experiment, topology=topology.fingerprint, handover=self.models,
            drops=round_deadline is not None,
        )
        self.guard = guard_of(trust, hosted, self._note_clipped)
        self._clipped: Counter[int] = Counter()
        """Exchanges in which the model of a neighbour was clipped."""
        self._spells: dict[int, int] = {}
        """For each clipped neighbour, the number of consecutive unclipped messages since."""
        self._in_blocks = BlockSteps(self)
        self._deltas: dict[Hashable, Movement] = {}

    def connect(
        self, step: int = 0, patience: float | None = None, last_step: float = math.inf, models: Tensor | None = None,
        sent_first: bool = True,
    ) -> Self:
        """Connect to all neighbours within `patience` seconds (default: the timeout of a step).

        `step` is the last step completed here, `last_step` that of the run. `models` are the rows at the start; if
        given, neighbours that already train send theirs. `sent_first`: whether a step's first message holds models.
        """
        self.members.last_step = last_step
        if models is not None:
            self.models.model = Expected(models.numel() // len(self.nodes), models.dtype)
            if self.guard is not None and sent_first:
                self.guard.begin(self.by_run(models)[:, 0])
        self._at_exit = Finalize(None, self.close, exitpriority=0)      # `atexit` is skipped in forked processes
        self._moment, self.members.step = (step, 0), step
        self.members.find(patience or self.timeout)
        return self

    @property
    def lost(self) -> dict[int, str]:
        """Neighbours that this process continues without, and the reasons."""
        return dict.fromkeys([*self.pace.late, *self.members.unawaited], "it is late") | self.members.lost

    def accounts(self) -> dict[str, dict[str, float]]:
        """Return the traffic statistics of each edge, by the process at its other end."""
        accounts = self.members.accounts()
        return {there: account | {"clipped": self._clipped[int(there)]} for there, account in accounts.items()}

    def _note_clipped(self, there: int, why: str) -> None:
        """Count a message, clipped for the reason `why`, or unclipped if it is empty; log the start and end of a spell.

        A spell ends after `SPELL` unclipped messages in a row.
        """
        step, name = self.members.step, self.members.called(there)
        if why:
            self._clipped[there] += 1
            if there not in self._spells:
                self.members.say(there, f"{self.members.me} clips {name} from step {step}: {why}")
            self._spells[there] = 0
        elif there in self._spells:
            self._spells[there] += 1
            if self._spells[there] == SPELL:
                del self._spells[there]
                self.members.say(there, f"{self.members.me} trusts {name} again at step {step}")

    def close(self) -> None:
        """Close all edges and end all threads."""
        if self._at_exit is not None:
            self._at_exit.cancel()
        self.members.close()

    # ------------------------------------------------------------------------------------------ steps

    def catch_up(self, t: int, x: Tensor) -> tuple[int, Tensor | None] | None:
        """The step to make in place of step t if the neighbours are far ahead, and the model that they handed over.

        Like a process that joins late, one that was suspended or cut off takes up the median of its neighbours' steps.
        With a deadline per step it is only behind if it was away: one that is slow skips steps in `advance`.
        """
        if self.pace.seconds is not None and not self.models.taken:
            return None
        step = self.members.step_to_join(t, FEW + self.topology.rounds)
        if not step:
            return None
        model = self.mean_of_neighbours(x)
        whose = "its own model" if model is None else "its neighbours' model"
        me = self.members.me
        log.warning("%s is %d steps behind: it continues at step %d with %s", me, step - t, step, whose)
        return step, model

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm, and keep its models for processes that join later; catch up if the others are ahead."""
        self._expect(algorithm, x.shape[1], x)
        self.skipped = self._behind(node.t)
        if self.skipped and isinstance(node, StepNode):
            node = replace(node, t=node.t + self.skipped, time=node.time + self.skipped)
        x, state = super().advance(algorithm, x, g, state, node)
        self._latest = ModelRows([x])
        return x, state

    def _behind(self, t: int) -> int:
        """Number of steps to skip with a deadline, up to the neighbours' next step.

        Neighbours that wait for this process are at most `rounds` steps ahead.
        """
        if self.pace.seconds is None:
            return 0
        members = self.members
        theirs = members.median((edge.newest[0] for edge in members.edges.values()), t + self.topology.rounds)
        return int(min(theirs + 1, members.last_step)) - t if theirs else 0

    def step_in_place(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, ahead: bool = False, **how: Any
    ) -> None:
        """Run a step in blocks of columns if possible (`BlockSteps`).

        With `ahead`, send the new x at once, for the next step, whose first mix must be that of x.
        """
        like = x.pieces[0]
        self._expect(algorithm, x.shape[1], like)
        message = self._empty_message(1, self.columns(x.shape[1]), like.dtype) if ahead else None
        catches_up = self.pace.seconds is not None          # only `advance` does
        if catches_up or not self._in_blocks.step(algorithm, x, g, state, copy=message, **how):
            super().step_in_place(algorithm, x, g, state, **how)
            if message is not None:
                message[0].copy_(self.by_run(x.whole()))
        self._latest = x
        if message is not None:
            self._send_ahead(how["t"] + self.skipped + 1, message)

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and move towards the received rows, always in full precision."""
        own = [self.by_run(v) for v in tensors]
        if len({rows.shape[2] for rows in own}) > 1:        # as columns of one tensor
            joined = torch.cat(own, dim=2)
            received = self._rows_to_mix(t, self._message([joined]), joined)
            with full_precision(joined.device.type):
                (moved,) = self._moved(t, [joined], [self.told(joined)], received)
            return self._apart(moved, own, tensors)
        received = self._rows_to_mix(t, self._message(own), tensors[0])
        with full_precision(tensors[0].device.type):
            return self._mixed_with(t, received, tensors)

    def _mixed_with(
        self, t: int, received: dict[int, Tensor], tensors: tuple[Tensor, ...], columns: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Move these columns of the models towards the received rows."""
        own = [self.by_run(v) for v in tensors]
        told = [self.told(rows) for rows in own]
        moved = self._moved(t, own, told, {node: rows[..., columns] for node, rows in received.items()})
        return tuple(self.with_own(rows, v) for rows, v in zip(moved, tensors, strict=True))

    def _rows_to_mix(self, t: int, message: Tensor, like: Tensor) -> dict[int, Tensor]:
        """Exchange rows; return those received, clipped by the guard."""
        received = self._rows_from_others(t, message, like)
        if self.guard is None:
            return received
        weights = [float(weight) for weight in self._delta(t, tuple(received), like)[1]]
        return self.guard.clipped(self._moment[1], message[:, :, 0].to(like), received, weights)

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
        for node, row in came.items():
            key = self.wire_key([node], time, draw, c)
            try:
                restored = wire.restored(wire.unpacked(row[0][:, None], c, rows.dtype), c, key)
                check_numbers(restored)
            except (Rejected, RuntimeError):                # such as a place beyond the model
                self.members.ignore(self.routes.home[node], "it sent numbers that cannot be restored")
                continue
            received[node] = restored.transpose(0, 1)
        q = self.with_own(own, nothing)
        with full_precision(v.device.type):
            (moved,) = self._moved(t, [own], [own], received)
        return q, self.with_own(moved, q)

    def _moved(
        self, t: int, own: Sequence[Tensor], told: Sequence[Tensor], received: dict[int, Tensor]
    ) -> Sequence[Tensor]:
        """Move towards the received rows, [tensors, runs, columns] of each remote node; called in full precision."""
        here, remote = self._delta(t, tuple(received), own[0])
        if not received and here is None:
            return own
        mixed = []
        for k, rows in enumerate(own):
            first = told[k][:, :1]
            if len(self.nodes) == len(received) == 1 and told[k] is rows:
                moved = torch.lerp(rows, next(iter(received.values()))[k][:, None], remote[0])  # in one pass
            else:
                moved = rows if here is None else rows + here @ (told[k] - first)
                for weight, row in zip(remote, received.values(), strict=True):
                    moved = torch.addcmul(moved, weight, row[k][:, None] - first)
            mixed.append(moved)
        return mixed

    def _expect(self, algorithm: Algorithm, d: int, like: Tensor) -> None:
        """Note, before the first exchange, how large messages of models with d columns may be."""
        if self._largest or not self.routes.neighbours:
            return
        most = max(map(len, self.hosted))
        self._largest = d * like.element_size() * len(self.seeds) * most
        try:
            sent = traffic(algorithm)
        except Exception:                                   # the step itself reports the error
            return
        self._largest *= max(1, math.ceil(sent.most)) * (most if sent.per_edge else 1)

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and add the received rows, weighted by P(t)."""
        check_push(self.topology)
        cut = [self.by_run(v) for v in tensors]
        own = torch.cat(cut, dim=2)
        told = self.told(own)
        received = self._rows_from_others(t, self._message([told]), own)
        kept, sent = self.push_weights(t, own)
        all_came = len(received) == sum(len(of) for _, of in self.routes.rows(t).values())
        with full_precision(own.device.type):
            if self.topology.keeps_mean and all_came:       # then P is W, and this is `mix`
                (pushed,) = self._moved(t, [own], [told], received)
            else:
                pushed = kept * own + sent[:, list(self.nodes)] @ told
                for node, row in received.items():
                    pushed = torch.addcmul(pushed, sent[:, node, None], row[0][:, None])
        return self._apart(pushed, cut, tensors)

    def _apart(self, joined: Tensor, like: Sequence[Tensor], tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Split columns that travelled as one tensor, and put each part into its tensor."""
        parts = torch.split(joined, [rows.shape[2] for rows in like], dim=2)
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

    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean over all processes, or over the nodes in the mask `among`, by an all-reduce."""
        weights = torch.ones_like(rows[..., :1]) if among is None else among.view(*rows.shape[:2], 1)
        if (shares := self.shares(rows)) is not None:
            weights = weights * shares
        total = torch.cat([(weights * rows).sum(dim=1), weights.sum(dim=1)], dim=-1).cpu().contiguous()
        try:
            self._wait_for(self._world.allreduce([total]))
        except RuntimeError:
            raise MeanLost(
                "an exact mean over all nodes lost a process and cannot continue; run the same command again to resume"
            ) from None
        total = total.to(rows)
        return (total[:, :-1] / total[:, -1:])[:, None]

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """Broadcast the tensor of process `root` to all processes; return it."""
        value = tensor.cpu().contiguous().clone()
        try:
            self._wait_for(self._world.broadcast(value, root))
        except RuntimeError:
            raise InputError(f"broadcast of process {root}'s model failed: not all processes are connected") from None
        return value.to(tensor)

    def _wait_for(self, work: Work) -> None:
        """Wait for an exchange between all processes, as long as a step may take; a signal may end the wait."""
        done = threading.Event()
        work.get_future().add_done_callback(lambda _: done.set())
        self._wait(done)                                    # set just before the work is over
        work.wait(timedelta(seconds=self.timeout if done.is_set() else 0.001))

    def _wait(self, done: threading.Event) -> None:
        began = time.monotonic()
        with self.members.waiting():
            while not done.wait(LOOK) and time.monotonic() < began + self.timeout:
                self.members.on_wait(LOOK)

    def mean_of_neighbours(self, like: Tensor) -> Tensor | None:
        """Average the models sent by neighbours that already train, for every row here; None if there are none.

        If trust is finite, take the one nearest to the models here: it is at least as near as any honest one.
        """
        models = list(self.models.taken.values())
        self.models.taken.clear()
        if not models:
            return None
        if self.guard is not None:
            self.guard.leap()
            here = like.double().flatten().cpu()
            models = [min(models, key=lambda model: float((model.double() - here).norm()))]
        mean = torch.stack(models).mean(dim=0).to(like)
        return mean.view(len(self.seeds), 1, -1).expand(-1, len(self.nodes), -1).reshape(like.shape).contiguous()

    def _delta(self, t: int, came: tuple[int, ...], like: Tensor) -> Movement:
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

    # --------------------------------------------------------------------------------------- messages

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
        that a message is expected to have at most; `raw` messages are packed bits. Rejected messages are ignored.
        """
        last, exchange = self._moment
        self._moment = moment = (t, exchange + 1 if last == t else 0)
        self.pace.begin(moment)
        members = self.members
        members.step = t
        if not members.begun:
            members.begin(largest=MARGIN * max(largest, self._largest))
        members.take_back()
        early = self._ahead[1] if self._ahead and self._ahead[0] == moment else {}
        self._ahead = None
        with members.waiting():
            for there, edge in list(members.edges.items()):
                if there in sent and edge is not early.get(there):          # an edge may have been reopened since
                    self._send(there, edge, moment, sent[there])
            return self._receive(moment, shapes, like, raw)

    def _send(self, there: int, edge: Edge, moment: Moment, rows: Tensor) -> None:
        """Send rows; drop the edge if that takes too long."""
        with self.members.watched(there):
            edge.send(moment, rows, 0.0 if there in self.members.unawaited else self.timeout)

    def _receive(
        self, moment: Moment, shapes: Mapping[int, Sequence[int]], like: Tensor, raw: bool
    ) -> dict[int, Tensor]:
        received: dict[int, Tensor] = {}
        unawaited, began = self.members.unawaited, time.monotonic()
        for there, edge in list(self.members.edges.items()):
            if there not in shapes:
                continue
            shape = shapes[there]
            with self.members.watched(there):
                expected = Expected(math.prod(shape), self._wire(like.dtype), self.members.last_step, packed=raw)
                try:
                    until = 0.0 if there in unawaited else self.pace.until(there, edge.arrived)
                    rows = edge.receive(moment, expected, self.timeout, until, began)
                except Rejected as error:
                    self.members.ignore(there, str(error))
                    rows = None
                if rows is None:
                    edge.account.missed += 1
                else:
                    self.members.heard(there)
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

    def _send_ahead(self, t: int, message: Tensor) -> None:
        """Send the message of the first mix of step t."""
        members, moment = self.members, (t, 0)
        to = {}
        with members.waiting():
            for there, rows in self.routes.to_others(t, message).items():
                if (edge := members.edges.get(there)) is not None:
                    self._send(there, edge, moment, rows)
                    to[there] = edge
        self._ahead = moment, to, message

    @cached_property
    def _slots(self) -> list[dict[int, tuple[Slots, Slots]]]:
        """Slots of the messages to and from each process, at each position of the topology."""
        return self.routes.slots(self.links)

    @cached_property
    def _world(self) -> ProcessGroup:
        """Group of all processes, for exact means and broadcasts; opened on first use."""
        opened: Future[ProcessGroup] = Future()
        done = threading.Event()

        def open_it() -> None:                              # no signal is handled meanwhile
            try:
                opened.set_result(self._opener.group(self.rank, len(self.hosted), self.timeout))
            except Exception as error:
                opened.set_exception(error)
            done.set()

        threading.Thread(target=open_it, daemon=True).start()
        self._wait(done)
        return opened.result(self.timeout)


class LateModels(Handover):
    """The models that a late process takes: of neighbours that train, to join them; of one that has ended, the result.

    `here` returns the model for a process that joins late; None before the first step.
    """

    def __init__(self, here: Callable[[], Tensor | None]) -> None:
        self.here = here
        self.result_here: Callable[[], Tensor] | None = None
        """Returns the whole model of this process, for neighbours that missed the end."""
        self.model: Expected | None = None
        """The model that this process takes if it joins late."""
        self.result: Expected | None = None
        """The whole model that it takes if it missed the end."""
        self.taken: dict[int, Tensor] = {}
        self.results: dict[int, Tensor] = {}
        self.went_to: set[int] = set()
        """Neighbours that missed the end and took the model from here."""

    def offered(self, ended: bool) -> Tensor | None:
        return ((ended and self.result_here) or self.here)()

    def wanted(self, ended: bool) -> Expected | None:
        return (ended and self.result) or self.model

    def take(self, there: int, rows: Tensor, ended: bool) -> None:
        if ended and self.result is not None:
            self.results[there] = rows
        else:
            self.taken[there] = rows

    def given(self, there: int, ended: bool) -> None:
        if ended:
            self.went_to.add(there)


class BlockSteps:
    """Steps of the rows of an engine in blocks of columns, in place (`stacked/step_blocks.py`)."""

    def __init__(self, engine: Distributed) -> None:
        self.engine = engine
        self.algorithm: Algorithm | None = None
        self.programs: dict[Hashable, BlockStep | None] = {}
        """The program of each kind of step of the algorithm; None for one that cannot be computed in blocks."""

    def step(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, t: int, lr: Tensor,
        weight_decay: float | Tensor = 0.0, keeps_state: bool = False, copy: Tensor | None = None, **further: object,
    ) -> bool:
        """Run a step as `Host.step_in_place` does, if it can be computed in blocks; return whether it was.

        `copy` gets the shared columns of the new x too.
        """
        engine, few, (k, d), widths = self.engine, x.pieces[0], x.shape, [piece.shape[1] for piece in x.pieces]
        shared, blocks = engine.columns(d), blocks_of(k, widths, engine.shared)
        if len(blocks) == 1 or few.device.type != "cpu":
            return False
        decay = [weight_decay] if isinstance(weight_decay, Tensor) else []
        rest = (torch.tensor(t, dtype=few.dtype), lr, *state.values(), *decay)
        wide = [ModelRows([value]) if value.ndim and value.shape[-1] == d else value for value in rest]
        arguments: list[ByColumns] = [x, g, *wide]
        program = self._program(algorithm, weight_decay, t, state, arguments)
        if program is None:
            return False
        early = engine._ahead                               # the message of the first mix only
        ahead = [early[2]] if early and early[0] == (t, 0) else []

        def exchange(count: int, fill: Callable[[Tensor], None]) -> Mix:
            if ahead:
                message = ahead.pop()
            else:
                message = engine._empty_message(count, shared, few.dtype)
                fill(message)
            return partial(engine._mixed_with, t, engine._rows_to_mix(t, message, few))

        places = [(0, x)] if copy is None else [(0, x), (0, ModelRows([copy.view(k, shared)]))]
        if not keeps_state:
            new = arguments[4 : 4 + len(state)]
            places += [(at, place) for at, place in enumerate(new, 4) if isinstance(place, ModelRows)]
        program(arguments, places, blocks, shared, exchange, engine.writing)
        return True

    def _program(
        self, algorithm: Algorithm, weight_decay: float | Tensor, t: int, state: State, arguments: Sequence[ByColumns]
    ) -> BlockStep | None:
        """The program for steps of the same kind as t; None if they cannot be computed in blocks."""
        shapes = tuple(one.shape for one in arguments)
        kind = algorithm.phase(t), shapes, None if isinstance(weight_decay, Tensor) else weight_decay
        if algorithm is not self.algorithm or len(self.programs) > MOST_KINDS:
            self.algorithm = algorithm
            self.programs.clear()
        if kind not in self.programs:
            self.programs[kind] = None
            if all(value.shape == arguments[0].shape for value in state.values()):
                step = step_of_tensors(algorithm, TracedEngine(self.engine), weight_decay, t, list(state))
                try:
                    self.programs[kind] = BlockStep(step, arguments, [0, *range(4, 4 + len(state))])
                except Exception as error:                  # an algorithm may do anything; its plain step still works
                    log.debug(f"a step of {algorithm} is not computed in blocks: {error!r}")
        return self.programs[kind]


class Routes:
    """The routes from process `rank`; process p hosts the nodes `hosted[p]`."""

    def __init__(self, topology: Topology, rank: int, hosted: Sequence[Sequence[int]]) -> None:
        self.topology, self.rank, self.hosted, self.nodes = topology, rank, hosted, list(hosted[rank])
        self.home = {node: process for process, nodes in enumerate(hosted) for node in nodes}
        self._rows: dict[int, Sent] = {}

    @cached_property
    def neighbours(self) -> list[int]:
        """The processes that host a neighbour of a node here, in either direction."""
        links = self.topology.links()
        either = (links | links.T)[self.nodes].any(axis=0)
        return sorted({self.home[j] for j in np.flatnonzero(either).tolist()} - {self.rank})

    def key(self, t: int) -> int:
        """Key of the steps with the weights of step t: its position in the period, or the step itself if W is drawn."""
        return -t if self.topology.is_drawn(t) else self.topology.position(t)

    def rows(self, t: int) -> Sent:
        """For each neighbour at step t: local indices of nodes to send, and nodes to receive."""
        key = self.key(t)
        if key not in self._rows:
            if self.topology.is_drawn(t):
                self._rows.clear()                          # never needed again
            links = self.topology.links(t)
            self._rows[key] = {
                there: (
                    np.flatnonzero(links[list(hosted)][:, self.nodes].any(axis=0)).tolist(),
                    [hosted[k] for k in np.flatnonzero(links[self.nodes][:, list(hosted)].any(axis=0)).tolist()],
                )
                for there, hosted in ((there, self.hosted[there]) for there in self.neighbours)
            }
        return self._rows[key]

    def to_others(self, t: int, message: Tensor) -> dict[int, Tensor]:
        """The rows of a message [tensors, runs, nodes, columns] that each neighbouring process receives at step t."""
        copies: dict[tuple[int, ...], Tensor] = {}          # one tensor for neighbours that receive the same rows
        sent: dict[int, Tensor] = {}
        for there, (out, _) in self.rows(t).items():
            if rows := tuple(out):
                if rows not in copies:
                    copies[rows] = message if len(rows) == len(self.nodes) else message[:, :, rows]
                sent[there] = copies[rows]
        return sent

    def slots(self, links: Links) -> list[dict[int, tuple[Slots, Slots]]]:
        """For each step of a period and each process, with this one: the local slots of messages to it and from it."""
        here = {node: place for place, node in enumerate(self.nodes)}
        periods = []
        for t in range(1, links.period + 1):
            messages = links.messages(t)
            periods.append({
                there: (
                    _index((here[j], s) for j, s, i, _ in messages if j in here and self.home[i] == there),
                    _index((here[i], s) for j, _, i, s in messages if i in here and self.home[j] == there),
                )
                for there in (self.rank, *self.neighbours)
            })
        return periods


def _index(places: Iterable[tuple[int, int]]) -> Slots:
    """Places and slots as an index."""
    found = torch.tensor(list(places), dtype=torch.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
