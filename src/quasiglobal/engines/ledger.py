"""The bytes that a node has sent, counted step by step: rounds, windows, coins and graphs change what a step sends."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm
from quasiglobal.engines.costs import LONGEST, StepTraffic, cycle_of, sent_in
from quasiglobal.engines.host import Host


class Ledger:
    """Bytes that a node of each run has sent, on average over the nodes; an exact mean counts as a ring all-reduce.

    A message that does not arrive counts too, also if its sender or receiver is absent (`churn`).

    >>> import quasiglobal as qg
    >>> from quasiglobal.engines.simulator import Simulator
    >>> ledger = Ledger(qg.algorithm("led:tau=7"), Simulator(qg.topology.ring(4)), d=650)
    >>> ledger.after(20).tolist()                           # two gossips with two neighbours, of 4 · 650 bytes
    [10400.0]
    """

    def __init__(self, algorithm: Algorithm, engine: Host, d: int, dtype: torch.dtype = torch.float32) -> None:
        """Models of type `dtype` have d parameters that are communicated."""
        self.algorithm, self.engine, self.d, self.dtype = algorithm, engine, d, dtype
        self._kinds: dict[Hashable, StepTraffic] = {}
        self._steps, self._total = 0, torch.zeros(len(engine.seeds), dtype=torch.float64)
        """Steps so far, and the bytes of all nodes in them: whole numbers, which a resumed run adds up to the same."""

    def after(self, steps: int) -> Tensor:
        """The bytes of each run after this many steps."""
        if steps < self._steps:
            self._steps, self._total = 0, torch.zeros_like(self._total)
        for kind, of in self._by_kind(range(self._steps + 1, steps + 1)).items():
            self._total += self._bytes(kind, of)
        self._steps = steps
        return self._total / self.engine.topology.n

    def per_step(self) -> float:
        """Bytes that a node sends per step, on average over a cycle of the algorithm and of the topology."""
        cycle = min(math.lcm(cycle_of(self.algorithm), self.engine.topology.positions), LONGEST)
        kinds = self._by_kind(range(2, 2 + cycle))
        total = sum(float(self._bytes(kind, of, expected=True)[0]) for kind, of in kinds.items())
        return total / cycle / self.engine.topology.n

    def all_reduce(self, further: int = 0) -> float:
        """Bytes that a node sends for the exact mean of all models, and of `further` bytes of each node."""
        return self._into_means(self.d * self.dtype.itemsize + further) / self.engine.topology.n

    def _by_kind(self, steps: range) -> dict[Hashable, list[int]]:
        """Steps by their phase and their position in the topology."""
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for t in steps:
            alike[self.algorithm.phase(t), self.engine.topology.position(t)].append(t)
        return alike

    def _bytes(self, kind: Hashable, steps: list[int], expected: bool = False) -> Tensor:
        """The bytes of all nodes of each run in steps of one kind; the expected ones if graphs or coins are drawn."""
        engine, d = self.engine, self.d
        if kind not in self._kinds:
            period = engine.topology.period or 1
            self._kinds[kind] = sent_in(self.algorithm, steps[0], self.dtype, engine.rounded, period)
        sent, messages = self._kinds[kind], self._messages(steps, expected)
        size = 2 if engine.rounded else self.dtype.itemsize
        widths = [int(one.of(d)) for one in sent.told]
        told = [width * size if engine.wire is None else engine.wire.bytes(width, size) for width in widths]
        to_each = float(sent.neighbours.of(d)) + sum(told)
        into_means = len(steps) * self._into_means(float(sent.everybody.of(d)))
        total = torch.full_like(self._total, float(messages.sum()) * to_each + into_means)
        for p, amount in sent.sometimes:
            coins = torch.full((len(steps), 1), p) if expected else engine.coin(p, torch.tensor(steps)[:, None])
            tossed = coins.double()
            total += (messages[:, None] * tossed).sum(dim=0) * float(amount.of(d))
        return total

    def _messages(self, steps: list[int], expected: bool) -> Tensor:
        """The number of messages of all nodes in each of the steps, which have one position."""
        topology = self.engine.topology
        drawn = topology.is_drawn(steps[0])
        if drawn and expected:
            return torch.full((len(steps),), topology.peers[0] * topology.positions * topology.n, dtype=torch.float64)
        each = steps if drawn else steps[:1]
        return torch.tensor([topology.messages(t) for t in each], dtype=torch.float64).expand(len(steps))

    def _into_means(self, of: float) -> float:
        """Bytes of all nodes for an exact mean of so many bytes of each."""
        return 2 * (self.engine.topology.n - 1) * of
