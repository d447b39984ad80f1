"""A step as a list of operations, recorded once: what runs again for each block of columns.

The step is run on tensors without numbers, and its operations are written down. A step that only mixes, and whose other
operations treat all columns alike, can be computed for some columns at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quasiglobal.algorithms import Algorithm
from quasiglobal.engines.host import Host
from quasiglobal.engines.step_kernel import TracedEngine, step_of_tensors
from quasiglobal.engines.step_operations import OPERATIONS, SAME
from quasiglobal.stacked.recording import Untraceable

log = logging.getLogger("quasiglobal")

COLUMNS = 5
"""Columns of the tensors without numbers."""

Numbered = dict[int, Tensor]
"""Tensors by their number: first the step's arguments, then the results in order."""


@dataclass(frozen=True)
class Instruction:
    """One operation: the number of its result, and its operands, of which tensors are given by number."""

    operation: Callable[..., Tensor]
    into: Callable[..., Tensor] | None
    """The same operation with an argument `out`, if it has one."""
    wide: bool
    """Whether the result has all columns and rows."""
    result: int
    operands: tuple[Any, ...]
    reads: tuple[int | None, ...]
    """The number of each operand that is a tensor."""
    options: dict[str, Any]

    def run(self, values: Numbered, out: Tensor | None = None) -> None:
        """Compute the result from the values, into `out` if given."""
        given = [one if at is None else values[at] for one, at in zip(self.operands, self.reads, strict=True)]
        if out is None:
            values[self.result] = self.operation(*given, **self.options)
        elif self.into is not None:
            values[self.result] = self.into(*given, **self.options, out=out)
        else:
            values[self.result] = out.copy_(self.operation(*given, **self.options))


@dataclass(frozen=True)
class Mixing:
    """A mix of the tensors with these numbers."""

    reads: tuple[int, ...]
    results: tuple[int, ...]


@dataclass
class Recording:
    """The lines of a step, and the numbers of what it returns: the new values of the arguments in `outputs`."""

    lines: list[Instruction | Mixing] = field(default_factory=list)
    outputs: dict[int, int] = field(default_factory=dict)

    @property
    def mixes(self) -> list[Mixing]:
        """The mixes, in order."""
        return [line for line in self.lines if isinstance(line, Mixing)]

    def part(self, targets: Collection[int], known: Collection[int]) -> list[Instruction | Mixing]:
        """Return the lines that the targets need, if some values are known."""
        needed, part = set(targets) - set(known), []
        for line in reversed(self.lines):
            results = line.results if isinstance(line, Mixing) else (line.result,)
            if needed.intersection(results):
                part.append(line)
                needed |= {at for at in line.reads if at is not None} - set(known)
        return part[::-1]


def record(
    algorithm: Algorithm, engine: Host, weight_decay: float | Tensor, t: int, names: Sequence[str],
    arguments: Sequence[Tensor],
) -> Recording | None:
    """Record a step of the kind of t as a function of (x, g, time, lr, *state, and weight_decay if it is a tensor).

    The arguments have `COLUMNS` columns, or one. None if the step cannot be computed for some columns at a time.
    """
    bare = [value.to("meta") for value in arguments]
    recorder = _Recorder(bare)
    host = _RecordingEngine(engine, recorder)
    decay = bare[-1] if isinstance(weight_decay, Tensor) else weight_decay
    step = step_of_tensors(host, algorithm, decay, t, list(names))
    try:
        with recorder:
            results = step(*bare[: 4 + len(names)])
        numbers = [recorder.number(value) for value in results]
    except Exception as error:                              # an algorithm may do anything; its plain step still works
        log.debug(f"a step of {algorithm} is not computed in blocks: {error!r}")
        return None
    if any(value.shape != bare[0].shape for value in results):
        return None
    outputs = [0, *range(4, 4 + len(names))]
    recorder.recording.outputs = {at: number for at, number in zip(outputs, numbers, strict=True) if at != number}
    return recorder.recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Writes operations down; refuses those of which a column of the result depends on other columns."""

    def __init__(self, arguments: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording, self.shape = Recording(), tuple(arguments[0].shape)
        self.seen: dict[int, tuple[int, Tensor]] = {}       # by identity; a tensor that is kept keeps its identity
        self.count = 0
        for value in arguments:
            self.add(value)

    def add(self, value: Tensor, number: int | None = None) -> int:
        """Give a tensor the next number, or the number of one that is equal."""
        at = self.count if number is None else number
        self.seen[id(value)] = at, value
        self.count += number is None
        return at

    def number(self, value: Tensor) -> int:
        """Return the number of a tensor."""
        if id(value) not in self.seen:
            raise Untraceable("a tensor comes from outside of the step")
        return self.seen[id(value)][0]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = func(*args, **options)
        if func in SAME and result.shape == args[0].shape:
            self.add(result, self.number(args[0]))
            return result
        sizes = (1, 1, *result.shape)[-2:]
        fits = result.ndim <= 2 and all(size in (1, whole) for size, whole in zip(sizes, self.shape, strict=True))
        listed = any(isinstance(one, list | tuple) for one in args)
        if func not in OPERATIONS or not fits or listed or any(isinstance(one, Tensor) for one in options.values()):
            raise Untraceable(f"{func} with the result {list(result.shape)}")
        reads = tuple(self.number(one) if isinstance(one, Tensor) else None for one in args)
        operands = tuple(None if isinstance(one, Tensor) else one for one in args)
        likes = {name: one for name, one in options.items() if name not in ("device", "layout", "pin_memory")}
        wide = result.shape == self.shape and result.dtype.is_floating_point
        line = Instruction(func, _into(func), wide, self.add(result), operands, reads, likes)
        self.recording.lines.append(line)
        return result


class _RecordingEngine(TracedEngine):
    """Engine for a recording: a mix is one line."""

    def __init__(self, engine: Host, recorder: _Recorder) -> None:
        super().__init__(engine, mixes=True)
        self.recorder = recorder

    def mix(self, t: int, tensors: tuple[Tensor, ...], time: Tensor | None = None) -> tuple[Tensor, ...]:
        recorder = self.recorder
        if any(v.shape != recorder.shape for v in tensors):
            raise Untraceable("a mix of other tensors than models")
        reads = tuple(recorder.number(v) for v in tensors)
        mixed = tuple(v + 0.0 for v in tensors)             # new tensors, whose lines the mix replaces
        del recorder.recording.lines[-len(tensors) :]
        recorder.recording.lines.append(Mixing(reads, tuple(recorder.number(v) for v in mixed)))
        return mixed

    def mean(self, tensor: Tensor, among: Tensor | None) -> Tensor:
        raise Untraceable("an exact mean is not computed in blocks")


def _into(operation: Any) -> Any:
    """The overload of an operation that writes its result to an argument `out`; None if there is none."""
    own = [(one.name, str(one.type)) for one in operation._schema.arguments]
    packet = operation.overloadpacket
    for name in packet.overloads():
        overload = getattr(packet, name)
        theirs = [(one.name, str(one.type)) for one in overload._schema.arguments]
        if theirs == [*own, ("out", "Tensor")]:
            return overload
    return None
