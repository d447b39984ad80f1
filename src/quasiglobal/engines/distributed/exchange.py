"""Messages between processes: rows to and from the neighbours, along the edges that are open."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from multiprocessing.util import Finalize
from typing import Self

import torch
from torch import Tensor

from quasiglobal.engines.distributed.checks import Expected, Rejected
from quasiglobal.engines.distributed.edge import Edge
from quasiglobal.engines.distributed.gloo import Group
from quasiglobal.engines.distributed.membership import Membership
from quasiglobal.engines.distributed.opening import Way, opener_of
from quasiglobal.engines.distributed.pace import Moment, Pace
from quasiglobal.engines.distributed.routes import Routes, Slots
from quasiglobal.engines.distributed.trust import guard_of
from quasiglobal.engines.host import Host
from quasiglobal.engines.rows import ModelRows
from quasiglobal.engines.wire import Wire
from quasiglobal.topology import Topology

MARGIN = 8
"""Message size limit, as a multiple of the first message's size, or of what the algorithm sends if that is larger."""


class Exchange(Host):
    """Engine with the nodes of process `rank`, which exchanges messages with the other processes.

    It finds them through `store`, a store or an opener. No communication takes place before `connect`. A finite `trust`
    bounds what counts of a neighbour's message to `mix` (`trust.py`).
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
        self._opener = opener_of(store, host)
        self._moment: Moment = (0, 0)
        self.pace = Pace(round_deadline)
        self._at_exit: Finalize | None = None
        self._latest: ModelRows | None = None
        self._largest = 0
        """Size in bytes that a message may have, before the margin; set by the first step."""
        self._ahead: tuple[Moment, dict[int, Edge], Tensor] | None = None
        """A message sent ahead: its moment, on which edges, and its memory."""
        self.writing = threading.Lock()
        self.members = Membership(
            self._opener, rank, self.routes.neighbours, timeout=timeout,
            experiment=experiment, topology=topology.fingerprint, model_here=self._mean_here,
            drops=round_deadline is not None,
        )
        self.guard = guard_of(trust, hosted, self.members.note_clipped)

    def connect(
        self, step: int = 0, patience: float | None = None, last_step: float = math.inf, models: Tensor | None = None,
        sent_first: bool = True,
    ) -> Self:
        """Connect to all neighbours within `patience` seconds (default: the timeout of a step).

        `step` is the last step completed here, `last_step` that of the run. `models` are the rows at the start, if
        neighbours that already train shall send theirs; `sent_first`: whether a step's first message is of models.
        """
        self.members.last_step = last_step
        if models is not None:
            self.members.model = Expected(models.numel() // len(self.nodes), models.dtype)
            if self.guard is not None and sent_first:
                self.guard.begin(self.by_run(models)[:, 0])
        self._at_exit = Finalize(None, self.close, exitpriority=0)      # `atexit` is skipped in forked processes
        self._moment, self.members.step = (step, 0), step
        self.members.find(patience or self.timeout)
        return self

    @property
    def lost(self) -> dict[int, str]:
        """Neighbours that this process continues without, and the reasons."""
        return dict.fromkeys(self.pace.late, "it is late") | self.members.lost

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
        that a message is expected to have at most; `raw` messages are packed bits. Rejected messages do not count.
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
                expected = Expected(math.prod(shape), self._wire(like.dtype), self.members.last_step, packed=raw)
                try:
                    until = self.pace.until(there, edge.arrived)
                    rows = edge.receive(moment, expected, self.timeout, until)
                except Rejected as error:
                    self.members.say_once(there, f"is ignored: {error}")
                    rows = None
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

    def _sent_ahead(self, t: int) -> Tensor | None:
        """The message of the first mix of step t, if it was sent ahead."""
        return self._ahead[2] if self._ahead and self._ahead[0] == (t, 0) else None

    @cached_property
    def _slots(self) -> list[dict[int, tuple[Slots, Slots]]]:
        """The slots that messages to and from each process have, at each position of the topology."""
        return self.routes.slots(self.links)

    @cached_property
    def _world(self) -> Group:
        """Group of all processes, for exact means and broadcasts; opened on first use."""
        return self._opener.group(self.rank, len(self.hosted), self.timeout)
