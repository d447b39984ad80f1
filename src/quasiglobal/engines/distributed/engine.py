"""Nodes spread over processes and machines: mixing by peer-to-peer messages along the edges of the graph."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, Node, State
from quasiglobal.engines.blocks import BlockSteps, Mixed
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.distributed.checks import Rejected, check_numbers
from quasiglobal.engines.distributed.exchange import Exchange
from quasiglobal.engines.distributed.opening import Way
from quasiglobal.engines.links import check_push
from quasiglobal.engines.node import StepNode
from quasiglobal.engines.rows import ModelRows
from quasiglobal.errors import InputError
from quasiglobal.gradients.precision import full_precision
from quasiglobal.topology import Topology

Movement = tuple[Tensor | None, tuple[Tensor, ...]]
"""W(t) − I: between the nodes here, and a column for each remote node."""


class MeanLost(InputError):
    """An exact mean over all nodes has lost a process: the run cannot continue without it."""


class Distributed(Exchange):
    """Engine with the nodes of process `rank`; the other processes have the others.

    `mix` is v_i + Σ_j w_ij (v_j − v_i): the weight of a lost message returns to the receiver. `exchange` sends each
    neighbouring process the messages to its nodes only. An exact mean is an all-reduce and needs all processes.
    """

    def __init__(
        self, topology: Topology, store: Way, rank: int, hosted: Sequence[Sequence[int]], **options: Any
    ) -> None:
        super().__init__(topology, store, rank, hosted, **options)
        self._in_blocks = BlockSteps(self, self._empty_message, self._exchange_blocks, self._sent_ahead)
        self._deltas: dict[Hashable, Movement] = {}

    def advance(
        self, algorithm: Algorithm, x: Tensor, g: Tensor, state: State, node: Node
    ) -> tuple[Tensor, State]:
        """Call the algorithm, and keep its models for processes that join later; catch up if the others are ahead."""
        self._expect(algorithm, x.shape[1], x)
        newest = [edge.newest for edge in self.members.edges.values()]
        self.skipped = self.pace.behind(node.t, newest, self.topology.rounds, self.members.last_step)
        if self.skipped and isinstance(node, StepNode):
            node = replace(node, t=node.t + self.skipped, time=node.time + self.skipped)
        x, state = super().advance(algorithm, x, g, state, node)
        self._latest = ModelRows([x])
        return x, state

    def step_in_place(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, ahead: bool = False, **how: Any
    ) -> None:
        """Run a step in blocks of columns if possible (`engines/blocks.py`).

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
                weights = self._delta(t, tuple(received), joined)
                (moved,) = self._moved(weights, [joined], [self.told(joined)], received)
            return self._apart(moved, own, tensors)
        received = self._rows_to_mix(t, self._message(own), tensors[0])
        with full_precision(tensors[0].device.type):
            return self._mixed_with(received, self._delta(t, tuple(received), tensors[0]), tensors)

    def _mixed_with(
        self, received: dict[int, Tensor], weights: Movement, tensors: tuple[Tensor, ...], columns: slice = slice(None)
    ) -> tuple[Tensor, ...]:
        """Move these columns of the models towards the received rows."""
        own = [self.by_run(v) for v in tensors]
        told = [self.told(rows) for rows in own]
        moved = self._moved(weights, own, told, {node: rows[..., columns] for node, rows in received.items()})
        return tuple(self.with_own(rows, v) for rows, v in zip(moved, tensors, strict=True))

    def _exchange_blocks(self, t: int, message: Tensor, like: Tensor) -> Mixed:
        received = self._rows_to_mix(t, message, like)
        return partial(self._mixed_with, received, self._delta(t, tuple(received), like))

    def _rows_to_mix(self, t: int, message: Tensor, like: Tensor) -> dict[int, Tensor]:
        """Exchange rows; return what counts of them."""
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
                self.members.say_once(self.routes.home[node], "is ignored: it sent numbers that cannot be restored")
                continue
            received[node] = restored.transpose(0, 1)
        q = self.with_own(own, nothing)
        with full_precision(v.device.type):
            (moved,) = self._moved(self._delta(t, tuple(received), own), [own], [own], received)
        return q, self.with_own(moved, q)

    def _moved(
        self, weights: Movement, own: Sequence[Tensor], told: Sequence[Tensor], received: dict[int, Tensor]
    ) -> Sequence[Tensor]:
        """Move towards the received rows, [tensors, runs, columns] of each remote node; called in full precision."""
        here, remote = weights
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
        except Exception:                                   # the step itself says what is wrong
            return
        self._largest *= max(1, math.ceil(sent.most)) * (most if sent.per_edge else 1)

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Send, receive, and add what came, weighted by P(t)."""
        check_push(self.topology)
        cut = [self.by_run(v) for v in tensors]
        own = torch.cat(cut, dim=2)
        told = self.told(own)
        received = self._rows_from_others(t, self._message([told]), own)
        kept, sent = self.push_weights(t, own)
        all_came = len(received) == sum(len(of) for _, of in self.routes.rows(t).values())
        with full_precision(own.device.type):
            if self.topology.keeps_mean and all_came:       # then P is W, and this is `mix`
                (pushed,) = self._moved(self._delta(t, tuple(received), own), [own], [told], received)
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

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        """Return the exact mean, by an all-reduce over all processes."""
        rows = self.by_run(tensor)
        return self.with_own(self.averaged(rows, among), tensor)

    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean of [runs, nodes here, columns] over all processes, or over the nodes in the mask `among`."""
        weights = torch.ones_like(rows[..., :1]) if among is None else among.view(*rows.shape[:2], 1)
        if (shares := self.shares(rows)) is not None:
            weights = weights * shares
        total = torch.cat([(weights * rows).sum(dim=1), weights.sum(dim=1)], dim=-1).cpu().contiguous()
        try:
            self._world.allreduce([total]).wait(timedelta(seconds=self.timeout))
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
            self._world.broadcast(value, root).wait(timedelta(seconds=self.timeout))
        except RuntimeError:
            raise InputError(f"broadcast of process {root}'s model failed: not all processes are connected") from None
        return value.to(tensor)

    def mean_of_neighbours(self, like: Tensor) -> Tensor | None:
        """Average the models sent by neighbours that already train, for every row here; None if there are none.

        If trust is finite, take the one that is nearest to the models here: none of an honest neighbour is nearer.
        """
        models = self.members.models
        if not models:
            return None
        if self.guard is not None:
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
