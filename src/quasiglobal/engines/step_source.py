"""Translation of a traced step to the source of a Triton kernel: a line for each operation on a tile of columns.

A sum over the columns, as in a norm, needs all programs of a kernel: it is a kernel of its own, before the step's. So
are the new values of arguments without columns, such as counts: all programs of the step read the old ones.

A tensor of messages per edge, [rows, slots, columns], is a tile for each slot.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor, fx

from quasiglobal.engines.links import Links
from quasiglobal.engines.step_operations import EXCHANGE, LINKED, LOGICAL, MEAN, MIX, OPERATIONS, SAME, SUMS, aten
from quasiglobal.stacked.recording import Untraceable


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


def write(
    program: fx.GraphModule, names: Sequence[str], outputs: Sequence[int], x: Tensor, shared: int,
    senders: Sequence[Sequence[int]], links: Callable[[], Links],
) -> list[StepSource]:
    """Translate a traced step of the arguments `names` that returns the new values of the arguments at `outputs`.

    The last source is the step. Before it are its sums over columns, in order, and the new values of arguments without
    columns: each kernel computes again what it needs, which takes less time than to store and read it.

    x is the tensor of all rows; its first `shared` columns are mixed. Node i receives from the nodes `senders[i]`;
    `links` has the slots of messages per edge.
    Raise `Untraceable` for a step with other operations than `OPERATIONS`, or on tensors of other shapes and types.
    """
    program.graph.eliminate_dead_code()
    nodes = list(program.graph.nodes)
    inputs, results = [node for node in nodes if node.op == "placeholder"], nodes[-1].args[0]
    changed = {at: result for at, result in zip(outputs, results, strict=True) if result is not inputs[at]}
    if not changed:
        raise Untraceable("the step changes nothing")
    narrow = {at: result for at, result in changed.items() if inputs[at].meta["val"].shape[-1] < x.shape[1]}
    wide = {at: result for at, result in changed.items() if at not in narrow}
    sums = [node for node in nodes if node.target in SUMS and node.all_input_nodes[0].meta["val"].ndim == 2]

    def source(total: fx.Node | None = None, stored: Outputs = NOTHING, made: Outputs = NOTHING) -> StepSource:
        """The kernel of one sum, of the step, or of new values that are not stored over the old ones."""
        kernel = _Kernel((len(x), x.shape[1]), x.dtype, shared, links)
        needed = {*(total.all_input_nodes if total else ()), *stored.values(), *made.values()}
        for node in reversed(nodes):
            reads = () if node in sums or node.target is LINKED else node.all_input_nodes
            needed.update(reads if node in needed else ())
        pointers = {at: kernel.parameter(names[at]) for at, node in enumerate(inputs) if node in needed or at in stored}
        for at, name in pointers.items():
            if inputs[at] in needed:
                kernel.load(inputs[at], name, inputs[at].meta["val"])
        own = [node for node in nodes if node in needed and node not in sums]
        for node in own:
            if node.op == "get_attr":
                kernel.constant(node, getattr(program, node.target))
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
        return StepSource(kernel.text(senders), [*pointers], kernel.constants, read, kernel.mixes, tiles)

    found = [replace(source(total=one), finish=SUMS[one.target][1]) for one in sums]
    found += [replace(source(made=narrow), narrow=[*narrow])] if narrow else []
    return [*found, source(stored=wide)] if wide else found


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
    shared: int
    links: Callable[[], Links]
    names: dict[fx.Node, list[str]] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(RESERVED))
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
    exchanges: set[int] = field(default_factory=set)
    mixes: int = 0

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
        value, target, sources = node.meta["val"], node.target, node.all_input_nodes
        if target in SAME and value.shape == sources[0].meta["val"].shape:
            self.names[node] = self.names[sources[0]]
            return
        if target in PER_EDGE and (value.ndim == 3 or sources[0].meta["val"].ndim == 3):
            PER_EDGE[target](self, node)
            return
        if target not in OPERATIONS or not isinstance(value, Tensor):
            raise Untraceable(f"{target} has no translation")
        if target not in LOGICAL and any(one.meta["val"].dtype == torch.bool for one in sources):
            raise Untraceable(f"{target} of truth values has no translation")
        self._varies(value)
        for slot in range(slots_of(value)):
            terms = [self._term(one, value, slot) for one in node.args]
            numbers = {key: one for key, one in node.kwargs.items() if type(one) in (int, float)}
            options = {key: self._term(one, value, slot) for key, one in numbers.items()}
            if target is MIX:
                terms.append(f"weights_{self.mixes}")
                self.mixes += 1
            text = OPERATIONS[target](*terms, **options)
            if target in (MIX, MEAN):
                self._check_rows(value)
                text = f"tl.where(column < SHARED, {text}, {terms[0]})" if self.shared < self.shape[1] else text
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
            kept = value.shape[2] == 1 or self.shared == self.shape[1]
            self._add(node, name, name if kept else f"tl.where(column < SHARED, {name}, 0.0)")

    def linked(self, node: fx.Node) -> None:
        """The masks of slots with a link."""
        slots, columns, t = cast(tuple[int, int, int], node.args[1:])
        links = self.links()
        mask = links.active(t) if t > 0 else links.has_receiver if t else links.has_sender
        for slot in range(slots):
            nodes = sum(1 << int(i) for i in mask[:, slot].nonzero()[0])
            text = f"tile.among({nodes}, node)" + (" & (column < SHARED)" if columns > 1 else "")
            self._add(node, self.name(f"linked_{len(self.lines)}"), text)

    def text(self, senders: Sequence[Sequence[int]]) -> str:
        """The whole source; the barrier makes every thread read before any thread writes."""
        pointers = [*(f"{name}_at" for name in self.parameters), *(f"weights_{k}" for k in range(self.mixes))]
        head = HEAD.format(pointers=", ".join(pointers), first=pointers[0])
        body = "".join(f"    {line}\n" for line in [*self.lines, "tl.debug_barrier()", *self.stores])
        moves = "".join(_exchange(self.links(), t) for t in sorted(self.exchanges))
        return (_mix(senders) if self.mixes else "") + moves + head + body

    def _add(self, node: fx.Node, name: str, text: str) -> None:
        """Add the line of a value, or of its next slot."""
        self.names.setdefault(node, []).append(name)
        if name != text:
            self.lines.append(f"{name} = {text}")

    def _term(self, value: Any, result: Tensor, slot: int) -> Any:
        """An operand as text, or a number, for one slot of the result."""
        if isinstance(value, fx.Node):
            like, names = value.meta["val"], self.names[value]
            if result.ndim == 3 > like.ndim == 2 and like.shape[0] != 1:
                raise Untraceable("models have no slots: they do not broadcast to messages per edge")
            return names[slot if len(names) > 1 else 0]
        if type(value) in (int, float):
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


def _exchange(links: Links, t: int) -> str:
    """The function exchange_t: each message of step t, from its slot at the sender to its slot at the receiver."""
    slots, messages = range(links.degree), links.messages(t)
    lines = ["@triton.jit", f"def exchange_{t}({', '.join(f'v_{slot}' for slot in slots)}, node):"]
    lines += [f"    new_{slot} = tl.zeros_like(v_{slot})" for slot in slots]
    for sender, sent, receiver, slot in messages:
        message = f"tile.of_node(v_{sent}, node, {sender})"
        lines.append(f"    new_{slot} = tl.where(node == {receiver}, {message}, new_{slot})")
    return "\n".join([*lines, f"    return {', '.join(f'new_{slot}' for slot in slots)}"]) + "\n\n\n"


def _short(target: Any) -> str:
    """The name of an operation without its overload, such as add."""
    name: str = target.__name__
    return name.partition(".")[0]
