"""A step in blocks of columns: on a CPU, a block stays in the cache from one operation to the next.

Operations on a whole model each read it from memory and write to new memory, about fifteen times a step. In blocks, the
memory is read and written once before a mix and once after it, and nothing but the message is new.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.host import Host
from quasiglobal.engines.recording import COLUMNS, Mixing, Recording, record
from quasiglobal.engines.rows import Rows
from quasiglobal.gradients.precision import full_precision

BLOCK = 2**17
"""Numbers of a block for each thread: in fewer, the calls take longer than the operations; more leave the cache."""

Mixed = Callable[[tuple[Tensor, ...], slice], tuple[Tensor, ...]]
"""Mixes tensors of some columns with the rows that have come."""

Target = tuple[int, Rows, int | None]
"""Number of a value, where to write it, and the number of the argument that is there."""


class BlockSteps:
    """Steps of an engine's rows in blocks, in place.

    `empty` returns memory for a message of c tensors of some columns, [c, runs, nodes, columns]; `exchange` sends it at
    step t and returns how to mix tensors like a given one with what came.
    """

    def __init__(
        self, engine: Host, empty: Callable[[int, int, torch.dtype], Tensor],
        exchange: Callable[[int, Tensor, Tensor], Mixed],
    ) -> None:
        self.engine, self.empty, self.exchange = engine, empty, exchange
        self.recordings: dict[Hashable, Recording | None] = {}

    def step(
        self, algorithm: Algorithm, x: Rows, g: Rows, state: State, *, t: int, lr: Tensor,
        weight_decay: float | Tensor = 0.0, keeps_state: bool = False, **further: Any,
    ) -> bool:
        """Run a step as `Host.step_in_place` does, if it can be computed in blocks; return whether it was."""
        few, (k, d) = x.read(slice(0, 1)), x.shape
        blocks, shared = blocks_of(x.shape, self.engine.shared), self.engine.columns(d)
        if len(blocks) == 1 or few.device.type != "cpu":
            return False
        decay = [weight_decay] if isinstance(weight_decay, Tensor) else []
        further_arguments = (torch.tensor(t, dtype=few.dtype), lr, *state.values(), *decay)
        arguments = [x, g, *(Rows([value], d) for value in further_arguments)]
        recording = self._recorded(algorithm, weight_decay, t, state, arguments)
        if recording is None:
            return False
        known, sent, mixed = dict(enumerate(arguments)), {}, []
        for mix in recording.mixes:
            message = self.empty(len(mix.reads), shared, few.dtype)
            rows = [Rows([part]) for part in message.view(len(mix.reads), k, shared)]
            targets: list[Target] = [(number, row, None) for number, row in zip(mix.reads, rows, strict=True)]
            self._run(recording, known | sent, targets, mixed, [one for one in blocks if one.start < shared])
            mixed.append(self.exchange(t, message, few))
            if message.dtype == few.dtype:                  # what was rounded is computed again
                sent |= dict(zip(mix.reads, rows, strict=True))
        results = recording.outputs.items()
        targets = [(number, arguments[at], at) for at, number in results if at == 0 or not keeps_state]
        with self.engine.writing:
            self._run(recording, known | sent, targets, mixed, [one for one in blocks if one.start < shared])
            alone = [one for one in blocks if one.start >= shared]
            self._run(recording, known, targets, len(mixed) * [lambda tensors, _: tensors], alone)
        return True

    def _recorded(
        self, algorithm: Algorithm, weight_decay: float | Tensor, t: int, state: State, arguments: Sequence[Rows]
    ) -> Recording | None:
        """The recording of steps of the kind of t; None if they cannot be computed in blocks."""
        shapes = tuple(one.shape for one in arguments)
        kind = algorithm, algorithm.phase(t), shapes, None if isinstance(weight_decay, Tensor) else weight_decay
        if kind not in self.recordings:
            fits = all(value.shape == arguments[0].shape for value in state.values())
            few = [one.read(slice(0, COLUMNS)) for one in arguments]
            self.recordings[kind] = record(algorithm, self.engine, weight_decay, t, [*state], few) if fits else None
        return self.recordings[kind]

    def _run(
        self, recording: Recording, known: Mapping[int, Rows], targets: Sequence[Target], mixed: Sequence[Mixed],
        blocks: Sequence[slice],
    ) -> None:
        """Compute the targets block by block."""
        program = _Program(recording, known, targets)
        with full_precision("cpu"):
            for columns in blocks:
                program.run(columns, mixed)


class _Program:
    """The lines of a recording that some targets need, in the order in which each block runs them."""

    def __init__(self, recording: Recording, known: Mapping[int, Rows], targets: Sequence[Target]) -> None:
        numbers = [number for number, *_ in targets]
        self.lines = recording.part(numbers, known)
        reads = [{at for at in line.reads if at is not None} for line in self.lines]
        self.loads = {at: known[at] for at in set(numbers).union(*reads) if at in known}
        self.mixes = recording.mixes
        computed = {line.result: at for at, line in enumerate(self.lines) if not isinstance(line, Mixing)}
        aliased = {at for mix in self.mixes for at in mix.reads}
        self.direct: dict[int, Rows] = {}
        """Where a line writes its result: nothing needs afterwards what it overwrites."""
        for number, place, argument in targets:
            if number in computed and numbers.count(number) == 1:
                later = aliased.union(numbers, *reads[computed[number] + 1 :])
                if argument is None or argument not in later:
                    self.direct[number] = place
        self.copied = [(number, place) for number, place, _ in targets if number not in self.direct]
        last = {at: k for k, ats in enumerate(reads) for at in ats}
        self.drops = [[at for at in ats if last[at] == k and at not in numbers] for k, ats in enumerate(reads)]

    def run(self, columns: slice, mixed: Sequence[Mixed]) -> None:
        """Run the lines on a block; values that nothing needs any more leave the cache to others."""
        values = {at: rows.read(columns) for at, rows in self.loads.items()}
        held = {value.data_ptr() for value in values.values()}
        for line, drops in zip(self.lines, self.drops, strict=True):
            if isinstance(line, Mixing):
                results = mixed[self.mixes.index(line)](tuple(values[at] for at in line.reads), columns)
                values |= zip(line.results, results, strict=True)
            else:
                place = self.direct.get(line.result)
                out = None if place is None else place.view(columns)
                line.run(values, out)
                if place is not None and out is None:
                    place.write(columns, values[line.result])
            for at in drops:
                del values[at]
        several = len(self.copied) > 1
        ready = [(place, values[at].clone() if several and values[at].data_ptr() in held else values[at])
                 for at, place in self.copied]
        for place, value in ready:
            place.write(columns, value)


def blocks_of(shape: tuple[int, int], shared: int | None) -> list[slice]:
    """Return the blocks of a tensor of this shape; none has both shared columns and others.

    >>> blocks_of((2, 100_000), shared=None)
    [slice(0, 65536, None), slice(65536, 100000, None)]
    """
    rows, d = shape
    size = max(1, BLOCK * torch.get_num_threads() // rows)
    ends = sorted({*range(size, d, size), d, min(shared or d, d)})
    return [slice(first, last) for first, last in itertools.pairwise([0, *ends])]
