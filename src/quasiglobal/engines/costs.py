"""Traffic and memory of each algorithm, found by running it; and the bytes that a node of a run has sent."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from quasiglobal import algorithms, topology
from quasiglobal.algorithms import ALGORITHMS, Algorithm, Wrapper
from quasiglobal.engines.host import Host
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.traced import Message, TracedEngine
from quasiglobal.topology import Topology

COLUMNS = ("algorithm", "traffic per step", "extra memory", "needs of W", "from", "lost messages")
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
    means: bool = False
    """Whether any step takes an exact mean over all nodes; the first may be the only one."""
    sometimes: bool = False
    """Whether a coin decides about some of the messages."""
    most: Fraction = Fraction(0)
    """Models to each neighbour in the step that sends most."""

    def __str__(self) -> str:
        neighbours = self.neighbours + self.told
        parts = [f"{neighbours}"] if neighbours or not self.everybody else []
        parts += [f"{self.everybody} to all"] if self.everybody else []
        return " + ".join(parts)


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
    loss = "refused" if sent.means else needs.loss                  # an exact mean needs every node
    return Entry(name, sent, memory(algorithm), str(needs), citation(algorithm), loss)


def memory(algorithm: Algorithm) -> Fraction:
    """Return the size of the state as a multiple of the model size, on a graph with two neighbours per node."""
    def size(x: Tensor) -> int:
        return sum(value.nbytes for value in Simulator(topology.ring(3)).begin(algorithm, x).values())

    small, large = (torch.zeros(3, d, dtype=torch.float32) for d in (4, 8))     # the difference has no single numbers
    return Fraction(size(large) - size(small), large.nbytes - small.nbytes)


def tensors_of_edges(algorithm: Algorithm, graph: Topology) -> int:
    """Return the number of tensors of a model's size in the state per edge of a node."""
    engine = Simulator(graph)
    x = torch.zeros(engine.rows, 1)
    return sum(value.shape[1] for value in algorithm.init_edges(x, engine.edges(x)).values())


def traffic(algorithm: Algorithm) -> Traffic:
    """Return a node's traffic per step, averaged over one cycle of the algorithm's phases."""
    phases, cycle = _cycle(algorithm)
    times = Counter(phases[:cycle])
    steps = {phase: sent_in(algorithm, 2 + phases.index(phase)) for phase in times}
    first = sent_in(algorithm, 1)

    def average(amounts: dict[Hashable, Fraction]) -> Fraction:
        return sum((times[phase] * amounts[phase] for phase in times), Fraction(0)) / cycle

    to_neighbours = {phase: one.expected for phase, one in steps.items()}
    return Traffic(
        neighbours=average({phase: one.per_parameter / 4 for phase, one in to_neighbours.items()}),
        everybody=average({phase: one.everybody.per_parameter / 4 for phase, one in steps.items()}),
        numbers=average({phase: one.further / 4 for phase, one in to_neighbours.items()}),
        told=average({phase: one.told_models for phase, one in steps.items()}),
        per_edge=any(one.per_edge for one in steps.values()), pushes=any(one.pushes for one in steps.values()),
        means=any(one.everybody != Amount() for one in (first, *steps.values())),
        sometimes=any(one.sometimes for one in steps.values()),
        most=max(one.expected.per_parameter / 4 + one.told_models for one in (first, *steps.values())),
    )


def _cycle(algorithm: Algorithm) -> tuple[list[Hashable], int]:
    """The phases from step 2 on, and the number of steps after which they repeat; `LONGEST` at most."""
    phases = [algorithm.phase(t) for t in range(2, 2 + 2 * LONGEST)]
    return phases, next((p for p in range(1, LONGEST) if phases[p:] == phases[:-p]), LONGEST)


def sends_model_first(algorithm: Algorithm) -> bool:
    """Whether the first message of a step begins with the model after its local step."""
    x = torch.arange(1.0, 9.0).view(2, 4)
    mixes = [one.tensors[0] for one in messages_of(algorithm, 1, x) if one.how == "mix"]
    return bool(mixes) and mixes[0].equal(x)                # gradients and momentum are 0


def gossip_steps(algorithm: Algorithm, last: int) -> list[int]:
    """Return the steps from 2 to `last` at which the algorithm sends to its neighbours."""
    sends: dict[Hashable, bool] = {}
    for t in range(2, last + 1):
        if (phase := algorithm.phase(t)) not in sends:
            sends[phase] = sent_in(algorithm, t).expected.per_parameter > 0
    return [t for t in range(2, last + 1) if sends[algorithm.phase(t)]]


LONGEST = 2000
"""Longest cycle of phases that `traffic` detects, in steps."""


def citation(algorithm: Algorithm) -> str:
    """Return the method's citation; for a wrapper, followed by the citation of its base."""
    inner = f"; {citation(algorithm.base)}" if isinstance(algorithm, Wrapper) else ""
    return algorithm.citation + inner


class Amount(NamedTuple):
    """Bytes of a message: a number per parameter of the model, plus a constant."""

    per_parameter: Fraction = Fraction(0)
    further: Fraction = Fraction(0)

    def of(self, d: int) -> Fraction:
        """The bytes for a model of d parameters."""
        return self.per_parameter * d + self.further


