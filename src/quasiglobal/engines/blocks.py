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
from quasiglobal.engines.recording import COLUMNS, Instruction, Mixing, Recording, record
from quasiglobal.engines.rows import ModelRows, read, write
from quasiglobal.gradients.precision import full_precision

BLOCK = 2**17
"""Numbers of a block for each thread: in fewer, the calls take longer than the operations; more leave the cache."""

MOST_KINDS = 64
"""Recordings that are kept."""

Mixed = Callable[[tuple[Tensor, ...], slice], tuple[Tensor, ...]]
"""Mixes tensors of some columns with the rows that have come."""

ByColumns = ModelRows | Tensor
"""A tensor by columns, or one that is the same for all columns."""

Destination = tuple[int, ModelRows, int | None]
"""Number of a value, where to write it, and the number of the argument that is there."""


class BlockSteps:
    """Steps of an engine's rows in blocks, in place.

    `empty` returns memory for a message of c tensors of some columns, [c, runs, nodes, columns]; `exchange` sends it at
    step t and returns how to mix tensors like a given one with what came. `ahead` returns the first message of step t,
    if it was sent before.
    """

    def __init__(
        self, engine: Host, empty: Callable[[int, int, torch.dtype], Tensor],
        exchange: Callable[[int, Tensor, Tensor], Mixed], ahead: Callable[[int], Tensor | None],
    ) -> None:
        self.engine, self.empty, self.exchange, self.ahead = engine, empty, exchange, ahead
        self.algorithm: Algorithm | None = None
        self.recordings: dict[Hashable, Recording | None] = {}
        """Recordings of the algorithm's kinds of steps."""

    def step(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, t: int, lr: Tensor,
        weight_decay: float | Tensor = 0.0, keeps_state: bool = False, copy: Tensor | None = None, **further: Any,
    ) -> bool:
        """Run a step as `Host.step_in_place` does, if it can be computed in blocks; return whether it was.

        `copy` gets the shared columns of the new x too.
        """
        few, (k, d) = x.pieces[0], x.shape
        blocks, shared = blocks_of(k, d, self.engine.shared), self.engine.columns(d)
        if len(blocks) == 1 or few.device.type != "cpu":
            return False
        decay = [weight_decay] if isinstance(weight_decay, Tensor) else []
        rest = (torch.tensor(t, dtype=few.dtype), lr, *state.values(), *decay)
        wide = [ModelRows([value]) if value.ndim and value.shape[-1] == d else value for value in rest]
        arguments: list[ByColumns] = [x, g, *wide]
        recording = self._recorded(algorithm, weight_decay, t, state, arguments)
        if recording is None:
            return False
        known, mixed = dict(enumerate(arguments)), list[Mixed]()
        sent: dict[int, ModelRows] = {}                     # what was mixed
        together = [one for one in blocks if one.start < shared]
        for mix in recording.mixes:
            message = None if mixed else self.ahead(t)
            if message is None:
                message = self.empty(len(mix.reads), shared, few.dtype)
                rows = [ModelRows([part]) for part in message.view(len(mix.reads), k, shared)]
                targets: list[Destination] = [(number, row, None) for number, row in zip(mix.reads, rows, strict=True)]
                self._run(recording, known | sent, targets, mixed, together)
                if message.dtype == few.dtype:              # what was rounded is computed again
                    sent |= {number: row for number, row in zip(mix.reads, rows, strict=True) if number not in known}
            mixed.append(self.exchange(t, message, few))
        outputs = {0: x} | {4 + k: ModelRows([value]) for k, value in enumerate(state.values()) if not keeps_state}
        targets = [(number, outputs[at], at) for at, number in recording.outputs.items() if at in outputs]
        also = [] if copy is None else [ModelRows([copy.view(k, shared)])]
        copies: list[Destination] = [(recording.outputs.get(0, 0), place, None) for place in also]
        with self.engine.writing:
            self._run(recording, known | sent, [*targets, *copies], mixed, together)
            alone = [one for one in blocks if one.start >= shared]
            self._run(recording, known, targets, len(mixed) * [lambda tensors, _: tensors], alone)
        return True

    def _recorded(
        self, algorithm: Algorithm, weight_decay: float | Tensor, t: int, state: State, arguments: Sequence[ByColumns]
    ) -> Recording | None:
        """The recording of steps of the kind of t; None if they cannot be computed in blocks."""
        shapes = tuple(one.shape for one in arguments)
        kind = algorithm.phase(t), shapes, None if isinstance(weight_decay, Tensor) else weight_decay
        if algorithm is not self.algorithm or len(self.recordings) > MOST_KINDS:
            self.algorithm = algorithm
            self.recordings.clear()
        if kind not in self.recordings:
            fits = all(value.shape == arguments[0].shape for value in state.values())
            few = [read(one.cut([slice(0, COLUMNS)])[0]) if isinstance(one, ModelRows) else one for one in arguments]
            self.recordings[kind] = record(algorithm, self.engine, weight_decay, t, [*state], few) if fits else None
        return self.recordings[kind]

    def _run(
        self, recording: Recording, known: Mapping[int, ByColumns], targets: Sequence[Destination],
        mixed: Sequence[Mixed], blocks: Sequence[slice],
    ) -> None:
        """Compute the targets block by block."""
        with full_precision("cpu"):
            _Program(recording, known, targets).run(blocks, mixed)


