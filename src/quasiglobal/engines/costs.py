"""Traffic and memory of each algorithm, found by running it: messages are counted, memory is measured."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quasiglobal import algorithms, topology
from quasiglobal.algorithms import ALGORITHMS, Algorithm, Wrapper
from quasiglobal.engines.simulator import Simulator
from quasiglobal.topology import Topology

COLUMNS = ("algorithm", "traffic a step", "extra memory", "needs of W", "from")
"""Headers of `Entry.cells`."""


@dataclass(frozen=True)
class Entry:
    """Costs of one algorithm; traffic and memory are multiples of the model size."""

    name: str
    traffic: Traffic
    memory: Fraction
    needs: str
    citation: str

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """The entry as text."""
        return self.name, str(self.traffic), f"{self.memory}", self.needs, self.citation


@dataclass(frozen=True)
class Traffic:
    """Models sent per step: to each neighbour, and into an exact mean over all nodes."""

    neighbours: Fraction
    everybody: Fraction

    def __str__(self) -> str:
        parts = [f"{self.neighbours}"] if self.neighbours or not self.everybody else []
        parts += [f"{self.everybody} to all"] if self.everybody else []
        return " + ".join(parts)

    def bytes(self, graph: Topology, d: int, rounded: bool = False) -> float:
        """Return the mean bytes sent per node and step for d parameters; an exact mean counts as a ring all-reduce."""
        all_reduce = 2 * (graph.n - 1) / graph.n * 4 * d
        to_neighbours = graph.bytes_per_step(d) / (2 if rounded else 1)
        return float(self.neighbours) * to_neighbours + float(self.everybody) * all_reduce


def catalogue() -> list[Entry]:
    """Return the entry of every registered algorithm.

    >>> {entry.name: str(entry.traffic) for entry in catalogue() if "slowmo" in entry.name}
    {'slowmo': '1 + 1/12 to all'}
    """
    return [describe(name) for name in ALGORITHMS]


def describe(name: str) -> Entry:
    """Return the entry of an algorithm; the name may include options."""
    algorithm = algorithms.algorithm(name)
    return Entry(name, traffic(algorithm), memory(algorithm), str(algorithm.needs), citation(algorithm))


def memory(algorithm: Algorithm) -> Fraction:
    """Return the size of the state as a multiple of the model size."""
    x = torch.zeros(1, 64)
    return Fraction(sum(value.numel() for value in algorithm.init(x).values()), x.numel())


def traffic(algorithm: Algorithm) -> Traffic:
    """Return a node's traffic per step, averaged over one cycle of the algorithm's phases."""
    phases = [algorithm.phase(t) for t in range(2, 2 + 2 * LONGEST)]
    cycle = next((p for p in range(1, LONGEST) if phases[p:] == phases[:-p]), LONGEST)
    times = Counter(phases[:cycle])
    costs = {phase: _cost(algorithm, 2 + phases.index(phase)) for phase in times}
    neighbours, everybody = (sum(times[phase] * costs[phase][k] for phase in times) for k in (0, 1))
    return Traffic(Fraction(neighbours, cycle), Fraction(everybody, cycle))


LONGEST = 2000
"""Longest cycle of phases that `traffic` detects, in steps."""


def citation(algorithm: Algorithm) -> str:
    """Return the method's citation; for a wrapper, followed by the citation of its base."""
    inner = f"; {citation(algorithm.base)}" if isinstance(algorithm, Wrapper) else ""
    return algorithm.citation + inner


class _Counting(Simulator):
    mixed = 0
    averaged = 0

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        self.mixed += len(tensors)
        return super().mix(t, tensors, time)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        self.averaged += 1
        return super().mean(tensor, among)


def _cost(algorithm: Algorithm, t: int) -> tuple[int, int]:
    """Count the tensors mixed, and the tensors averaged over all nodes, in step t."""
    engine = _Counting(topology.complete(2))
    x = torch.zeros(2, 4)
    engine.step(algorithm, x, x, algorithm.init(x), t=t, lr=torch.ones(()), full_gradient=torch.zeros_like)
    return engine.mixed, engine.averaged
