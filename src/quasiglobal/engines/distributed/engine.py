"""Nodes spread over processes and machines: mixing by peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Hashable, Sequence
from datetime import timedelta
from functools import cached_property
from multiprocessing.util import Finalize

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.distributed.edge import Moment
from quasiglobal.engines.distributed.gloo import Group, Meeting, Store, open_group
from quasiglobal.engines.distributed.membership import Membership
from quasiglobal.engines.host import Host
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

    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a lost message returns to the receiver. An exact mean is an
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
        timeout: float = 60.0,
        host: str = "127.0.0.1",
        experiment: str = "",
    ) -> None:
        super().__init__(topology, nodes=hosted[rank], seeds=seeds, shared=shared, rounded=rounded)
        self.rank, self.hosted, self.timeout, self.host = rank, hosted, timeout, host
        self._store = Meeting(store)
        self._moment: Moment = (0, 0)
        self._at_exit: Finalize | None = None
        self._latest: Tensor | None = None
        self._deltas: dict[Hashable, tuple[Tensor, tuple[Tensor, ...]]] = {}
        self.members = Membership(
            self._store, rank, self._neighbouring_processes(), timeout=timeout, host=host,
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
        self._latest, state = super().advance(algorithm, x, g, state, node)
        return self._latest, state

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and move towards the received rows, always in full precision."""
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
                moved = rows + here @ (told[k] - first) if len(self.nodes) > 1 else rows   # a single row adds 0
                for weights, row in zip(remote, received.values(), strict=True):
                    moved = torch.addcmul(moved, weights, row[k][:, None] - first)
                mixed.append(self.with_own(moved, v))
        return tuple(mixed)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the exact mean, by an all-reduce over all processes."""
        rows = self.by_run(tensor)
        weights = torch.ones_like(rows[..., :1]) if among is None else among.view(*rows.shape[:2], 1)
        total = torch.cat([(weights * rows).sum(dim=1), weights.sum(dim=1)], dim=-1).cpu().contiguous()
        try:
            self._world.allreduce([total]).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(
                "an exact mean over all nodes lost a process and cannot continue; run the same command again to resume"
            ) from None
        total = total.to(rows)
        return self.with_own((total[:, :-1] / total[:, -1:])[:, None], tensor)

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

    def _exchanged(self, t: int, own: Tensor) -> dict[int, Tensor]:
        """Exchange rows with the neighbours; return [tensors, runs, columns] for each remote node received."""
        last, exchange = self._moment
        self._moment = moment = (t, exchange + 1 if last == t else 0)
        members = self.members
        members.step = t
        if not members.begun:
            per_node = own.nbytes // len(self.nodes)
            members.begin(largest=MARGIN * per_node * max(map(len, self.hosted)))
        members.take_back()
        with members.waiting():
            self._send(moment, own)
            received = self._receive(moment, own)
        return {node: received[node] for node in sorted(received)}

    def _send(self, moment: Moment, own: Tensor) -> None:
        messages = self._messages[(moment[0] - 1) % self.topology.period]
        copies: dict[tuple[int, ...], Tensor] = {}      # send buffers: a send may outlast the exchange
        for there, edge in list(self.members.edges.items()):
            sent = tuple(messages[there][0])
            if sent:
                if sent not in copies:
                    chosen = own if len(sent) == len(self.nodes) else own[:, :, sent]
                    copies[sent] = torch.empty(chosen.shape, dtype=self._wire(own)).copy_(chosen)
                with self.members.watched(there):
                    edge.send(moment, copies[sent], self.timeout)

    def _receive(self, moment: Moment, own: Tensor) -> dict[int, Tensor]:
        messages = self._messages[(moment[0] - 1) % self.topology.period]
        received: dict[int, Tensor] = {}
        for there, edge in list(self.members.edges.items()):
            _, wanted = messages[there]
            if not wanted:
                continue
            shape = len(own), len(self.seeds), len(wanted), own.shape[-1]
            with self.members.watched(there):
                rows = edge.receive(moment, math.prod(shape), self._wire(own), self.timeout)
                if rows is None:
                    edge.account.missed += 1
                elif not _finite(rows):
                    edge.account.missed += 1
                    log.warning("process %d sent numbers that are not finite at step %d: ignored", there, moment[0])
                else:
                    rows = rows.view(shape).to(own)
                    received |= {j: rows[:, :, k] for k, j in enumerate(wanted)}
        return received

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
        key = ((t - 1) % self.topology.period, came, like.dtype, like.device)
        if key not in self._deltas:
            k = len(self.nodes)
            W = torch.from_numpy(self.topology.weights(t))[list(self.nodes)][:, [*self.nodes, *came]]
            W[:, :k].fill_diagonal_(0)
            W[:, :k] -= torch.diag(W.sum(dim=1))
            W = W.to(like)
            self._deltas[key] = W[:, :k], W[:, k:, None].unbind(dim=1)
        return self._deltas[key]

    def _neighbouring_processes(self) -> list[int]:
        """The processes that host a neighbour of a node here, in either direction."""
        home = {node: process for process, nodes in enumerate(self.hosted) for node in nodes}
        from_whom = [set(self.topology.neighbours(i)) for i in range(self.topology.n)]
        found = {home[j] for i in self.nodes for j in from_whom[i]}
        found |= {home[i] for i, senders in enumerate(from_whom) if senders & set(self.nodes)}
        return sorted(found - {self.rank})

    @cached_property
    def _messages(self) -> list[dict[int, tuple[list[int], list[int]]]]:
        """For each step of a period and each neighbour: local indices of nodes to send, and nodes to receive."""
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
                for there in self.members.neighbours
            })
        return periods

    @cached_property
    def _world(self) -> Group:
        """Group of all processes, for exact means and broadcasts; opened on first use."""
        return open_group(Meeting(self._store, "world/0"), self.rank, len(self.hosted), self.host, self.timeout)


def _finite(rows: Tensor) -> bool:
    """Whether all numbers are finite; testing their sum is much faster, unless the sum overflows."""
    return bool(rows.sum().isfinite()) or bool(rows.isfinite().all())
