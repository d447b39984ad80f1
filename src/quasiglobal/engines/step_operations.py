"""The operations of traced steps, and the Triton expression of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from quasiglobal.stacked.recording import Untraceable, operation

aten = torch.ops.aten

MIX, MEAN = (operation(f"{name}(Tensor v) -> Tensor", torch.empty_like) for name in ("mix", "mean"))
"""Gossip, and the exact mean over a run's nodes, as one operation each of a trace."""

EXCHANGE = operation("exchange(Tensor v, int t) -> Tensor", lambda v, t: torch.empty_like(v))
"""Messages per edge, [rows, slots, columns], along the links of step t; 0 at slots to which nothing comes."""

LINKED = operation(
    "linked(Tensor like, int slots, int columns, int t) -> Tensor",
    lambda like, slots, columns, t: like.new_zeros(len(like), slots, columns, dtype=torch.bool),
)
"""Mask of the slots with a sender at step t; at any step, if t is 0. If t is -1: with a receiver."""


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
