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

from quasiglobal.gradients.recording import Untraceable, operation

aten = torch.ops.aten


MIX, MEAN = (operation(f"{name}(Tensor v) -> Tensor", torch.empty_like) for name in ("mix", "mean"))
"""Gossip, and the exact mean over a run's nodes, as one operation each of a trace."""


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


def _add(a: Any, b: Any, alpha: float = 1.0) -> str:
    return f"{a} + {b}" if alpha == 1 else f"{a} + {alpha} * {b}"


def _sub(a: Any, b: Any, alpha: float = 1.0) -> str:
    return f"{a} - {b}" if alpha == 1 else f"{a} - {alpha} * {b}"


def _addcmul(a: Any, b: Any, c: Any, value: float = 1.0) -> str:
    return f"{a} - {b} * {c}" if value == -1 else _add(a, f"{b} * {c}", value)


def _addcdiv(a: Any, b: Any, c: Any, value: float = 1.0) -> str:
    return _add(a, f"tile.divide({b}, {c})", value)


def _lerp(a: Any, b: Any, weight: Any) -> str:
    """As PyTorch computes it: from the nearer end."""
    if isinstance(weight, str):
        return f"tl.where(tl.abs({weight}) < 0.5, {a} + {weight} * ({b} - {a}), {b} - ({b} - {a}) * (1.0 - {weight}))"
    return f"{a} + {weight} * ({b} - {a})" if abs(weight) < 0.5 else f"{b} - ({b} - {a}) * {1 - weight}"


def _power_of_number(base: float, exponent: Any) -> str:
    if base <= 0:
        raise Untraceable(f"a power of {base} has no translation")
    return f"tile.power({math.log(base)}, {exponent})"


def _power(base: Any, exponent: float) -> str:
    if exponent not in (0.5, 2.0, 3.0):
        raise Untraceable(f"the power {exponent} has no translation")
    return f"tile.root({base})" if exponent == 0.5 else " * ".join([base] * int(exponent))


def _clamp(a: Any, low: float | None = None, high: float | None = None) -> str:
    text = a if low is None else f"tile.at_least({a}, {low})"
    return text if high is None else f"tile.at_most({text}, {high})"


def _filled(value: float) -> str:
    return f"tl.full([BLOCK, N], {value}, dtype)"


def _infix(symbol: str) -> Callable[[Any, Any], str]:
    return lambda a, b: f"{a} {symbol} {b}"


def _infix_number(symbol: str) -> Callable[[Any, float], str]:
    return lambda a, b: f"{a} {symbol} tile.number({b}, {a})"


def _call(function: str) -> Callable[..., str]:
    return lambda *terms: f"{function}({', '.join(map(str, terms))})"


def _of_squares(a: Any, order: float = 2, *_: Any) -> str:
    if order != 2:
        raise Untraceable(f"a norm of order {order} has no translation")
    return f"{a} * {a}"


SUMS: dict[Any, tuple[Callable[..., str], Callable[[Tensor], Tensor]]] = {
    aten.linalg_vector_norm.default: (_of_squares, torch.sqrt),
    aten.sum.dim_IntList: (lambda a, *_: a, torch.clone),
}
"""Sums over the columns: their terms, and a function of each sum."""

SAME = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default, aten.lift_fresh_copy.default,
    aten.view.default, aten._unsafe_view.default,
}
"""Operations that change nothing, if they keep the shape."""

LOGICAL = {
    aten.where.self, aten.logical_and.default, aten.logical_or.default, aten.logical_not.default,
    aten.bitwise_and.Tensor, aten.bitwise_or.Tensor, aten.bitwise_not.default,
}
"""Operations that have truth values as operands."""

COMPARISONS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<=", "eq": "==", "ne": "!="}

OPERATIONS: dict[Any, Callable[..., str]] = {
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
