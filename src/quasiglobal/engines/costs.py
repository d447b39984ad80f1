"""Traffic and memory of each algorithm, found by running it: messages are counted, memory is measured."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quasiglobal import algorithms, topology
from quasiglobal.algorithms import ALGORITHMS, Algorithm, Wrapper
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.wire import Wire
from quasiglobal.topology import Topology

COLUMNS = ("algorithm", "traffic a step", "extra memory", "needs of W", "from", "lost messages")
"""Headers of `Entry.cells`."""


@dataclass(frozen=True)
class Entry:
    """Costs of one algorithm; traffic and memory are multiples of the model size."""

    name: str
    traffic: Traffic
    memory: Fraction
    needs: str
    citation: str
    loss: str

    @property
    def cells(self) -> tuple[str, ...]:
        """The entry as text."""
        return self.name, str(self.traffic), f"{self.memory}", self.needs, self.citation, self.loss


@dataclass(frozen=True)
class Traffic:
    """Models sent per step: to each neighbour, and into an exact mean over all nodes; and single numbers."""

    neighbours: Fraction
    everybody: Fraction
    numbers: Fraction = Fraction(0)
    """Further numbers sent to each neighbour, such as the weight of a push."""
    told: Fraction = Fraction(0)
    """Models sent to each neighbour that the wire may compress."""
    per_edge: bool = False
    """Whether the neighbours receive different messages."""
    pushes: bool = False
    """Whether nodes divide sums among their neighbours."""

    @property
    def adds_up(self) -> bool:
        """Whether nodes count alike whatever their weights: sums of what was sent have none."""
        return self.per_edge or self.pushes

    def __str__(self) -> str:
        neighbours = self.neighbours + self.told
        parts = [f"{neighbours}"] if neighbours or not self.everybody else []
        parts += [f"{self.everybody} to all"] if self.everybody else []
        return " + ".join(parts)

    def bytes(self, graph: Topology, d: int, rounded: bool = False, wire: Wire | None = None) -> float:
        """Return the mean bytes sent per node and step for d parameters; an exact mean counts as a ring all-reduce."""
        all_reduce = 2 * (graph.n - 1) / graph.n * 4 * d
        to_neighbours = float(self.neighbours) * graph.bytes_per_step(d) + float(self.numbers) * graph.bytes_per_step(1)
        told = graph.bytes_per_step(d) if wire is None else graph.bytes_per_step(1, wire.bytes(d))
        told = float(self.told) * told / (2 if rounded and wire is None else 1)
        return told + to_neighbours / (2 if rounded else 1) + float(self.everybody) * all_reduce


def catalogue() -> list[Entry]:
    """Return the entry of every registered algorithm.

    >>> {entry.name: str(entry.traffic) for entry in catalogue() if "slowmo" in entry.name}
    {'slowmo': '1 + 1/12 to all'}
    """
    return [describe(name) for name in ALGORITHMS]


def describe(name: str) -> Entry:
    """Return the entry of an algorithm; the name may include options."""
    algorithm = algorithms.algorithm(name)
    sent, needs = traffic(algorithm), algorithm.needs
    loss = "refused" if sent.everybody else needs.loss              # an exact mean needs every node
    return Entry(name, sent, memory(algorithm), str(needs), citation(algorithm), loss)


def memory(algorithm: Algorithm) -> Fraction:
    """Return the size of the state as a multiple of the model size, on a graph with two neighbours per node."""
    def size(x: Tensor) -> int:
        return sum(value.nbytes for value in Simulator(topology.ring(3)).begin(algorithm, x).values())

    small, large = torch.zeros(3, 4), torch.zeros(3, 8)     # the difference has no single numbers
    return Fraction(size(large) - size(small), large.nbytes - small.nbytes)


def tensors_of_edges(algorithm: Algorithm, graph: Topology) -> int:
    """Return the number of tensors of a model's size in the state per edge of a node."""
    engine = Simulator(graph)
    x = torch.zeros(engine.rows, 1)
    return sum(value.shape[1] for value in algorithm.init_edges(x, engine.edges(x)).values())


