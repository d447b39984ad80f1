"""Nodes spread over processes and machines: peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import atexit
import itertools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import timedelta
from functools import cached_property

import torch
from torch import Tensor

from quasiglobal.engines.distributed.edge import Account, Edge, Lost, Moment, Refused, open_edge
from quasiglobal.engines.distributed.gloo import Group, Meeting, Store, open_group
from quasiglobal.engines.host import Host
from quasiglobal.errors import InputError
from quasiglobal.gradients.precision import full_precision
from quasiglobal.topology import Topology

log = logging.getLogger("quasiglobal")


def spread(n: int, processes: int) -> list[tuple[int, ...]]:
    """Which nodes each process hosts: neighbours in number stay together.

    >>> spread(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if not 1 <= processes <= n:
        raise InputError(f"{n} nodes need 1 to {n} processes, got {processes}")
    size, rest = divmod(n, processes)
    starts = [rank * size + min(rank, rest) for rank in range(processes + 1)]
    return [tuple(range(first, last)) for first, last in itertools.pairwise(starts)]


ATTEMPT = 10.0
"""Seconds that one attempt to open an edge takes."""

MARGIN = 8
"""Times the first message's bytes that a later one may have."""

LONG = 3600.0
"""Seconds that an admitted neighbour may take to load its data and begin."""


class Distributed(Host):
    """The nodes of process `rank`; the others are reached through `store`, where they meet.

    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a message that never came returns to the receiver. Exact
    means are an all-reduce over all processes and cannot do without anybody. Nothing happens before `connect`.
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
        timeout: float = 60.0,
        host: str = "127.0.0.1",
        experiment: str = "",
    ) -> None:
        super().__init__(topology, nodes=hosted[rank], seeds=seeds, shared=shared, rounded=rounded)
        self.rank, self.hosted, self.timeout, self.host = rank, hosted, timeout, host
        self._store = Meeting(store)
        self._home = {node: process for process, nodes in enumerate(hosted) for node in nodes}
        self._exchange: Moment = (0, 0)
        self._deltas: dict[Hashable, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self._experiment = f"{experiment} {topology.fingerprint}".encode()      # what two sides have to agree on
        self._secret = os.environ.get("QG_SECRET", "").encode()
        self.edges: dict[int, Edge] = {}
        self.lost: dict[int, str] = {}
        self.models: list[Tensor] = []
        self._threads: list[threading.Thread] = []
        self._opening: dict[int, Edge] = {}
        self._admitted: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._opened: queue.SimpleQueue[Edge] = queue.SimpleQueue()
        self._ready, self._closing = threading.Event(), threading.Event()
        self._waiting_since, self._largest = math.inf, 0
        self.step_of_others = 0
        neighbours = {self._home[j] for i in self.nodes for j in topology.neighbours(i)}
        neighbours |= {self._home[i] for i in range(topology.n) if set(topology.neighbours(i)) & set(self.nodes)}
        self.neighbours = sorted(neighbours - {rank})
        self._accounts = {there: Account() for there in self.neighbours}

    def connect(self, step: int = 0, patience: float | None = None) -> Distributed:
        """Find the neighbours, all of them within `patience` seconds, by default the timeout of a step.

        `step` is the last one that was done here. Where neighbours are at work already, the others may stay away.
        """
        atexit.register(self.close)                 # a thread that reads does not survive the interpreter
        self._exchange = (step, 0)
        for there in self.neighbours:
            self._seek(there)
        patience = patience or self.timeout
        deadline, missing = time.monotonic() + patience, set(self.neighbours)
        while missing:
            try:
                missing.discard(self._admitted.get(timeout=max(deadline - time.monotonic(), 0.001)))
            except queue.Empty:
                if self.step_of_others:
                    break
                self.close()
                raise InputError(f"processes {sorted(missing)} did not come within {patience:g} s") from None
            if self.step_of_others:
                deadline = min(deadline, time.monotonic() + self.timeout)
        return self

    def mix(self, t: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Send, receive, and move towards what came; in full precision whatever is around."""
        own = [self.by_run(v) for v in tensors]
        told = [self.told(rows) for rows in own]
        received = self._exchanged(t, torch.stack(told) if len(told) > 1 else told[0][None])
        here, remote = self._delta(t, tuple(received), own[0])
        if not received and not here.any():
            return tensors
        with full_precision(tensors[0].device.type):
            mixed = []
            for k, (rows, v) in enumerate(zip(own, tensors, strict=True)):
                first = told[k][:, :1]
                moved = rows + here @ (told[k] - first) if len(self.nodes) > 1 else rows   # of one row it is 0
                for weights, row in zip(remote, received.values(), strict=True):
                    moved = torch.addcmul(moved, weights, row[k][:, None] - first)
                mixed.append(self.with_own(moved, v))
        return tuple(mixed)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """The exact mean, by an all-reduce over all processes."""
        rows = self.by_run(tensor)
        weights = torch.ones_like(rows[..., :1]) if among is None else among.view(*rows.shape[:2], 1)
        total = torch.cat([(weights * rows).sum(dim=1), weights.sum(dim=1)], dim=-1).cpu().contiguous()
        try:
            self._world.allreduce([total]).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(
                "an exact mean over all nodes lost a process and cannot go on; run the same command again to resume"
            ) from None
        total = total.to(rows)
        return self.with_own((total[:, :-1] / total[:, -1:])[:, None], tensor)

    def broadcast(self, tensor: Tensor, root: int = 0) -> Tensor:
        """The tensor of process `root`, everywhere."""
        value = tensor.cpu().contiguous().clone()
        try:
            self._world.broadcast(value, root).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(f"not all processes were there to start from process {root}'s model") from None
        return value.to(tensor)

    def accounts(self) -> dict[str, dict[str, float]]:
        """What each edge has carried, in bytes, and the seconds that it was waited for, by the other process."""
        return {str(there): asdict(account) for there, account in sorted(self._accounts.items())}

    def close(self) -> None:
        """Leave, and let nothing go on in the background."""
        atexit.unregister(self.close)
        self._closing.set()
        self._ready.set()
        for edge in list(self._opening.values()):
            edge.close()
        for thread in self._threads:
            thread.join(timeout=2 * ATTEMPT)
        for edge in self.edges.values():
            with suppress(Lost):
                edge.finish(self.timeout)
            edge.close()
        self.edges.clear()

    def _exchanged(self, t: int, own: Tensor) -> dict[int, Tensor]:
        """The rows [tensors, runs, columns] of every remote node that came in for this moment."""
        last, exchange = self._exchange
        self._exchange = moment = (t, exchange + 1 if last == t else 0)
        if not self._ready.is_set():
            per_node = own.nbytes // len(self.nodes)
            self._largest = MARGIN * per_node * max(map(len, self.hosted))
            self._start()
        self._welcome()
        messages = self._messages[(t - 1) % self.topology.period]
        wire = torch.bfloat16 if self.rounded else own.dtype
        self._waiting_since = time.monotonic()
        copies: dict[tuple[int, ...], Tensor] = {}      # what travels, while the algorithm goes on with its own
        for there, edge in list(self.edges.items()):
            sent = tuple(messages[there][0])
            if sent:
                if sent not in copies:
                    chosen = own if len(sent) == len(self.nodes) else own[:, :, sent]
                    copies[sent] = torch.empty(chosen.shape, dtype=wire).copy_(chosen)
                with self._watched(there):
                    edge.send(moment, copies[sent], self.timeout)
        received: dict[int, Tensor] = {}
        for there, edge in list(self.edges.items()):
            _, wanted = messages[there]
            if wanted:
                shape = len(own), len(self.seeds), len(wanted), own.shape[-1]
                with self._watched(there):
                    rows = edge.receive(moment, math.prod(shape), wire, self.timeout)
                    if rows is None:
                        edge.account.missed += 1
                    elif not _finite(rows):
                        edge.account.missed += 1
                        log.warning("process %d sent numbers that are not finite at step %d: refused", there, t)
                    else:
                        rows = rows.view(shape).to(own)
                        received |= {j: rows[:, :, k] for k, j in enumerate(wanted)}
        self._waiting_since = math.inf
        return received

    def _give_signs(self) -> None:
        """While this process waits for a neighbour, others may wait for it: it tells them that it is there."""
        while not self._closing.wait(self.timeout / 4):
            if time.monotonic() - self._waiting_since > self.timeout / 8:
                for edge in list(self.edges.values()):
                    with suppress(Lost):
                        edge.sign(self._exchange[0])

    @contextmanager
    def _watched(self, there: int) -> Iterator[None]:
        """Turns a lost edge into a step without it."""
        try:
            yield
        except Lost as error:
            self.lose(there, str(error))

    def lose(self, there: int, why: str) -> None:
        """An edge is gone; the others go on."""
        edge = self.edges.pop(there, None)
        if edge is not None:
            edge.close()
            self.lost[there] = why
            at = self._exchange[0]
            log.warning("process %d goes on without process %d from step %d: %s", self.rank, there, at, why)
            self._seek(there)

    def _mean_here(self) -> Tensor | None:
        """The mean of the models here, all runs in one row; None before the first step."""
        latest = self.latest
        if latest is None:
            return None
        return latest.view(len(self.seeds), len(self.nodes), -1).mean(dim=1).flatten().cpu()

    def mean_of_neighbours(self, like: Tensor) -> Tensor | None:
        """What those that were asked for a model gave, averaged, for every row here; None if nobody had any."""
        fitting = [model for model in self.models if model.numel() * len(self.nodes) == like.numel()]
        if not fitting:
            return None
        mean = torch.stack(fitting).mean(dim=0).to(like)
        return mean.view(len(self.seeds), 1, -1).expand(-1, len(self.nodes), -1).reshape(like.shape).contiguous()

    def _start(self) -> None:
        """Tell the neighbours that the first step begins here, and wait until it does there."""
        self._ready.set()
        self._in_background(self._give_signs)
        deadline = time.monotonic() + self.timeout
        while len(self.edges) < len(self.neighbours) and time.monotonic() < deadline:
            try:
                edge = self._opened.get(timeout=max(deadline - time.monotonic(), 0.001))
            except queue.Empty:
                break
            self.edges[edge.there] = edge
        self.lost = dict.fromkeys(set(self.neighbours) - set(self.edges), "it did not begin in time")

    def _welcome(self) -> None:
        """Take in the edges that were opened again."""
        while not self._opened.empty():
            edge = self._opened.get()
            self.edges[edge.there] = edge
            self.lost.pop(edge.there, None)
            at = self._exchange[0]
            log.warning("process %d has process %d back from step %d", self.rank, edge.there, at)

    def _seek(self, there: int) -> None:
        """Try to open the edge in the background, as long as it takes."""
        self._in_background(self._open, there)

    def _in_background(self, work: Callable[..., None], *arguments: int) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _open(self, there: int) -> None:
        while not self._closing.is_set():
            try:
                edge = open_edge(self._store, self.rank, there, self.host, min(self.timeout, ATTEMPT))
                self._opening[there] = edge
                edge.account = self._accounts[there]
                edge.admit(self._experiment, self._secret, self._exchange[0], time.monotonic() + ATTEMPT)
                beginning = not self._ready.is_set()        # and if the others have begun, their model may be asked for
                model = edge.share_model(self._mean_here(), beginning, time.monotonic() + self.timeout)
                if model is not None:
                    self.models.append(model)
                self.step_of_others = max(self.step_of_others, edge.step_there)
                self._admitted.put(there)
                self._ready.wait()                          # nobody waits for a process that is still loading
                edge.greet(time.monotonic() + LONG)
                edge.listen(self._largest)
            except Refused as error:
                log.warning("process %d refused process %d: %s", self.rank, there, error)
            except Lost:
                pass                                        # it will come, or it will not
            except RuntimeError:                            # the store is gone: nobody can join, but training goes on
                self._find_store()
            else:
                del self._opening[there]
                self._opened.put(edge)
                return
            self._closing.wait(0.2)

    def _find_store(self) -> None:
        """Wait until the store is back."""
        while not self._closing.wait(1.0):
            with suppress(RuntimeError, OSError):
                self._store.reconnect()
                return

    def _delta(self, t: int, came: tuple[int, ...], like: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """W(t) − I: [nodes here, nodes here], and a column for each remote node that came; rows sum to 0."""
        key = ((t - 1) % self.topology.period, came, like.dtype, like.device)
        if key not in self._deltas:
            k = len(self.nodes)
            W = torch.from_numpy(self.topology.weights(t))[list(self.nodes)][:, [*self.nodes, *came]]
            W[:, :k].fill_diagonal_(0)
            W[:, :k] -= torch.diag(W.sum(dim=1))
            W = W.to(like)
            self._deltas[key] = W[:, :k], W[:, k:, None].unbind(dim=1)
        return self._deltas[key]

    @cached_property
    def _messages(self) -> list[dict[int, tuple[list[int], list[int]]]]:
        """For each step of a period and each neighbour: the places here of the nodes it gets, the nodes it sends."""
        periods = []
        for t in range(1, self.topology.period + 1):
            from_whom = [set(self.topology.neighbours(i, t)) for i in range(self.topology.n)]

            def needed(nodes: Sequence[int], by: Sequence[int], links: list[set[int]] = from_whom) -> list[int]:
                return [j for j in nodes if any(j in links[i] for i in by)]

            periods.append({
                there: (
                    [self.nodes.index(j) for j in needed(self.nodes, self.hosted[there])],
                    needed(self.hosted[there], self.nodes),
                )
                for there in self.neighbours
            })
        return periods

    @cached_property
    def _world(self) -> Group:
        """All processes, for exact means; made by the first algorithm that asks."""
        return open_group(Meeting(self._store, "world/0"), self.rank, len(self.hosted), self.host, self.timeout)


def _finite(rows: Tensor) -> bool:
    """Whether all numbers are; their sum tells much faster, unless it overflows by itself."""
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())