class _Program:
    """The lines of a recording that some targets need, in the order in which each block runs them."""

    def __init__(self, recording: Recording, known: Mapping[int, ByColumns], targets: Sequence[Destination]) -> None:
        numbers = [number for number, *_ in targets]
        self.lines = recording.part(numbers, known)
        reads = [{at for at in line.reads if at is not None} for line in self.lines]
        self.loads = {at: known[at] for at in set(numbers).union(*reads) if at in known}
        self.mixes = recording.mixes
        computed = {line.result: (at, line) for at, line in enumerate(self.lines) if isinstance(line, Instruction)}
        aliased = {at for mix in self.mixes for at in mix.reads}
        self.direct: dict[int, ModelRows] = {}
        """Where a line writes its result: nothing needs afterwards what it overwrites."""
        for number, place, argument in targets:
            if number in computed and numbers.count(number) == 1:
                later = aliased.union(numbers, *reads[computed[number][0] + 1 :])
                if argument is None or argument not in later:
                    self.direct[number] = place
        self.copied = [(number, place) for number, place, _ in targets if number not in self.direct]
        last = {at: k for k, ats in enumerate(reads) for at in ats}
        self.drops = [[at for at in ats if last[at] == k and at not in numbers] for k, ats in enumerate(reads)]
        spent = {at for at, (_, line) in computed.items() if line.wide} - aliased - self.direct.keys()
        self.reused = [
            next((at for at in drops if at in spent), None) if isinstance(line, Instruction) and line.wide else None
            for line, drops in zip(self.lines, self.drops, strict=True)
        ]
        """The operand whose memory a line's result takes: nothing else needs it."""

    def run(self, blocks: Sequence[slice], mixed: Sequence[Mixed]) -> None:
        """Run the lines on each block; values that nothing needs any more leave the cache to others."""
        everywhere = {at: value for at, value in self.loads.items() if isinstance(value, Tensor)}
        loads = {at: rows.cut(blocks) for at, rows in self.loads.items() if isinstance(rows, ModelRows)}
        direct = {at: place.cut(blocks) for at, place in self.direct.items()}
        copied = [(at, place.cut(blocks)) for at, place in self.copied]
        for block, columns in enumerate(blocks):
            values = everywhere | {at: read(parts[block]) for at, parts in loads.items()}
            held = {value.data_ptr() for value in values.values()} if len(copied) > 1 else set()
            for line, drops, reused in zip(self.lines, self.drops, self.reused, strict=True):
                if isinstance(line, Mixing):
                    results = mixed[self.mixes.index(line)](tuple(values[at] for at in line.reads), columns)
                    values |= zip(line.results, results, strict=True)
                elif line.result in direct:
                    parts = direct[line.result][block]
                    line.run(values, parts[0] if len(parts) == 1 else None)
                    write(parts, values[line.result])
                else:
                    line.run(values, None if reused is None else values[reused])
                for at in drops:
                    del values[at]
            ready = {at: values[at].clone() if values[at].data_ptr() in held else values[at] for at, _ in copied}
            for at, places in copied:
                write(places[block], ready[at])


def blocks_of(rows: int, d: int, shared: int | None) -> list[slice]:
    """Return the blocks of d columns; none has both shared columns and others.

    >>> blocks_of(2, 100, shared=40)
    [slice(0, 40, None), slice(40, 100, None)]
    """
    size = max(1, BLOCK * torch.get_num_threads() // rows)
    ends = sorted({*range(size, d, size), d, min(shared or d, d)})
    return [slice(first, last) for first, last in itertools.pairwise([0, *ends])]