def traffic(algorithm: Algorithm) -> Traffic:
    """Return a node's traffic per step, averaged over one cycle of the algorithm's phases."""
    phases = [algorithm.phase(t) for t in range(2, 2 + 2 * LONGEST)]
    cycle = next((p for p in range(1, LONGEST) if phases[p:] == phases[:-p]), LONGEST)
    times = Counter(phases[:cycle])
    costs = {phase: _cost(algorithm, 2 + phases.index(phase)) for phase in times}
    neighbours, everybody, numbers, told = (
        Fraction(sum(times[phase] * costs[phase][k] for phase in times), cycle) for k in range(4)
    )
    per_edge, pushes = (any(cost[k] for cost in costs.values()) for k in (4, 5))
    return Traffic(neighbours, everybody, numbers, told, per_edge, pushes)


def gossip_steps(algorithm: Algorithm, last: int) -> list[int]:
    """Return the steps from 2 to `last` at which the algorithm sends to its neighbours."""
    sends: dict[Hashable, bool] = {}
    for t in range(2, last + 1):
        if (phase := algorithm.phase(t)) not in sends:
            sends[phase] = _cost(algorithm, t)[0] > 0
    return [t for t in range(2, last + 1) if sends[algorithm.phase(t)]]


LONGEST = 2000
"""Longest cycle of phases that `traffic` detects, in steps."""


def citation(algorithm: Algorithm) -> str:
    """Return the method's citation; for a wrapper, followed by the citation of its base."""
    inner = f"; {citation(algorithm.base)}" if isinstance(algorithm, Wrapper) else ""
    return algorithm.citation + inner


class _Counting(Simulator):
    """Simulator that counts the numbers that a node sends to each neighbour, in 4 bytes each, and its exact means."""

    numbers = Fraction(0)
    means = 0
    told_models = 0
    exchanged = pushed = False

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self._count(tensors)
        return super().mix(t, tensors, time)

    def push(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self._count(tensors)
        self.pushed = True
        return super().push(t, tensors, time)

    def tell(self, t: int, v: Tensor, time: Tensor, draw: int) -> tuple[Tensor, Tensor]:
        self.told_models += 1
        return v, Simulator.mix(self, t, (v,), time)[0]

    def exchange(
        self, t: int, messages: tuple[Tensor, ...], time: Tensor | None = None, at: int | None = None
    ) -> tuple[tuple[Tensor, ...], Tensor]:
        self._count(messages)
        self.exchanged = True
        return super().exchange(t, messages, time, at)

    def mix_sometimes(self, p: float, t: int, tensors: tuple[Tensor, ...], time: Tensor) -> tuple[Tensor, ...]:
        self._count(tensors, Fraction(p).limit_denominator(10_000))
        return tensors

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        self.means += 1
        return super().mean(tensor, among)

    def _count(self, tensors: tuple[Tensor, ...], times: Fraction = Fraction(1)) -> None:
        self.numbers += times * sum(v.shape[-1] * v.element_size() // 4 for v in tensors)


def _cost(algorithm: Algorithm, t: int) -> tuple[Fraction, int, Fraction, int, bool, bool]:
    """Count what is sent in step t, in the order of the fields of `Traffic`."""
    small, large = (_counted(algorithm, t, d) for d in (4, 8))
    models = (large.numbers - small.numbers) / 4
    return models, small.means, small.numbers - 4 * models, small.told_models, small.exchanged, small.pushed


def _counted(algorithm: Algorithm, t: int, d: int) -> _Counting:
    engine, x = _Counting(topology.complete(2)), torch.zeros(2, d)
    engine.step(
        algorithm, x, x, engine.begin(algorithm, x), t=t, lr=torch.ones(()), full_gradient=torch.zeros_like,
        gradient=torch.zeros_like,
    )
    return engine
