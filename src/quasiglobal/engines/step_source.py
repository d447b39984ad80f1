"""Translation of a traced step to the source of a Triton kernel: a line for each operation on a tile of columns.

A sum over the columns, as in a norm, needs all programs of a kernel: it is a kernel of its own, before the step's.
"""

from __future__ import annotations

import keyword
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from quasiglobal.engines.step_operations import LOGICAL, MEAN, MIX, OPERATIONS, SAME, SUMS
from quasiglobal.gradients.recording import Untraceable


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
    finish: Callable[[Tensor], Tensor] | None
    """Function of the sums over the columns; None for the step's own kernel."""


def write(
    program: fx.GraphModule, names: Sequence[str], outputs: Sequence[int], x: Tensor, shared: int,
    senders: Sequence[Sequence[int]],
) -> list[StepSource]:
    """Translate a traced step of the arguments `names` that returns the new values of the arguments at `outputs`.

    The last source is the step, the others are its sums over columns, in order: each kernel computes again what it
    needs, which takes less time than to store and read it.

    x is the tensor of all rows; its first `shared` columns are mixed. Node i receives from the nodes `senders[i]`.
    Raise `Untraceable` for a step with other operations than `OPERATIONS`, or on tensors of other shapes and types.
    """
    program.graph.eliminate_dead_code()
    nodes = list(program.graph.nodes)
    inputs, results = [node for node in nodes if node.op == "placeholder"], nodes[-1].args[0]
    changed = {at: result for at, result in zip(outputs, results, strict=True) if result is not inputs[at]}
    if not changed:
        raise Untraceable("the step changes nothing")
    sums = [node for node in nodes if node.target in SUMS]

    def source(total: fx.Node | None) -> StepSource:
        """The kernel of one sum, or of the step."""
        kernel = _Kernel((len(x), x.shape[1]), x.dtype, shared)
        stored = {} if total else changed
        needed = {total.all_input_nodes[0]} if total else {*changed.values()}
        for node in reversed(nodes):
            needed.update(node.all_input_nodes if node in needed and node not in sums else ())
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
        finish = SUMS[total.target][1] if total else None
        return StepSource(kernel.text(senders), [*pointers], kernel.constants, read, kernel.mixes, finish)

    return [*map(source, sums), source(None)]


RESERVED: set[str] = {"tl", "tile", "triton", "step", "mix", "node", "column", "row", "at", "here", "weights", "dtype"}

