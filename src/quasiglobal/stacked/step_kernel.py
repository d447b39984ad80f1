"""A recorded step as one Triton kernel: update and gossip in one pass over memory, in place.

A program of the kernel has a block of columns of all rows of one run, so that gossip needs no other program: each
tensor is read once and written once. Every operation of the step is a line of the kernel on a tile of columns.

A sum over the columns, as in a norm, needs all programs of a kernel: it is a kernel of its own, before the step's. So
are the new values of arguments without columns, such as counts: all programs of the step read the old ones.

A tensor of messages per edge, [rows, slots, columns], is a tile for each slot.
"""

from __future__ import annotations

import functools
import hashlib
import keyword
import linecache
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, cast

import torch
from torch import Tensor, fx

from quasiglobal.stacked.recording import Untraceable
from quasiglobal.stacked.step import (
    EXCHANGE,
    LINKED,
    MEAN,
    MIX,
    RecordedStep,
    SlotTable,
    Update,
    Wiring,
    mixed,
    recorded_step,
)

aten = torch.ops.aten

log = logging.getLogger("quasiglobal")

WARPS = 2
"""Warps per program; each of their threads has a few columns of all nodes."""

PER_THREAD = 128
"""Numbers that a thread holds of all arguments, in whole columns; at least one column. More would spill registers."""

MOST_BYTES = 128
"""Bytes of a column of all nodes above which a thread's registers do not suffice: 32 nodes in float32."""

MOST_NUMBERS = 192
"""Numbers of a column in all arguments above which a step with messages per edge does not fit a thread's registers."""

MOST_MESSAGES = 512
"""Messages of a gossip above which the kernel, with a line for each, takes long to compile."""


