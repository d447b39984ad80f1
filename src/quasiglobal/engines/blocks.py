"""A step in blocks of columns: on a CPU, a block stays in the cache from one operation to the next.

Operations on a whole model each read it from memory and write to new memory, about fifteen times a step. In blocks, the
memory is read and written once before a mix and once after it, and nothing but the message is new.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.host import Host
from quasiglobal.engines.recording import COLUMNS, Instruction, Mixing, Recording, record
from quasiglobal.stacked.pieces import ModelRows, Views, read, write
from quasiglobal.stacked.precision import full_precision

BLOCK = 2**18
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
        self.programs: dict[Hashable, _Program] = {}
        """Recordings of the algorithm's kinds of steps, and the programs made from them."""

    def step(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, t: int, lr: Tensor,
        weight_decay: float | Tensor = 0.0, keeps_state: bool = False, copy: Tensor | None = None, **further: Any,
    ) -> bool:
        """Run a step as `Host.step_in_place` does, if it can be computed in blocks; return whether it was.

        `copy` gets the shared columns of the new x too.
        """
        few, (k, d) = x.pieces[0], x.shape
        blocks = blocks_of(k, [piece.shape[1] for piece in x.pieces], self.engine.shared)
        shared = self.engine.columns(d)
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
            self.programs.clear()
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
        if not blocks:
            return
        wanted = tuple((number, argument) for number, _, argument in targets)
        kind = id(recording), frozenset(known), wanted
        if kind not in self.programs:
            self.programs[kind] = _Program(recording, known, wanted)
        with full_precision("cpu"):
            self.programs[kind].run(known, [place for _, place, _ in targets], blocks, mixed)


class _Program:
    """The lines of a recording that some targets need, in the order in which each block runs them.

    A target is the number of a value, and of the argument that its place has, if any.
    """

    def __init__(
        self, recording: Recording, known: Collection[int], targets: Sequence[tuple[int, int | None]]
    ) -> None:
        numbers = [number for number, _ in targets]
        lines = recording.part(numbers, known)
        reads = [{at for at in line.reads if at is not None} for line in lines]
        self.loads = [at for at in set(numbers).union(*reads) if at in known]
        mixes = recording.mixes
        computed = {line.result: (at, line) for at, line in enumerate(lines) if isinstance(line, Instruction)}
        aliased = {at for mix in mixes for at in mix.reads}
        self.direct: dict[int, int] = {}
        """Targets that a line writes itself, by number: nothing needs afterwards what it overwrites."""
        for k, (number, argument) in enumerate(targets):
            if number in computed and numbers.count(number) == 1:
                later = aliased.union(numbers, *reads[computed[number][0] + 1 :])
                if argument is None or argument not in later:
                    self.direct[number] = k
        self.copied = [(number, k) for k, number in enumerate(numbers) if number not in self.direct]
        last = {at: k for k, ats in enumerate(reads) for at in ats}
        spent = {at for at, (_, line) in computed.items() if line.wide} - aliased - self.direct.keys()
        self.lines: list[tuple[Instruction | Mixing, int, int | None, list[int]]] = []
        """A line, the position of a mix, the operand whose memory the result takes, since nothing else needs it, and
        the values that nothing needs any more."""
        for k, line in enumerate(lines):
            drops = [at for at in reads[k] if last[at] == k and at not in numbers]
            if isinstance(line, Mixing):
                self.lines.append((line, mixes.index(line), None, drops))
            else:
                reused = next((at for at in drops if at in spent), None) if line.wide else None
                self.lines.append((line, -1, reused, drops))

    def run(
        self, known: Mapping[int, ByColumns], places: Sequence[ModelRows], blocks: Sequence[slice],
        mixed: Sequence[Mixed],
    ) -> None:
        """Run the lines on each block; values that nothing needs any more leave the cache to others."""
        everywhere, loads = dict[int, Tensor](), list[tuple[int, list[Views]]]()
        for at in self.loads:
            value = known[at]
            if isinstance(value, Tensor):
                everywhere[at] = value
            else:
                loads.append((at, value.cut(blocks)))
        cut = [place.cut(blocks) for place in places]
        direct = {at: cut[k] for at, k in self.direct.items()}
        copied = [(at, cut[k]) for at, k in self.copied]
        for block, columns in enumerate(blocks):
            values = everywhere | {at: read(parts[block]) for at, parts in loads}
            held = {value.data_ptr() for value in values.values()} if len(copied) > 1 else set()
            for line, mix, reused, drops in self.lines:
                if isinstance(line, Mixing):
                    results = mixed[mix](tuple([values[at] for at in line.reads]), columns)
                    values |= zip(line.results, results, strict=True)
                elif line.result in direct:
                    part = direct[line.result][block]
                    line.run(values, part if isinstance(part, Tensor) else None)
                    write(part, values[line.result])
                else:
                    line.run(values, None if reused is None else values[reused])
                for at in drops:
                    del values[at]
            ready = {at: values[at].clone() if values[at].data_ptr() in held else values[at] for at, _ in copied}
            for at, parts in copied:
                write(parts[block], ready[at])


def blocks_of(rows: int, widths: Sequence[int], shared: int | None) -> list[slice]:
    """Return the blocks of the columns of pieces side by side; none has both shared columns and others.

    A piece that is larger than a block has blocks of its own: parts of two pieces would have to be copied together.

    >>> blocks_of(2, [100], shared=40)
    [slice(0, 40, None), slice(40, 100, None)]
    """
    size = max(1, BLOCK * torch.get_num_threads() // rows)
    ends, begin, end = {sum(widths)}, 0, 0                  # of the block to which pieces are still added
    for width in widths:
        if end + width - begin > size:
            parts = math.ceil(width / size)
            ends |= {end, end + width} if parts > 1 else {end}
            ends.update(end + width * part // parts for part in range(1, parts))
            begin = end + width if parts > 1 else end
        end += width
    ends = {*ends, min(shared or end, end)} - {0}
    return [slice(first, last) for first, last in itertools.pairwise([0, *sorted(ends)])]
