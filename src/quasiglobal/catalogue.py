"""What each algorithm costs, found by running it: messages are counted, memory is measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from quasiglobal import algorithms, topology
from quasiglobal.algorithms import ALGORITHMS, Algorithm, Wrapper
from quasiglobal.engines.simulator import Simulator
from quasiglobal.minimize import minimize


@dataclass(frozen=True)
class Entry:
    """One algorithm; traffic and memory are multiples of the model."""

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
    """Models sent a step: to each neighbour, and into an exact mean over all nodes."""

    neighbours: Fraction
    everybody: Fraction

    def __str__(self) -> str:
        parts = [f"{self.neighbours}"] if self.neighbours or not self.everybody else []
        parts += [f"{self.everybody} to all"] if self.everybody else []
        return " + ".join(parts)


def catalogue() -> list[Entry]:
    """Every algorithm by name.

    >>> {entry.name: str(entry.traffic) for entry in catalogue() if "slowmo" in entry.name}
    {'slowmo': '1 + 1/12 to all'}
    """
    return [describe(name) for name in ALGORITHMS]


def describe(name: str) -> Entry:
    """The entry of an algorithm with these options."""
    algorithm = algorithms.algorithm(name)
    return Entry(name, traffic(algorithm), memory(algorithm), str(algorithm.needs), citation(algorithm))


def memory(algorithm: Algorithm) -> Fraction:
    """The size of the state, in models."""
    x = torch.zeros(1, 64)
    return Fraction(sum(value.numel() for value in algorithm.init(x).values()), x.numel())


def traffic(algorithm: Algorithm) -> Traffic:
    """What a node sends on average over a cycle of the algorithm."""
    steps = _cycle(algorithm)
    engine = _Counter(topology.complete(2))
    minimize(None, torch.zeros(4), algorithm, engine.topology, lr=1.0, steps=steps, engine=engine)
    return Traffic(Fraction(engine.mixed, steps), Fraction(engine.averaged, steps))


def citation(algorithm: Algorithm) -> str:
    """Where the method comes from, and the base where it is a wrapper."""
    inner = f"; {citation(algorithm.base)}" if isinstance(algorithm, Wrapper) else ""
    return algorithm.citation + inner


class _Counter(Simulator):
    mixed = 0
    averaged = 0

    def mix(self, t: int, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        self.mixed += len(tensors)
        return super().mix(t, tensors)

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        self.averaged += 1
        return super().mean(tensor, among)


def _cycle(algorithm: Algorithm) -> int:
    """After how many steps the algorithm does the same again: τ, and its base's."""
    tau = int(getattr(algorithm, "tau", 1))
    return math.lcm(tau, _cycle(algorithm.base)) if isinstance(algorithm, Wrapper) else tau