def step_kernel(
    update: Update, arguments: Sequence[Tensor], outputs: Sequence[int], wiring: Wiring, names: Sequence[str],
    what: str = "a step",
) -> StepKernel | None:
    """Return the kernel of a function of tensors that returns the new values of the arguments at `outputs`.

    The first argument is [rows, columns], and the others broadcast to it; `names` are theirs in the source. None if the
    function cannot be translated, for example since it needs further gradients; `what` names it in the log.
    """
    x = arguments[0]
    if not available(x) or not _fits(wiring, x) or not all(arguments[at].is_contiguous() for at in outputs):
        return None
    try:
        step = recorded_step(update, arguments, outputs)
        sources = write(step, x, wiring, names)
        if any(one.tiles > max(len(one.arguments), MOST_NUMBERS // wiring.nodes) for one in sources):
            raise Untraceable("the messages of all edges are too many for a thread")
    except Exception as error:                              # a step may do anything; without a kernel it still works
        log.debug(f"no kernel for {what}: {error!r}")
        return None
    try:
        kernel = StepKernel(sources, wiring, x)
        kernel.compile(*arguments)
    except Exception as error:
        log.warning(f"Triton cannot compile {what}; it runs without, slower: {str(error)[:160]}")
        return None
    return kernel


def available(x: Tensor) -> bool:
    """Whether Triton can run on the device of x."""
    return x.is_cuda and find_spec("triton") is not None


class StepKernel:
    """A translated step: the kernels of its sums over columns and of values without columns, and the step's."""

    def __init__(self, sources: Sequence[StepSource], wiring: Wiring, x: Tensor) -> None:
        self.passes = [Pass(source, wiring, x) for source in sources]
        self.any_rows = all(one.any_rows for one in self.passes)
        """Whether the kernels can also run with another number of runs."""

    def __call__(self, *arguments: Tensor) -> None:
        for old, new in self._run(arguments):
            old.copy_(new)

    def compile(self, *arguments: Tensor) -> None:
        """Compile without a launch."""
        self._run(arguments, compiles=True)

    def _run(self, arguments: Sequence[Tensor], compiles: bool = False) -> list[tuple[Tensor, Tensor]]:
        """Run all kernels; return the arguments without columns, and their new values."""
        sums: list[Tensor] = []
        changes: list[tuple[Tensor, Tensor]] = []
        for one in self.passes:
            made = one.run(arguments, sums, compiles)
            if one.source.narrow:
                changes += zip((arguments[at] for at in one.source.narrow), made, strict=True)
            else:
                sums += made
        return changes


class Pass:
    """The launch of one kernel, with the weights of a step."""

    def __init__(self, source: StepSource, wiring: Wiring, x: Tensor) -> None:
        self.source, n, d = source, wiring.nodes, x.shape[1]
        padded, size = 1 << (n - 1).bit_length(), x.element_size()
        columns = PER_THREAD // (padded * source.tiles)
        columns = max(1, min(1 << max(0, columns.bit_length() - 1), 16 // size))    # at most 16 bytes in one load
        block = 1 if source.narrow else 32 * WARPS * columns
        self.constants = [value.to(x.device) for value in source.constants]
        self.weights = [cast(Tensor, wiring.weights)] * source.mixes
        self.sizes = (n, padded, d, wiring.columns(d), block, min(block, columns))
        self.blocks = 1 if source.narrow else -(-d // block)
        here = bool(source.constants) or wiring.drawn
        self.any_rows = len(x) > 1 and not here and source.finish is None
        """Whether the kernel can also run with another number of runs, and other weights of the same rows.

        In one row, a scalar looks like a column. Drawn weights are in the storage of this wiring.
        """
        self.function = _jitted(source.text)

    def run(self, arguments: Sequence[Tensor], sums: Sequence[Tensor], compiles: bool = False) -> list[Tensor]:
        """Launch, or only compile; return the sums over the columns [rows, 1], or the values without columns.

        Products and sums are rounded one by one: rows that agree stay equal, bit for bit.
        """
        values = [arguments[at].contiguous() for at in self.source.arguments]
        finish, rows = self.source.finish, len(arguments[0])
        grid = self.blocks, rows // self.sizes[0]
        made = [arguments[0].new_empty(self.blocks, rows)] if finish else []
        made += [torch.empty_like(arguments[at]) for at in self.source.narrow]
        values += [*self.constants, *(sums[k] for k in self.source.sums), *made, *self.weights]
        launch = functools.partial(self.function.warmup, grid=grid) if compiles else self.function[grid]
        with torch.cuda.device_of(values[0]):  # type: ignore[no-untyped-call]
            launch(*values, *self.sizes, num_warps=WARPS, enable_fp_fusion=False)
        return [finish(made[0].sum(dim=0))[:, None]] if finish else made


def _fits(wiring: Wiring, x: Tensor) -> bool:
    """Whether a thread can hold all rows of a run in a column."""
    small = wiring.nodes * x.element_size() <= MOST_BYTES and sum(map(len, wiring.senders)) <= MOST_MESSAGES
    return x.dtype in (torch.float32, torch.float64) and small


@functools.cache
def _jitted(text: str) -> Any:
    """The kernel of a source text, which Triton reads through `linecache`, as a debugger does."""
    import triton
    import triton.language as tl

    from quasiglobal.stacked.kernels import tile

    name = f"<step {hashlib.sha256(text.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    space = {"__name__": __name__, "triton": triton, "tl": tl, "tile": tile}
    exec(compile(text, name, "exec"), space)
    return space["step"]


# ------------------------------------------------------------------------------------------------------------ source

@dataclass
class StepSource:
    """The kernel's source, and the order of its arguments."""

    text: str
    arguments: list[int]
    """Positions of the step's arguments that the kernel reads or writes."""
    constants: list[Tensor]
    """Further tensors that the kernel reads."""
    sums: list[int]
    """Indices of the earlier kernels whose sums the kernel reads, after the constants."""
    mixes: int
    """Number of gossips; the weights [n, n] are the last arguments, once for each.

    With one argument for all, the compiler would keep the weights in registers from one gossip to the next.
    """
    tiles: int
    """Number of arguments, each slot of messages per edge counted."""
    finish: Callable[[Tensor], Tensor] | None = None
    """Function of the sums over the columns; None for other kernels."""
    narrow: list[int] = field(default_factory=list)
    """Positions of the arguments without columns whose new values this kernel computes."""


def write(step: RecordedStep, x: Tensor, wiring: Wiring, names: Sequence[str]) -> list[StepSource]:
    """Translate a recorded step to the sources of its kernels.

    The last source is the step. Before it are its sums over columns, in order, and the new values of arguments without
    columns: each kernel computes again what it needs, which takes less time than to store and read it.

    Raise `Untraceable` for a step with other operations than `OPERATIONS`, or on tensors of other shapes and types.
    """
    nodes, inputs, changed = step.nodes, step.arguments, step.changed
    if not changed:
        raise Untraceable("the step changes nothing")
    narrow = {at: result for at, result in changed.items() if inputs[at].meta["val"].shape[-1] < x.shape[1]}
    wide = {at: result for at, result in changed.items() if at not in narrow}
    sums = [node for node in nodes if node.target in SUMS and node.all_input_nodes[0].meta["val"].ndim == 2]

    def source(total: fx.Node | None = None, stored: Outputs = NOTHING, made: Outputs = NOTHING) -> StepSource:
        """The kernel of one sum, of the step, or of new values that are not stored over the old ones."""
        kernel = _Kernel((len(x), x.shape[1]), x.dtype, wiring)
        needed = {*(total.all_input_nodes if total else ()), *stored.values(), *made.values()}
        for node in reversed(nodes):
            if node in needed and node not in sums and node.target is not LINKED:
                needed.update(_read_by(node))
        pointers = {at: kernel.parameter(names[at]) for at, node in enumerate(inputs) if node in needed or at in stored}
        for at, name in pointers.items():
            if inputs[at] in needed:
                kernel.load(inputs[at], name, inputs[at].meta["val"])
        own = [node for node in nodes if node in needed and node not in sums]
        for node in own:
            if node.op == "get_attr":
                kernel.constant(node, step.program.get_buffer(str(node.target)))
        read = [k for k, node in enumerate(sums) if node in needed]
        for k in read:
            kernel.load(sums[k], kernel.parameter("total"), sums[k].meta["val"])
        for node in own:
            if node.op == "call_function":
                kernel.operation(node)
        if total:
            kernel.sum(total)
        for at, result in stored.items():
            kernel.store(result, pointers[at], inputs[at].meta["val"])
        for at, result in made.items():
            kernel.store(result, kernel.parameter(f"new_{names[at]}"), inputs[at].meta["val"])
        tiles = sum(slots_of(inputs[at].meta["val"]) for at in pointers) or 1
        return StepSource(kernel.text(), [*pointers], kernel.constants, read, kernel.mixes, tiles)

    found = [replace(source(total=one), finish=SUMS[one.target][1]) for one in sums]
    found += [replace(source(made=narrow), narrow=[*narrow])] if narrow else []
    return [*found, source(stored=wide)] if wide else found


def _read_by(node: fx.Node) -> list[fx.Node]:
    """The values that an operation reads; of several that are mixed together, a result reads its own."""
    source = mixed(node)
    return node.all_input_nodes if source is None else [source]


Outputs = Mapping[int, fx.Node]
NOTHING: Outputs = {}


def slots_of(value: Tensor) -> int:
    """Number of slots of messages per edge; 1 for a tensor of models."""
    return value.shape[1] if value.ndim == 3 else 1


RESERVED: set[str] = {"tl", "tile", "triton", "step", "mix", "node", "column", "row", "at", "here", "weights", "dtype"}

PLACES = {
    (True, True): (" + at", "here"),
    (True, False): (" + row", "node < NODES"),
    (False, True): (" + column", "column < D"),
    (False, False): ("", ""),
}
"""Offset and mask of a tensor that varies by row, by column."""

SLOTS = {
    (True, True): (" + (row * {slots} + {slot}) * D + column", "here"),
    (True, False): (" + row * {slots} + {slot}", "node < NODES"),
}
"""The same for a slot of messages per edge."""

HEAD = """\
@triton.jit
def step(
    {pointers},
    NODES: tl.constexpr, N: tl.constexpr, D: tl.constexpr, SHARED: tl.constexpr,
    BLOCK: tl.constexpr, VECTOR: tl.constexpr,
):
    node = tl.arange(0, N)[None, :]
    column = tl.program_id(0) * BLOCK + tl.max_contiguous(tl.arange(0, BLOCK), VECTOR)[:, None]
    row = (tl.program_id(1) * NODES + node).to(tl.int64)
    at, here = row * D + column, (node < NODES) & (column < D)
    dtype = {first}.dtype.element_ty
"""
"""A program has NODES rows, padded to N, and BLOCK columns. A thread loads VECTOR columns at once."""


@dataclass
class _Kernel:
    """The lines of a kernel, and the names of each traced value: one, or one for each slot."""

    shape: tuple[int, int]
    dtype: torch.dtype
    wiring: Wiring
    names: dict[fx.Node, list[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(RESERVED))
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    exchanges: set[int] = field(default_factory=set)
    mixes: int = 0

    @property
    def keeps_columns(self) -> bool:
        """Whether some columns are not exchanged."""
        return self.wiring.columns(self.shape[1]) < self.shape[1]

    @property
    def links(self) -> SlotTable:
        """The slots of messages per edge."""
        if self.wiring.links is None:
            raise Untraceable("there are no messages per edge")
        return self.wiring.links()

    def name(self, wanted: str) -> str:
        """A new name like this one."""
        name = re.sub(r"\W", "_", wanted, flags=re.ASCII)
        name = f"_{name}" if name[:1].isdigit() or keyword.iskeyword(name) else name
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name

    def parameter(self, wanted: str) -> str:
        """The name of a further argument of the kernel."""
        self.parameters.append(self.name(wanted))
        return self.parameters[-1]

    def load(self, node: fx.Node, name: str, value: Tensor) -> None:
        """Load the part of a tensor that this program needs; the tensor broadcasts to x, or has slots."""
        if value.dtype != self.dtype:
            raise Untraceable(f"{name} is {value.dtype}, x is {self.dtype}")
        for slot, (offset, inside) in enumerate(self._places(value)):
            masked = f", mask={inside}, other=1.0" if inside else ""        # 1: the padding divides by no zero
            own = name if value.ndim < 3 else self.name(f"{name}_{slot}")
            self._add(node, own, f"tl.load({name}_at{offset}{masked})")

    def constant(self, node: fx.Node, value: Tensor) -> None:
        """Load a tensor that belongs to the algorithm or the weight decay."""
        node.meta["val"] = value
        self.load(node, self.parameter("constant"), value)
        self.constants.append(value)

    def operation(self, node: fx.Node) -> None:
        """Add the line of an operation; for messages per edge, a line for each slot."""
        value, target, sources = node.meta["val"], node.target, _read_by(node)
        arguments: tuple[object, ...] = node.args
        if mixed(node) is not None:
            target, arguments = MIX, tuple(sources)
        if target in PER_EDGE and (value.ndim == 3 or sources[0].meta["val"].ndim == 3):
            PER_EDGE[target](self, node)
            return
        if target not in OPERATIONS or not isinstance(value, Tensor):
            raise Untraceable(f"{target} has no translation")
        if target not in LOGICAL and any(one.meta["val"].dtype == torch.bool for one in sources):
            raise Untraceable(f"{target} of truth values has no translation")
        self._varies(value)
        for slot in range(slots_of(value)):
            terms = [self._term(one, value, slot) for one in arguments]
            numbers = {key: one for key, one in node.kwargs.items() if type(one) in (int, float)}
            options = {key: self._term(one, value, slot) for key, one in numbers.items()}
            if target is MIX:
                terms.append(f"weights_{self.mixes}")
                self.mixes += 1
            text = OPERATIONS[target](*terms, **options)
            if target in (MIX, MEAN):
                self._check_rows(value)
                text = f"tl.where(column < SHARED, {text}, {terms[0]})" if self.keeps_columns else text
            self._add(node, self.name(f"{_short(target)}_{len(self.lines)}"), text)

    def store(self, node: fx.Node, name: str, like: Tensor) -> None:
        """Store a result as the new value of an argument of the same shape, which no other program reads."""
        value = node.meta["val"]
        if value.shape != like.shape or {value.dtype, like.dtype} != {self.dtype} or not self._varies(like)[0]:
            raise Untraceable(f"a {value.dtype} tensor {list(value.shape)} is not like {name}")
        for (offset, inside), term in zip(self._places(like), self.names[node], strict=True):
            self.stores.append(f"tl.store({name}_at{offset}, {term}, mask={inside})")

    def sum(self, node: fx.Node) -> None:
        """Store the sums over this program's columns, [programs, rows]; a later kernel reads the result of all."""
        values, value = node.all_input_nodes[0], node.meta["val"]
        self._check_rows(values.meta["val"])
        if tuple(value.shape) != (self.shape[0], 1) or value.dtype != self.dtype:
            raise Untraceable(f"{node.target} with the result {list(value.shape)} has no translation")
        term = SUMS[node.target][0](*self.names[values], *node.args[1:])
        place = f"{self.parameter('partial')}_at + tl.program_id(0).to(tl.int64) * {self.shape[0]} + row"
        total = f"tl.sum(tl.where(here, {term}, 0.0), axis=0, keep_dims=True)"
        self.stores.append(f"tl.store({place}, {total}, mask=node < NODES)")

    def unsqueeze(self, node: fx.Node) -> None:
        """One slot for all: a model is broadcast to the slots."""
        if node.args[1] not in (1, -2):
            raise Untraceable(f"{node.target} at {node.args[1]} has no translation")
        self.names[node] = self.names[node.all_input_nodes[0]]

    def over_slots(self, node: fx.Node) -> None:
        """Add the slots, or find whether any is true; truth values count as 0 and 1."""
        values, dims = node.all_input_nodes[0], node.args[1]
        if dims not in (1, [1], -2, [-2]):
            raise Untraceable(f"{node.target} over {dims} of messages has no translation")
        terms, logical = self.names[values], values.meta["val"].dtype == torch.bool
        if node.target is aten.any.dim:
            text = " | ".join(terms)
        else:
            text = " + ".join(f"tl.where({term}, 1.0, 0.0).to(dtype)" if logical else term for term in terms)
        self._add(node, self.name(f"{_short(node.target)}_{len(self.lines)}"), text)

    def exchange(self, node: fx.Node) -> None:
        """Move messages from their senders' slots to their receivers'."""
        value, t = node.meta["val"], cast(int, node.args[1])
        self._varies(value)
        new = [self.name(f"came_{len(self.lines)}_{slot}") for slot in range(value.shape[1])]
        self.lines.append(f"{', '.join(new)} = exchange_{t}({', '.join(self.names[node.all_input_nodes[0]])}, node)")
        self.exchanges.add(t)
        for name in new:
            kept = value.shape[2] == 1 or not self.keeps_columns
            self._add(node, name, name if kept else f"tl.where(column < SHARED, {name}, 0.0)")

    def linked(self, node: fx.Node) -> None:
        """The masks of slots with a link."""
        slots, columns, t = cast(tuple[int, int, int], node.args[1:])
        links = self.links
        mask = links.active(t) if t > 0 else links.has_receiver if t else links.has_sender
        for slot in range(slots):
            nodes = sum(1 << int(i) for i in mask[:, slot].nonzero()[0])
            text = f"tile.among({nodes}, node)" + (" & (column < SHARED)" if columns > 1 else "")
            self._add(node, self.name(f"linked_{len(self.lines)}"), text)

    def text(self) -> str:
        """The whole source; the barrier makes every thread read before any thread writes."""
        pointers = [*(f"{name}_at" for name in self.parameters), *(f"weights_{k}" for k in range(self.mixes))]
        head = HEAD.format(pointers=", ".join(pointers), first=pointers[0])
        body = "".join(f"    {line}\n" for line in [*self.lines, "tl.debug_barrier()", *self.stores])
        moves = "".join(_exchange(self.links, t) for t in sorted(self.exchanges))
        return (_mix(self.wiring.senders) if self.mixes else "") + moves + head + body

    def _add(self, node: fx.Node, name: str, text: str) -> None:
        """Add the line of a value, or of its next slot."""
        self.names.setdefault(node, []).append(name)
        if name != text:
            self.lines.append(f"{name} = {text}")

    def _term(self, value: object, result: Tensor, slot: int) -> object:
        """An operand as text, or a number, for one slot of the result."""
        if isinstance(value, fx.Node):
            like, names = value.meta["val"], self.names[value]
            if result.ndim == 3 > like.ndim == 2 and like.shape[0] != 1:
                raise Untraceable("models have no slots: they do not broadcast to messages per edge")
            return names[slot if len(names) > 1 else 0]
        if isinstance(value, int | float) and not isinstance(value, bool):
            if not math.isfinite(value):
                raise Untraceable(f"{value} has no translation")
            return float(value)
        return value

    def _varies(self, value: Tensor) -> tuple[bool, bool]:
        """Whether a tensor has a value for each row, and for each column."""
        sizes = (1, 1, *value.shape)[-2:] if value.ndim < 3 else (value.shape[0], value.shape[2])
        if value.ndim > 3 or any(size not in (1, whole) for size, whole in zip(sizes, self.shape, strict=True)):
            raise Untraceable(f"a tensor {list(value.shape)} does not broadcast to x")
        if value.dtype not in (self.dtype, torch.bool):
            raise Untraceable(f"a tensor is {value.dtype}, x is {self.dtype}")
        return sizes[0] == self.shape[0], sizes[1] == self.shape[1]

    def _places(self, value: Tensor) -> list[tuple[str, str]]:
        """Offset and mask of each slot of a tensor."""
        varies = self._varies(value)
        if value.ndim < 3:
            return [PLACES[varies]]
        if varies not in SLOTS:
            raise Untraceable(f"a tensor {list(value.shape)} has slots, but no rows")
        offset, inside = SLOTS[varies]
        slots = value.shape[1]
        return [(offset.format(slots=slots, slot=slot), inside) for slot in range(slots)]

    def _check_rows(self, value: Tensor) -> None:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise Untraceable(f"a {value.dtype} tensor {list(value.shape)} is not like x")


PER_EDGE = {
    EXCHANGE: _Kernel.exchange,
    LINKED: _Kernel.linked,
    aten.unsqueeze.default: _Kernel.unsqueeze,
    aten.sum.dim_IntList: _Kernel.over_slots,
    aten.any.dim: _Kernel.over_slots,
}
"""Operations that make, use up or move slots; all others treat each slot alike."""


def _mix(senders: Sequence[Sequence[int]]) -> str:
    """The function mix: v_i + Σ_j w_ij (v_j − v_i) for each node i; the weights [n, n] are loaded."""
    n = len(senders)
    lines = ["@triton.jit", "def mix(v, weights, node):"]
    lines += [f"    v_{i} = tile.of_node(v, node, {i})" for i in range(n)]
    for i, others in enumerate(senders):
        for k, j in enumerate(others):
            weight, apart = f"tl.load(weights + {i * n + j})", f"v_{j} - v_{i}"
            change = f"tl.fma({weight}, {apart}, change)" if k else f"{weight} * ({apart})"
            lines.append(f"    change = {change}")
        if others:
            lines.append(f"    v = tl.where(node == {i}, v_{i} + change, v)")
    return "\n".join([*lines, "    return v"]) + "\n\n\n"


def _exchange(links: SlotTable, t: int) -> str:
    """The function exchange_t: each message of step t, from its slot at the sender to its slot at the receiver."""
    slots, messages = range(links.degree), links.messages(t)
    lines = ["@triton.jit", f"def exchange_{t}({', '.join(f'v_{slot}' for slot in slots)}, node):"]
    lines += [f"    new_{slot} = tl.zeros_like(v_{slot})" for slot in slots]
    for sender, sent, receiver, slot in messages:
        message = f"tile.of_node(v_{sent}, node, {sender})"
        lines.append(f"    new_{slot} = tl.where(node == {receiver}, {message}, new_{slot})")
    return "\n".join([*lines, f"    return {', '.join(f'new_{slot}' for slot in slots)}"]) + "\n\n\n"


def _short(target: object) -> str:
    """The name of an operation without its overload, such as add."""
    return str(getattr(target, "__name__", "")).partition(".")[0]


# -------------------------------------------------------------------------------------------------------- operations

Term = str | float
"""An operand: an expression of a tensor, or a number."""

def _add(a: Term, b: Term, alpha: float = 1.0) -> str:
    return f"{a} + {b}" if alpha == 1 else f"{a} + {alpha} * {b}"


def _sub(a: Term, b: Term, alpha: float = 1.0) -> str:
    return f"{a} - {b}" if alpha == 1 else f"{a} - {alpha} * {b}"


def _addcmul(a: Term, b: Term, c: Term, value: float = 1.0) -> str:
    return f"{a} - {b} * {c}" if value == -1 else _add(a, f"{b} * {c}", value)


def _addcdiv(a: Term, b: Term, c: Term, value: float = 1.0) -> str:
    return _add(a, f"tile.divide({b}, {c})", value)


def _lerp(a: Term, b: Term, weight: Term) -> str:
    """Interpolate from the nearer end, as PyTorch does."""
    if isinstance(weight, str):
        return f"tl.where(tl.abs({weight}) < 0.5, {a} + {weight} * ({b} - {a}), {b} - ({b} - {a}) * (1.0 - {weight}))"
    return f"{a} + {weight} * ({b} - {a})" if abs(weight) < 0.5 else f"{b} - ({b} - {a}) * {1 - weight}"


def _power_of_number(base: float, exponent: Term) -> str:
    if base <= 0:
        raise Untraceable(f"a power of {base} has no translation")
    return f"tile.power({math.log(base)}, {exponent})"


def _power(base: Term, exponent: float) -> str:
    if exponent not in (0.5, 2.0, 3.0):
        raise Untraceable(f"the power {exponent} has no translation")
    return f"tile.root({base})" if exponent == 0.5 else " * ".join([str(base)] * int(exponent))


def _clamp(a: Term, low: float | None = None, high: float | None = None) -> str:
    text = str(a) if low is None else f"tile.at_least({a}, {low})"
    return text if high is None else f"tile.at_most({text}, {high})"


def _filled(value: float) -> str:
    return f"tl.full([BLOCK, N], {value}, dtype)"


def _infix(symbol: str) -> Callable[[Term, Term], str]:
    return lambda a, b: f"{a} {symbol} {b}"


def _infix_number(symbol: str) -> Callable[[Term, float], str]:
    return lambda a, b: f"{a} {symbol} tile.number({b}, {a})"


def _call(function: str) -> Callable[..., str]:
    return lambda *terms: f"{function}({', '.join(map(str, terms))})"


def _of_squares(a: Term, order: float = 2, *_: object) -> str:
    if order != 2:
        raise Untraceable(f"a norm of order {order} has no translation")
    return f"{a} * {a}"


SUMS: dict[object, tuple[Callable[..., str], Callable[[Tensor], Tensor]]] = {
    aten.linalg_vector_norm.default: (_of_squares, torch.sqrt),
    aten.sum.dim_IntList: (lambda a, *_: a, torch.clone),
}
"""Sums over the columns: their terms, and a function of each sum."""

LOGICAL = {
    aten.where.self, aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
}
"""Operations that have truth values as operands."""

COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}

OPERATIONS: dict[object, Callable[..., str]] = {
    MIX: lambda v, weights: f"mix({v}, {weights}, node)",
    MEAN: lambda v: f"tile.mean({v}, node, NODES)",
    aten.add.Tensor: _add,
    aten.sub.Tensor: _sub,
    aten.rsub.Scalar: lambda a, b, alpha=1.0: _sub(b, a, alpha),
    aten.mul.Tensor: _infix("*"),
    aten.div.Tensor: _call("tile.divide"),
    aten.neg.default: lambda a: f"-{a}",
    aten.reciprocal.default: lambda a: f"tile.divide({_filled(1.0)}, {a})",
    aten.addcmul.default: _addcmul,
    aten.addcdiv.default: _addcdiv,
    aten.lerp.Scalar: _lerp,
    aten.lerp.Tensor: _lerp,
    aten.sqrt.default: _call("tile.root"),
    aten.rsqrt.default: lambda a: f"tile.divide({_filled(1.0)}, tile.root({a}))",
    aten.pow.Scalar: _power_of_number,
    aten.pow.Tensor_Scalar: _power,
    aten.exp.default: _call("tl.exp"),
    aten.log.default: _call("tl.log"),
    aten.floor.default: _call("tl.floor"),
    aten.abs.default: _call("tl.abs"),
    aten.sign.default: _call("tile.sign"),
    aten.relu.default: lambda a: _clamp(a, 0.0),
    aten.clamp.default: _clamp,
    aten.clamp_min.default: _clamp,
    aten.clamp_max.default: lambda a, high: _clamp(a, None, high),
    aten.maximum.default: lambda a, b: f"tl.maximum({a}, {b}, tl.PropagateNan.ALL)",
    aten.minimum.default: lambda a, b: f"tl.minimum({a}, {b}, tl.PropagateNan.ALL)",
    aten.zeros_like.default: lambda a: _filled(0.0),
    aten.ones_like.default: lambda a: _filled(1.0),
    aten.full_like.default: lambda a, value: _filled(value),
    aten.expand.default: lambda a, size: f"tl.broadcast_to({a}, [BLOCK, N])",
    aten.scalar_tensor.default: lambda value: f"tl.full([1, 1], {value}, dtype)",
    aten.where.self: _call("tl.where"),
    aten.logical_and.default: _infix("&"),
    aten.logical_or.default: _infix("|"),
    aten.logical_not.default: lambda a: f"~{a}",
    aten.bitwise_and.Tensor: _infix("&"),
    aten.bitwise_or.Tensor: _infix("|"),
    aten.bitwise_not.default: lambda a: f"~{a}",
    **{getattr(aten, name).Tensor: _infix(symbol) for name, symbol in COMPARISONS.items()},
    **{getattr(aten, name).Scalar: _infix_number(symbol) for name, symbol in COMPARISONS.items()},
}
"""The Triton expression of each operation, from its operands: names of tensors, and numbers."""