class StepTraffic(NamedTuple):
    """Messages that a node sends in one step."""

    neighbours: Amount
    """To each neighbour."""
    everybody: Amount
    """Into exact means over all nodes."""
    sometimes: tuple[tuple[float, Amount], ...]
    """To each neighbour, with the given probability."""
    told: tuple[Amount, ...]
    """Messages to each neighbour that the wire may compress, in numbers, not bytes."""
    per_edge: bool
    pushes: bool

    @property
    def told_models(self) -> Fraction:
        """Models to each neighbour that the wire may compress."""
        return sum((one.per_parameter for one in self.told), Fraction(0))

    @property
    def expected(self) -> Amount:
        """Mean size of the messages to each neighbour, without those that the wire may compress."""
        per_parameter, further = self.neighbours
        for p, amount in self.sometimes:
            share = Fraction(p).limit_denominator(10_000)
            per_parameter, further = per_parameter + share * amount.per_parameter, further + share * amount.further
        return Amount(per_parameter, further)


def sent_in(
    algorithm: Algorithm, t: int, dtype: torch.dtype = torch.float32, rounded: bool = False, period: int = 1
) -> StepTraffic:
    """Count the messages of a node in step t, for models of this type; `rounded` numbers travel as 2 bytes.

    `period` is the topology's: on several trees, some algorithms send one message per tree.
    """
    few, many = (messages_of(algorithm, t, torch.zeros(2, d, dtype=dtype), period) for d in (4, 8))
    both = list(zip(few, many, strict=True))

    def amount(pairs: Sequence[tuple[Message, Message]], size: int | None = None) -> Amount:
        """The sum of messages to models of 4 and of 8 numbers; each number has `size` bytes, by default its own."""
        small, large = (sum(v.shape[-1] * (size or v.element_size()) for pair in pairs for v in pair[k].tensors)
                        for k in (0, 1))
        slope = Fraction(large - small, 4)
        return Amount(slope, small - 4 * slope)

    def sent(*ways: str, p: float = 1.0) -> list[tuple[Message, Message]]:
        return [pair for pair in both if pair[0].how in ways and pair[0].p == p]

    size = 2 if rounded else None
    coins = dict.fromkeys(one.p for one in few if one.how == "sometimes")
    return StepTraffic(
        amount(sent("mix", "push", "exchange"), size), amount(sent("mean")),
        tuple((p, amount(sent("sometimes", p=p), size)) for p in coins),
        tuple(amount([pair], 1) for pair in sent("tell")), bool(sent("exchange")), bool(sent("push")),
    )


def messages_of(algorithm: Algorithm, t: int, x: Tensor, period: int = 1) -> list[Message]:
    """Return the messages that one of two nodes sends in step t; the rows of x are their models."""
    pair = Simulator(Topology("pair", topology.complete(2).matrices * period))
    engine = TracedEngine(pair)
    engine.step(
        algorithm, x, torch.zeros_like(x), pair.begin(algorithm, x), t=t, lr=torch.ones(()),
        full_gradient=torch.zeros_like, gradient=torch.zeros_like,
    )
    return engine.sent


# ---------------------------------------------------------------------------------------------- bytes of a run


class Ledger:
    """Bytes that a node of each run has sent, on average over the nodes; an exact mean counts as a ring all-reduce.

    A message that does not arrive counts too, also if its sender or receiver is absent (`churn`).

    >>> import quasiglobal as qg
    >>> ledger = Ledger(qg.algorithm("led:tau=7"), Simulator(qg.topology.ring(4)), d=650)
    >>> ledger.after(20).tolist()                           # two gossips with two neighbours, of 4 · 650 bytes
    [10400.0]
    """

    def __init__(self, algorithm: Algorithm, engine: Host, d: int, dtype: torch.dtype = torch.float32) -> None:
        """Models of type `dtype` have d parameters that are communicated."""
        self.algorithm, self.engine, self.d, self.dtype = algorithm, engine, d, dtype
        self._kinds: dict[Hashable, StepTraffic] = {}
        self._steps, self._total = 0, torch.zeros(len(engine.seeds), dtype=torch.float64)
        """Steps so far, and the bytes of all nodes in them: whole numbers, so a resumed run gets the same sum."""

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
        cycle = min(math.lcm(_cycle(self.algorithm)[1], self.engine.topology.positions), LONGEST)
        kinds = self._by_kind(range(2, 2 + cycle))
        total = sum(float(self._bytes(kind, of, expected=True)[0]) for kind, of in kinds.items())
        return total / cycle / self.engine.topology.n

    def all_reduce(self, further: int = 0) -> float:
        """Bytes that a node sends for the exact mean of all models and of `further` bytes per node."""
        return self._into_means(self.d * self.dtype.itemsize + further) / self.engine.topology.n

    def _by_kind(self, steps: range) -> dict[Hashable, list[int]]:
        """Steps by their phase and their position in the topology."""
        alike: dict[Hashable, list[int]] = defaultdict(list)
        for t in steps:
            alike[self.algorithm.phase(t), self.engine.topology.position(t)].append(t)
        return alike

    def _bytes(self, kind: Hashable, steps: list[int], expected: bool = False) -> Tensor:
        """The bytes of all nodes of each run in steps of one kind; `expected`: the mean over drawn graphs and coins."""
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
            total += (messages[:, None] * coins.double()).sum(dim=0) * float(amount.of(d))
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
        """Bytes that all nodes send for an exact mean of `of` bytes per node."""
        return 2 * (self.engine.topology.n - 1) * of
