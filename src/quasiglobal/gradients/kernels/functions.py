"""The kernels as autograd functions over stacked images [n, b, c, h, w], or [n, b, c, w].

Kernel modules are imported inside the functions: Triton is available only with a GPU, or in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from quasiglobal.gradients.kernels.geometry import Geometry


class Convolution(torch.autograd.Function):
    """Convolution that also returns x, so that its backward kernel adds the gradients of later uses of x.

    `weight` is an argument only for autograd: the kernels read `values`, and write the gradient to `shares`. A
    transposed convolution is the input gradient of a convolution, and vice versa.
    """

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], values: Tensor, x: Tensor, weight: Tensor, geometry: Geometry
    ) -> tuple[Tensor, Tensor]:
        from quasiglobal.gradients.kernels.convolution import convolve, convolve_back

        images = _channels_last(x)
        ctx.save_for_backward(images, values)
        ctx.shares, ctx.geometry = shares, geometry
        ctx.set_materialize_grads(False)
        if geometry.transposed:
            n, batch, *size, _ = images.shape
            channels = weight.shape[2] * geometry.groups
            after = torch.Size((n, batch, *geometry.before(size), channels))
            y = convolve_back(images, values, None, after, geometry)
        else:
            y = convolve(images, values, geometry)
        return _channels_first(y, x), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, later: Tensor | None) -> Any:
        from quasiglobal.gradients.kernels.convolution import convolve, convolve_back, weight_gradient

        dx, geometry = later, ctx.geometry
        if dy is not None:
            images, values = ctx.saved_tensors
            arrived = _channels_last(dy)
            x, y = (arrived, images) if geometry.transposed else (images, arrived)
            weight_gradient(x, y, ctx.shares(), geometry)
            if ctx.needs_input_grad[2]:
                later = later if later is None else _channels_last(later)
                if geometry.transposed:
                    dx = convolve(arrived, values, geometry, later)
                else:
                    dx = convolve_back(arrived, values, later, images.shape, geometry)
                dx = _channels_first(dx, dy)
        return None, None, dx, None, None


class Normalised(torch.autograd.Function):
    """`operations.normalise` of all models; writes the gradients of weight and bias to `shares`."""

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor,
        rest: Tensor | None, running: list[Tensor], kind: str, groups: int, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:
        from quasiglobal.gradients.kernels.normalisation import masks_by_result, normalise

        images, added = _channels_last(x), None if rest is None else _channels_last(rest)
        y, moments, after = normalise(images, weight, bias, added, running, kind, groups, eps, momentum, relu, dtype)
        mask = y if relu and masks_by_result(kind, rest is not None) else None
        ctx.save_for_backward(images, weight, bias, mask, moments)
        ctx.shares, ctx.how = shares, (kind, groups, relu, rest is not None)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*after)
        return _channels_first(y, x), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        from quasiglobal.gradients.kernels.normalisation import normalise_back

        dx, drest = None, None
        if dy is not None:
            images, weight, bias, y, moments = ctx.saved_tensors
            dx, drest = normalise_back(images, weight, bias, y, _channels_last(dy), moments, ctx.shares(), *ctx.how)
            dx, drest = _channels_first(dx, dy), _channels_first(drest, dy) if ctx.how[-1] else None
        return None, None, dx, None, None, drest, *(None,) * 6


class Pooled(torch.autograd.Function):
    """Maximum pooling over squares of side `window`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int) -> Tensor:
        from quasiglobal.gradients.kernels.pooling import pool

        y, which = pool(_channels_last(x), window)
        ctx.save_for_backward(which)
        ctx.window = window
        return y.movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quasiglobal.gradients.kernels.pooling import pool_back

        (which,) = ctx.saved_tensors
        return pool_back(_channels_last(dy), which, ctx.window).movedim(-1, 2), None


def _channels_last(x: Tensor) -> Tensor:
    """[n, b, c, h, w] as [n, b, h, w, c], contiguous; inside a network this is a view. [n, b, c, w] gets h = 1."""
    x = x if x.ndim == 5 else x.unsqueeze(3)
    return x.movedim(2, -1).contiguous()


def _channels_first(y: Tensor, x: Tensor) -> Tensor:
    """[n, b, h, w, c] as [n, b, c, h, w], or as [n, b, c, w] if x has as many dimensions."""
    y = y.movedim(-1, 2)
    return y if x.ndim == 5 else y.squeeze(3)
