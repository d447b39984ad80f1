"""Pointwise functions inside vmap on a GPU, compiled: a step of a recurrent layer is few kernels instead of many."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quasiglobal.stacked.compiling import by_inductor
from quasiglobal.stacked.recording import is_recording

Results = tuple[Tensor, ...]


def fused(function: Callable[..., Results], *tensors: Tensor | None) -> Results:
    """Call a function that treats the last dimension of its arguments, and computes the others alike.

    On a GPU it is compiled, for the tensors of all models; autograd has to be outside of vmap.
    """
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    if not any(map(is_stacked, tensors)) or not on_gpu or is_recording():
        return function(*tensors)
    results: Results = _OfAll.apply(function, *tensors)  # type: ignore[no-untyped-call]
    return results


def is_stacked(value: Any) -> bool:
    """Whether this is a tensor with a dimension that vmap hides."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def innermost(value: Tensor) -> Tensor:
    """The tensor of all models behind the dimensions that vmap hides."""
    while is_stacked(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


class _OfAll(torch.autograd.Function):
    """The compiled function of the tensors of all models, with autograd outside of vmap."""

    @staticmethod
    def forward(function: Callable[..., Results], *tensors: Tensor | None) -> Results:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], function: Callable[..., Results], *tensors: Tensor | None
    ) -> tuple[Results, tuple[int, ...]]:
        given = list(zip(tensors, in_dims[1:], strict=True))
        each = [
            None if tensor is None else tensor[None] if dim is None else tensor.movedim(dim, 0) for tensor, dim in given
        ]
        most = max(tensor.ndim for tensor in each if tensor is not None)
        physical = [
            None if tensor is None else tensor.reshape(len(tensor), *(1,) * (most - tensor.ndim), *tensor.shape[1:])
            for tensor in each
        ]
        outer = any(map(is_stacked, physical))              # there is an outer vmap
        results = fused(function, *physical) if outer else _compiled(function)(*physical)
        return results, tuple(0 for _ in results)


@cache
def _compiled(function: Callable[..., Results]) -> Callable[..., Results]:
    return by_inductor(function)
