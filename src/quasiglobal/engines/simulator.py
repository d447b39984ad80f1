"""Simulator: all nodes in one process, as rows of one tensor; several runs may be stacked as more rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quasiglobal.engines.draws import Faults
from quasiglobal.engines.host import Host
from quasiglobal.engines.links import check_push
from quasiglobal.engines.wire import Wire
from quasiglobal.errors import InputError
from quasiglobal.stacked.precision import full_precision
from quasiglobal.topology import Topology


class Simulator(Host):
    """Engine with all nodes: row r·n + i of every tensor is node i of run r. `drop`, `churn`: see `Faults`.

    >>> from quasiglobal import topology
    >>> engine = Simulator(topology.complete(2), seeds=(0, 1), shared=1)
    >>> x = torch.tensor([[0.0, 5.0], [2.0, 6.0], [10.0, 7.0], [30.0, 8.0]])
    >>> engine.mix(1, (x,))[0].tolist()
    [[1.0, 5.0], [1.0, 6.0], [20.0, 7.0], [20.0, 8.0]]
    """

    waits_for_nobody = True

    def __init__(
        self,
        topology: Topology,
        *,
        seeds: Sequence[int] = (0,),
        shared: int | None = None,
        rounded: bool = False,
        wire: Wire | None = None,
        drop: float = 0.0,
        churn: float = 0.0,
    ) -> None:
        super().__init__(topology, seeds=seeds, shared=shared, rounded=rounded, wire=wire)
        self.faults = Faults(drop, churn)
        self._drawn: dict[tuple[torch.dtype, torch.device], DrawnWeights] = {}
        self._deltas: dict[tuple[int, torch.dtype, torch.device], Tensor | None] = {}
        self._sparse: dict[tuple[int, torch.dtype, torch.device], tuple[Tensor, Tensor] | None] = {}
        self._slots: dict[tuple[int, torch.device], tuple[Tensor, Tensor, Tensor]] = {}

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return v + (W − I)(v − v₀) for each tensor, v₀ the run's first row, always in full precision.

        Quasi-global momentum divides a small difference of two mixed models by the learning rate: a
        TF32 or bf16 rounding error here exceeds the gradient after two decays. Since (W − I)1 = 0, subtracting v₀
        changes only the rounding error, which then scales with the differences between nodes; nodes that agree
        stay bit-identical. On large sparse graphs (`NODES_PER_NEIGHBOUR`), neighbours are added one by one.

        The weight of a lost message returns to the receiver, v_i + Σ_j w_ij (v_j − v_i) over the messages that
        arrive, as in the distributed engine: W's rows still sum to 1, its columns need not, and the mean moves.
        """
        like = tensors[0]
        if not self.faults and (neighbours := self._neighbours(t, like.dtype, like.device)):
            return tuple(self.with_own(self._gathered(self.by_run(v), *neighbours), v) for v in tensors)
        delta = self._delta(t, like)
        if delta is None:
            return tensors
        if self.faults:
            delta = self._arriving(self._came(t, time, like.device), delta).to(like.dtype)
        with full_precision(like.device.type):
            return tuple(self.with_own(self._addmm(self.by_run(v), delta), v) for v in tensors)

    def prepare(self, t: int, like: Tensor) -> None:
        super().prepare(t, like)
        self._neighbours(t, like.dtype, like.device)
        self._delta(t, like)
        for position in range(self.topology.period or 0):   # messages per edge may take the links of any step
            self._links_at(position + 1, like.device)

    def refresh(self, t: int) -> None:
        """Write the weights of step t, if they are drawn, to the tensor that a captured step reads."""
        if self.topology.is_drawn(t):
            for weights in self._drawn.values():
                weights.at(t)

    def drawn(self, t: int, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """W(t) − I of a random topology, as a tensor that `refresh` overwrites for later steps."""
        key = dtype or like.dtype, like.device
        if key not in self._drawn:
            self._drawn[key] = DrawnWeights(self.topology, *key)
        return self._drawn[key].at(t)

    def push_weights(self, t: int, like: Tensor) -> tuple[Tensor, Tensor]:
        if not self.topology.is_drawn(t):
            return super().push_weights(t, like)
        delta = self.drawn(t, like)                         # P is W
        return 1 + delta.diagonal()[:, None], delta - torch.diag(delta.diagonal())

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        """Return P v for each tensor, in full precision; the values in a lost message are lost.

        If P is W, this is `mix` without faults, with its small rounding error.
        """
        check_push(self.topology)
        if self.topology.keeps_mean and not self.faults:
            return self.mix(t, tensors, time)
        like = tensors[0]
        with full_precision(like.device.type):
            kept, sent = self.push_weights(t, like)
            if self.faults:
                sent = sent * self._came(t, time, like.device)
            pushed = ((kept * own, sent @ self.told(own)) for own in map(self.by_run, tensors))
            return tuple(self.with_own(own + came, v) for (own, came), v in zip(pushed, tensors, strict=True))

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        """Compress every row, then mix."""
        rows, wire = self.by_run(v), self.wire
        key = self.wire_key(self.nodes, time, draw, rows.shape[2])
        q = self.with_own(self.told(rows) if wire is None else wire(rows, key), torch.zeros_like(v))
        return q, self.mix(t, (q,), time)[0]

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        """Gather each node's messages from its senders' slots."""
        runs, n, device = len(self.seeds), self.topology.n, messages[0].device
        index, senders, arrived = self._links_at(t if at is None else at, device)
        if self.faults:
            arrived = arrived & self._came(t, time, device).gather(2, senders.expand(runs, *senders.shape))
        widths = [v.shape[2] for v in messages]
        sent = (self.told(v[..., : self.columns(v.shape[2])]) for v in messages)
        by_slot = (v.reshape(runs, n * v.shape[1], v.shape[2]) for v in sent)
        came = [v.index_select(1, index).view(runs, *senders.shape, v.shape[2]) for v in by_slot]
        return self.all_received(came, arrived, widths)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        if self.faults:
            raise InputError(NO_MEAN)
        return super().mean(tensor, among)

    def averaged(self, rows: Tensor, among: Tensor | None = None) -> Tensor:
        """Return the mean of each run's rows, Σ p_i v_i with shares p; rows that agree stay bit-identical."""
        shares = self.shares(rows)
        if among is not None:
            weights = among.view(len(self.seeds), self.topology.n, 1)
            weights = weights if shares is None else weights * shares
            return (weights * rows).sum(dim=1, keepdim=True) / weights.sum(dim=1, keepdim=True)
        if shares is None:
            return rows.mean(dim=1, keepdim=True)
        first = rows[:, :1]
        return first + (shares * (rows - first)).sum(dim=1, keepdim=True)

    def _delta(self, t: int, like: Tensor) -> Tensor | None:
        """W(t) − I as a tensor, in double precision with faults; None for a step without gossip."""
        dtype = torch.float64 if self.faults else like.dtype
        if self.topology.is_drawn(t):
            return self.drawn(t, like, dtype)
        key = (self.topology.position(t), dtype, like.device)
        if key not in self._deltas:
            delta = self.topology.weights(t) - np.eye(self.topology.n)
            self._deltas[key] = torch.from_numpy(delta).to(like.device, dtype) if delta.any() else None
        return self._deltas[key]

    def _addmm(self, rows: Tensor, delta: Tensor) -> Tensor:
        """Return rows + delta @ (rows − first row) per run of [runs, n, columns]; delta is [n, n] or [runs, n, n]."""
        told = self.told(rows)
        apart = told - told[:, :1]
        if len(rows) == 1:
            return torch.addmm(rows[0], delta.view(delta.shape[-2:]), apart[0])[None]
        return torch.baddbmm(rows, delta.expand(len(rows), *delta.shape[-2:]), apart)

    def _gathered(self, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return v_i + Σ_j w_ij (v_j − v_i) for each run of [runs, n, columns]; add one neighbour j at a time."""
        told, mixed = self.told(rows), rows
        for j in range(index.shape[1]):
            mixed = torch.addcmul(mixed, weights[:, j, None], told.index_select(1, index[:, j]) - told)
        return mixed

    def _neighbours(self, t: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor] | None:
        """Return each node's neighbours in W(t) and their weights, [n, degree]; None if a matrix product is faster."""
        if self.topology.is_drawn(t):
            return None
        key = (self.topology.position(t), dtype, device)
        if key not in self._sparse:
            weights = self.topology.weights(t) * (1 - np.eye(self.topology.n))
            degree = int((weights != 0).sum(axis=1).max())
            self._sparse[key] = None
            if 0 < degree * NODES_PER_NEIGHBOUR < self.topology.n:
                index = np.argsort(weights == 0, axis=1, kind="stable")[:, :degree]
                values = np.take_along_axis(weights, index, axis=1)
                self._sparse[key] = (torch.from_numpy(index).to(device), torch.from_numpy(values).to(device, dtype))
        return self._sparse[key]

    def _came(self, t: int, time: Tensor | None, device: torch.device) -> Tensor:
        """Return a mask [runs, n, n] of the links j → i whose messages of this step arrive at i."""
        now = torch.tensor(t, device=device) if time is None else time
        return self.faults.arrived(self.seeds_on(device), now, self.topology.n)

    def _arriving(self, came: Tensor, delta: Tensor) -> Tensor:
        """Return W − I as [runs, n, n], with the weights of messages lost at this step moved to the diagonal."""
        weights = (delta - torch.diag(delta.diagonal())) * came
        return weights - torch.diag_embed(weights.sum(dim=2))

    def _links_at(self, t: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        """Return for each slot: its position among all slots of its sender, the sender, whether it is a link of W(t).

        The positions are flat, [n · degree]; the others are [n, degree].
        """
        key = (self.topology.position(t), device)
        if key not in self._slots:
            links = self.links
            index = (links.senders * links.degree + links.at_sender).reshape(-1)
            tables = (torch.from_numpy(table).to(device) for table in (index, links.senders, links.active(t)))
            self._slots[key] = next(tables), next(tables), next(tables)
        return self._slots[key]


class DrawnWeights:
    """W(t) − I of a random topology as one tensor, overwritten for each step.

    >>> from quasiglobal import topology
    >>> held = DrawnWeights(topology.matching(4), torch.float32, torch.device("cpu"))
    >>> first = held.at(1)
    >>> bool((held.at(2) == first).all() and (first + torch.eye(4) == torch.from_numpy(held.topology.weights(2))).all())
    True
    """

    def __init__(self, topology: Topology, dtype: torch.dtype, device: torch.device) -> None:
        self.topology = topology
        self._held = torch.zeros(topology.n, topology.n, dtype=dtype, device=device)
        self._step = self._first = -1
        self._table = self._held[:0]
        """W(t) − I of some steps from the first one on."""

    def at(self, t: int) -> Tensor:
        """The tensor, with the weights of step t; a captured step cannot overwrite it itself."""
        if t != self._step:
            if not self._first <= t < self._first + len(self._table):
                n = self.topology.n
                ahead = 1 if self._held.device.type == "cpu" else max(1, min(AHEAD, LARGEST // n**2))
                steps = [self.topology.weights(step) - np.eye(n) for step in range(t, t + ahead)]
                self._first, self._table = t, torch.from_numpy(np.stack(steps)).to(self._held)
            self._held.copy_(self._table[t - self._first])
            self._step = t
        return self._held


AHEAD = 64
"""Steps whose weights are drawn and copied to a GPU at once, so that it seldom waits for a copy."""

LARGEST = 2**20
"""Maximum of numbers that are copied at once, unless one W has more."""

NODES_PER_NEIGHBOUR = 180
"""Nodes per neighbour above which adding neighbours one by one beats a product with W, measured on an H200.

A row of the product costs n multiplications; each neighbour added costs some passes over memory.
"""

NO_MEAN = (
    "an exact mean over all nodes needs every node: with drop or churn, "
    "use an algorithm that communicates with neighbours only (see `qg algorithms`)"
)