PLACES = {
    (True, True): (" + at", "here"),
    (True, False): (" + row", "node < NODES"),
    (False, True): (" + column", "column < D"),
    (False, False): ("", ""),
}
"""Offset and mask of a tensor that varies by row, by column."""

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
    """The lines of a kernel, and the name of each traced value."""

    shape: tuple[int, int]
    dtype: torch.dtype
    shared: int
    names: dict[fx.Node, str] = field(default_factory=dict)
    taken: set[str] = field(default_factory=lambda: set(RESERVED))
    parameters: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    stores: list[str] = field(default_factory=list)
    constants: list[Tensor] = field(default_factory=list)
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
        """Load the part of a tensor that this program needs; the tensor broadcasts to x."""
        if value.dtype != self.dtype:
            raise Untraceable(f"{name} is {value.dtype}, x is {self.dtype}")
        offset, inside = PLACES[self._varies(value)]
        masked = f", mask={inside}, other=1.0" if inside else ""            # 1: the padding divides by no zero
        self._add(node, name, f"tl.load({name}_at{offset}{masked})")

    def constant(self, node: fx.Node, value: Tensor) -> None:
        """Load a tensor that belongs to the algorithm or the weight decay."""
        node.meta["val"] = value
        self.load(node, self.parameter("constant"), value)
        self.constants.append(value)

    def operation(self, node: fx.Node) -> None:
        """Add the line of an operation."""
        value, target, sources = node.meta["val"], node.target, node.all_input_nodes
        if target in SAME and value.shape == sources[0].meta["val"].shape:
            self.names[node] = self.names[sources[0]]
            return
        if target not in OPERATIONS or not isinstance(value, Tensor):
            raise Untraceable(f"{target} has no translation")
        if target not in LOGICAL and any(one.meta["val"].dtype == torch.bool for one in sources):
            raise Untraceable(f"{target} of truth values has no translation")
        self._varies(value)
        terms = [self._term(one) for one in node.args]
        options = {key: self._term(one) for key, one in node.kwargs.items() if type(one) in (int, float)}
        if target is MIX:
            terms.append(f"weights_{self.mixes}")
            self.mixes += 1
        text = OPERATIONS[target](*terms, **options)
        if target in (MIX, MEAN):
            self._check_rows(value)
            text = f"tl.where(column < SHARED, {text}, {terms[0]})" if self.shared < self.shape[1] else text
        self._add(node, self.name(f"{_short(target)}_{len(self.lines)}"), text)

    def store(self, node: fx.Node, name: str, like: Tensor) -> None:
        """Store a result over an argument of the same shape, which no other program reads."""
        self._check_rows(like)
        self._check_rows(node.meta["val"])
        self.stores.append(f"tl.store({name}_at + at, {self.names[node]}, mask=here)")

    def sum(self, node: fx.Node) -> None:
        """Store the sums over this program's columns, [programs, rows]; a later kernel reads the result of all."""
        values, value = node.all_input_nodes[0], node.meta["val"]
        self._check_rows(values.meta["val"])
        if tuple(value.shape) != (self.shape[0], 1) or value.dtype != self.dtype:
            raise Untraceable(f"{node.target} with the result {list(value.shape)} has no translation")
        term = SUMS[node.target][0](self.names[values], *node.args[1:])
        place = f"{self.parameter('partial')}_at + tl.program_id(0).to(tl.int64) * {self.shape[0]} + row"
        total = f"tl.sum(tl.where(here, {term}, 0.0), axis=0, keep_dims=True)"
        self.stores.append(f"tl.store({place}, {total}, mask=node < NODES)")

    def text(self, senders: Sequence[Sequence[int]]) -> str:
        """The whole source; the barrier makes every thread read before any thread writes."""
        pointers = [*(f"{name}_at" for name in self.parameters), *(f"weights_{k}" for k in range(self.mixes))]
        head = HEAD.format(pointers=", ".join(pointers), first=pointers[0])
        body = "".join(f"    {line}\n" for line in [*self.lines, "tl.debug_barrier()", *self.stores])
        return (_mix(senders) if self.mixes else "") + head + body

    def _add(self, node: fx.Node, name: str, text: str) -> None:
        self.names[node] = name
        self.lines.append(f"{name} = {text}")

    def _term(self, value: Any) -> Any:
        """An operand as text, or a number."""
        if isinstance(value, fx.Node):
            return self.names[value]
        if type(value) in (int, float):
            if not math.isfinite(value):
                raise Untraceable(f"{value} has no translation")
            return float(value)
        return value

    def _varies(self, value: Tensor) -> tuple[bool, bool]:
        """Whether a tensor has a value for each row, and for each column."""
        sizes = (1, 1, *value.shape)[-2:] if value.ndim < 2 else tuple(value.shape)
        if len(sizes) > 2 or any(size not in (1, whole) for size, whole in zip(sizes, self.shape, strict=True)):
            raise Untraceable(f"a tensor {list(value.shape)} does not broadcast to x")
        if value.dtype not in (self.dtype, torch.bool):
            raise Untraceable(f"a tensor is {value.dtype}, x is {self.dtype}")
        return sizes[0] == self.shape[0], sizes[1] == self.shape[1]

    def _check_rows(self, value: Tensor) -> None:
        if tuple(value.shape) != self.shape or value.dtype != self.dtype:
            raise Untraceable(f"a {value.dtype} tensor {list(value.shape)} is not like x")


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


def _short(target: Any) -> str:
    """The name of an operation without its overload, such as add."""
    name: str = target.__name__
    return name.partition(".")[0]
