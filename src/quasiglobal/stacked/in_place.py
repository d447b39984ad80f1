"""The door of the step compiler: a function of tensors, one row per model, becomes a program that works in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from inspect import signature

import torch
from torch import Tensor

from quasiglobal.stacked.capture import overwrite
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.step import MEAN, MIX, Update, Wiring
from quasiglobal.stacked.step_blocks import BlockStep, ByColumns, ModelRows, blocks_of
from quasiglobal.stacked.step_kernel import available, step_kernel

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
