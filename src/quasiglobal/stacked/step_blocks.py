"""Steps in place: the door of the step compiler (`compiled`), and recorded steps in blocks of columns.

On a CPU, a block of columns stays in the cache from one operation to the next. Operations on whole tensors each read
them from memory and write to new memory, about fifteen times per step. In blocks, the memory is read and written once
before a mix and once after it, and nothing but the message is new.

The rows may be in pieces that others own, such as a network's parameters (`ModelRows`).
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache, partial
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, fx

from quasiglobal.stacked.capture import overwrite
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.recording import Untraceable
from quasiglobal.stacked.step import MEAN, MIX, RecordedStep, Update, Wiring, mixed, recorded_step, shape_of, sources
from quasiglobal.stacked.step_kernel import OPERATIONS, available, step_kernel

if TYPE_CHECKING:
    from torch._ops import OpOverload

AmongRows = Callable[[Tensor], Tensor]
"""An operation among the rows of a tensor [k, d]."""


def compiled(
    update: Update, like: Sequence[Tensor], operations: Mapping[str, Tensor | None] | None = None
) -> Callable[..., None]:
    """Compile a pure function of tensors to a program that overwrites them with the results, one for each of them.

    The tensors are [k, d], a row per model, or broadcast to that; `like` are some of the same shapes. One that is
    returned as it came does not change. `operations` are further arguments of the function, by name: {"mix": W} gives
    it a function that averages the rows of a tensor by the matrix W, {"mean": None} one that puts their mean into each.

    On a GPU the program is one kernel, on a CPU it runs in blocks of columns. A function that cannot be translated, or
    tensors that are one block, are computed as they are.

    >>> def update(x, g, m, mix):
    ...     m = 0.5 * m + g
    ...     return mix(x - 0.5 * m), g, m
    >>> x, g, m = torch.tensor([[1.0], [3.0]]), torch.ones(2, 1), torch.zeros(2, 1)
    >>> step = compiled(update, like=(x, g, m), operations={"mix": torch.full((2, 2), 0.5)})
    >>> step(x, g, m)
    >>> x.tolist(), m.tolist()
    ([[1.5], [1.5]], [[1.0], [1.0]])
    """
    operations = operations or {}
    if operations.keys() - {"mix", "mean"}:
        raise ValueError(f"the operations among rows are mix and mean, got {', '.join(operations)}")
    x, outputs, weights = like[0], range(len(like)), operations.get("mix")
    delta = torch.zeros(len(x), len(x)).to(x) if weights is None else weights.to(x) - torch.eye(len(x)).to(x)
    computed: dict[str, AmongRows] = {"mix": partial(_mixed, delta), "mean": _mean}
    opaque: dict[str, AmongRows] = {"mix": lambda v: MIX([v])[0], "mean": MEAN}
    plain, step = (partial(update, **{name: of[name] for name in operations}) for of in (computed, opaque))

    def as_it_is(*tensors: Tensor) -> None:
        with full_precision(x.device.type):
            overwrite(tensors, plain(*tensors))

    if available(x):
        senders = [[j for j, weight in enumerate(row) if weight and j != i] for i, row in enumerate(delta.tolist())]
        names = [*signature(update).parameters][: len(like)]
        return step_kernel(step, like, outputs, Wiring(len(x), delta, senders), names) or as_it_is
    blocks = blocks_of(len(x), [x.shape[1]], None)
    if len(blocks) == 1 or x.device.type != "cpu":
        return as_it_is
    try:
        in_blocks = BlockStep(step, _by_columns(like), outputs)
    except Exception:                                       # the function may do anything; it still works as it is
        return as_it_is

    def mix(tensors: Sequence[Tensor], columns: slice) -> tuple[Tensor, ...]:
        return tuple(_mixed(delta, v) for v in tensors)

    def by_blocks(*tensors: Tensor) -> None:
        arguments = _by_columns(tensors)
        places = [(at, one) for at, one in enumerate(arguments) if isinstance(one, ModelRows)]
        in_blocks(arguments, places, blocks, x.shape[1], lambda count, fill: mix)

    return by_blocks


def _mixed(delta: Tensor, v: Tensor) -> Tensor:
    """The average by W, from W − I: rows that agree stay equal."""
    return torch.addmm(v, delta, v - v[:1])


def _mean(v: Tensor) -> Tensor:
    return v.mean(dim=0, keepdim=True).expand_as(v)


def _by_columns(tensors: Sequence[Tensor]) -> list[ByColumns]:
    """Tensors with a number for each column, by columns."""
    d = tensors[0].shape[1]
    return [ModelRows([one]) if one.ndim == 2 and one.shape[1] == d else one for one in tensors]


BLOCK = 2**18
"""Numbers of a block for each thread: in fewer, the calls take longer than the operations; more leave the cache."""

COLUMNS = 5
"""Columns of the tensors without numbers with which a step is recorded."""

Mix = Callable[[tuple[Tensor, ...], slice], tuple[Tensor, ...]]
"""Mixes tensors of some columns with the received rows."""

Exchange = Callable[[int, Callable[[Tensor], None]], Mix]
"""Exchanges a message of this many tensors, [tensors, …, columns]; the function computes it."""

Views = Tensor | list[Tensor]
"""Some columns of a tensor in pieces, as a view of a piece, or as views of several."""


class ModelRows:
    """A tensor [k, d] in pieces side by side, such as the parameters of a model: read and written by blocks of columns.

    >>> rows = ModelRows([torch.zeros(1, 2), torch.ones(1, 3)])
    >>> first, second = rows.cut([slice(0, 1), slice(1, 5)])
    >>> write(second, torch.tensor([[5.0, 6.0, 7.0, 8.0]]))
    >>> rows.whole()
    tensor([[0., 5., 6., 7., 8.]])
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = pieces

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of columns."""
        return len(self.pieces[0]), sum(piece.shape[1] for piece in self.pieces)

    def whole(self) -> Tensor:
        """Return all columns: the piece if there is one, else a copy."""
        return read(self.all)

    @property
    def all(self) -> Views:
        """All columns as one part."""
        return self.pieces[0] if len(self.pieces) == 1 else [*self.pieces]

    def cut(self, blocks: Sequence[slice]) -> list[Views]:
        """Return the part of each block; the blocks are in order, without gaps between them."""
        found: list[Views] = []
        ends = blocks[0].start, *(block.stop for block in blocks)
        for k, skipped, block, sizes in _parts(tuple([piece.shape[1] for piece in self.pieces]), ends):
            views = self.pieces[k].narrow(1, skipped, sum(sizes)).split_with_sizes(sizes, dim=1)
            if block < len(found):                          # it continues an earlier piece
                before = found[block]
                found[block] = [*(before if isinstance(before, list) else [before]), views[0]]
                views = views[1:]
            found += views
        return found


@lru_cache(maxsize=16)
def _parts(widths: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int, int, list[int]]]:
    """For each piece that blocks between these ends cut: its number, the columns before the first block, the number of
    the first block, and the widths of its parts."""
    found, begin = [], 0
    for k, width in enumerate(widths):
        low, high = max(begin, ends[0]), min(begin + width, ends[-1])
        if low < high:
            cuts = [low, *(end for end in ends if low < end < high), high]
            sizes = [last - first for first, last in itertools.pairwise(cuts)]
            found.append((k, low - begin, bisect_right(ends, low) - 1, sizes))
        begin += width
    return found


def read(part: Views) -> Tensor:
    """Return all columns of a part: a view, or a copy of several."""
    return part if isinstance(part, Tensor) else torch.cat(part, dim=1)


def write(part: Views, values: Tensor) -> None:
    """Overwrite a part; values that `read` returned as a view are already there."""
    if not isinstance(part, Tensor):
        torch._foreach_copy_(part, torch.split(values, [view.shape[1] for view in part], dim=1))
    elif values.data_ptr() != part.data_ptr():
        part.copy_(values)


ByColumns = ModelRows | Tensor
"""A tensor by columns, or one that is the same for all columns."""

Destination = tuple[fx.Node, ModelRows, fx.Node | None]
"""A value, where to write it, and the argument that is there."""


class BlockStep:
    """A step that treats all columns alike but for its mixes, so that it can be computed for some columns at a time.

    `arguments` are like those of each call. Raise `Untraceable` for another step, as with a norm of each row.
    """

    def __init__(self, update: Update, arguments: Sequence[ByColumns], outputs: Sequence[int]) -> None:
        few = [read(one.cut([slice(0, COLUMNS)])[0]) if isinstance(one, ModelRows) else one for one in arguments]
        self.step = recorded_step(update, [value.to("meta") for value in few], outputs)
        for node in self.step.nodes:
            _check(node, few[0].shape)
        if any(shape_of(value) != few[0].shape for value in self.step.changed.values()):
            raise Untraceable("a result is not like the first argument")
        self._mixes = [node for node in self.step.nodes if node.target is MIX]
        self._programs: dict[object, _Plan] = {}

    def __call__(
        self, arguments: Sequence[ByColumns], places: Sequence[tuple[int, ModelRows]], blocks: Sequence[slice],
        shared: int, exchange: Exchange, writing: AbstractContextManager[object] | None = None,
    ) -> None:
        """Write the new values of arguments, given by position, to places, which may be the arguments themselves.

        The first `shared` columns are mixed; no block has both these and others, and a place may have these alone.
        `writing` is held while the places are written.
        """
        step, mixes, sent = self.step, list[Mix](), dict[fx.Node, ByColumns]()
        known: dict[fx.Node, ByColumns] = dict(zip(step.arguments, arguments, strict=True))
        together = [block for block in blocks if block.start < shared]

        def fill(message: Tensor) -> None:
            values = sources(self._mixes[len(mixes)])
            rows = [(one, ModelRows([part])) for one, part in zip(values, message.flatten(1, -2), strict=True)]
            self._run(known | sent, [(one, row, None) for one, row in rows], mixes, together)
            if message.dtype == step.arguments[0].meta["val"].dtype:        # rounded values are computed again
                sent.update((one, row) for one, row in rows if one not in known)

        for mix in self._mixes:
            mixes.append(exchange(len(sources(mix)), fill))
        there = [step.arguments[at] if place is arguments[at] else None for at, place in places]
        targets = [(step.results[at], place, own) for (at, place), own in zip(places, there, strict=True)]
        targets = [target for target in targets if target[0] is not target[2]]
        with writing or nullcontext():
            self._run(known | sent, targets, mixes, together)
            whole = [target for target in targets if target[1].shape[1] > shared]
            unmixed: list[Mix] = [lambda tensors, columns: tensors] * len(mixes)
            self._run(known, whole, unmixed, [block for block in blocks if block.start >= shared])

    def _run(
        self, known: Mapping[fx.Node, ByColumns], targets: Sequence[Destination], mixes: Sequence[Mix],
        blocks: Sequence[slice],
    ) -> None:
        """Compute the targets block by block."""
        if not blocks:
            return
        wanted = tuple((value, argument) for value, _, argument in targets)
        kind = frozenset(known), wanted
        if kind not in self._programs:
            self._programs[kind] = _Plan(self.step, known, wanted, self._mixes)
        with full_precision("cpu"):
            self._programs[kind].run(known, [place for _, place, _ in targets], blocks, mixes)


def _check(node: fx.Node, shape: torch.Size) -> None:
    """Raise `Untraceable` for an operation by which a column of the result depends on others."""
    if node.op == "placeholder" or mixed(node) is not None:
        return
    if node.target is MIX:
        fits = all(shape_of(one) == shape for one in sources(node))
    else:
        found, operands = (1, 1, *shape_of(node)), (*node.args, *node.kwargs.values())
        broadcasts = all(size in (1, whole) for size, whole in zip(found[-2:], shape, strict=True))
        plain = not any(isinstance(one, list | tuple) for one in operands)
        fits = node.target in OPERATIONS and node.target is not MEAN and broadcasts and len(found) <= 4 and plain
    if not fits:                                            # also a tensor from outside of the step
        raise Untraceable(f"{node.target} with the result {node.meta.get('val')}")


class _Plan:
    """The lines of a step that some targets need, in the order in which each block runs them.

    A target is a value, and the argument that its place has, if any.
    """

    def __init__(
        self, step: RecordedStep, known: Collection[fx.Node], targets: Sequence[tuple[fx.Node, fx.Node | None]],
        mixes: Sequence[fx.Node],
    ) -> None:
        values = [value for value, _ in targets]
        lines = _needed(step, values, known)
        reads = [set(line.all_input_nodes) for line in lines]
        self.loads = [at for at in set(values).union(*reads) if at in known]
        computed = {line: at for at, line in enumerate(lines) if line.target is not MIX}
        aliased = {source for mix in mixes for source in sources(mix)}
        self.direct: dict[fx.Node, int] = {}
        """Targets that a line writes itself, by their positions: nothing needs afterwards what it overwrites."""
        for k, (value, argument) in enumerate(targets):
            if value in computed and values.count(value) == 1:
                later = aliased.union(values, *reads[computed[value] + 1 :])
                if argument is None or argument not in later:
                    self.direct[value] = k
        self.copied = [(value, k) for k, value in enumerate(values) if value not in self.direct]
        last = {at: k for k, ats in enumerate(reads) for at in ats}
        whole = shape_of(step.arguments[0])
        wide = {line for line in computed if shape_of(line) == whole and line.meta["val"].is_floating_point()}
        spent = wide - aliased - self.direct.keys()
        self.lines: list[tuple[_Line, fx.Node | None, list[fx.Node]]] = []
        """A line, the operand whose memory the result takes, since nothing else needs it, and the values that nothing
        needs any more."""
        for k, line in enumerate(lines):
            drops = [at for at in reads[k] if last[at] == k and at not in values]
            reused = next((at for at in drops if at in spent), None) if line in wide else None
            self.lines.append((_Line(line, mixes), reused, drops))

    def run(
        self, known: Mapping[fx.Node, ByColumns], places: Sequence[ModelRows], blocks: Sequence[slice],
        mixes: Sequence[Mix],
    ) -> None:
        """Run the lines on each block; values that nothing needs any more leave the cache to others."""
        everywhere, loads = dict[fx.Node, Tensor](), list[tuple[fx.Node, list[Views]]]()
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
            for line, reused, drops in self.lines:
                if line.mix is not None:
                    line.exchange(values, mixes[line.mix], columns)
                elif line.node in direct:
                    part = direct[line.node][block]
                    line.run(values, part if isinstance(part, Tensor) else None)
                    write(part, values[line.node])
                else:
                    line.run(values, None if reused is None else values[reused])
                for at in drops:
                    del values[at]
            ready = {at: values[at].clone() if values[at].data_ptr() in held else values[at] for at, _ in copied}
            for at, parts in copied:
                write(parts[block], ready[at])


def _needed(step: RecordedStep, targets: Collection[fx.Node], known: Collection[fx.Node]) -> list[fx.Node]:
    """The operations that the targets need, if some values are known."""
    needed, lines = set(targets) - set(known), []
    for node in reversed(step.nodes):
        if node in needed:
            needed.update(set(node.all_input_nodes) - set(known))
            lines += [node] if node.op != "placeholder" and mixed(node) is None else []
    return lines[::-1]


class _Line:
    """One operation on the values of a block: the `mix`-th mix, or one of PyTorch's."""

    def __init__(self, node: fx.Node, mixes: Sequence[fx.Node]) -> None:
        self.node, self.mix = node, mixes.index(node) if node.target is MIX else None
        if self.mix is None:
            self.operation = cast("OpOverload", node.target)
            self.into = _into(self.operation)
            placed = ("device", "layout", "pin_memory")
            self.options = {name: one for name, one in node.kwargs.items() if name not in placed}

    def run(self, values: dict[fx.Node, Tensor], out: Tensor | None) -> None:
        """Compute the result, into `out` if given."""
        given = [values[one] if isinstance(one, fx.Node) else one for one in self.node.args]
        if out is None:
            values[self.node] = self.operation(*given, **self.options)
        elif self.into is not None:
            values[self.node] = self.into(*given, **self.options, out=out)
        else:
            values[self.node] = out.copy_(self.operation(*given, **self.options))

    def exchange(self, values: dict[fx.Node, Tensor], mix: Mix, columns: slice) -> None:
        """Mix the values; some of the results may not be needed."""
        results = mix(tuple([values[one] for one in sources(self.node)]), columns)
        for part in self.node.users:
            values[part] = results[cast(int, part.args[1])]


def _into(operation: OpOverload) -> OpOverload | None:
    """The overload of an operation that writes its result to an argument `out`; None if there is none."""
    own = [(one.name, str(one.type)) for one in operation._schema.arguments]
    packet = operation.overloadpacket
    for name in packet.overloads():
        overload: OpOverload = getattr(packet, name)
        theirs = [(one.name, str(one.type)) for one in overload._schema.arguments]
        if theirs == [*own, ("out", "Tensor")]:
            return overload
    return None


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
