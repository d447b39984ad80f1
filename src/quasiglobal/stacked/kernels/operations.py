"""Convolution, linear layer, normalisation and pooling: in plain PyTorch, as operations of a trace, and by kernels.

Plain PyTorch computes one model's; it is the reference. The autograd functions compute those of all models by kernels,
over stacked images [n, b, c, h, w], or [n, b, c, w]; linear layers, [n, ..., c]. Kernel modules are imported inside
them: Triton is available only with a GPU, or in tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quasiglobal.stacked.kernels.geometry import Geometry
from quasiglobal.stacked.recording import operation
from quasiglobal.stacked.stackable import STACKED


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None, stride: list[int], padding: list[int],
    dilation: list[int], transposed: bool, extra: list[int], groups: int, relu: bool,
) -> Tensor:
    """Convolve one model's images [b, c, h, w] or [b, c, w], add the bias and `rest`, apply ReLU.

    With a weight [out, in] this is a linear layer of x [..., in], without stride, padding and dilation.
    """
    if weight.ndim == 2:
        y = nn.functional.linear(x, weight, bias)
    else:
        y = torch.convolution(x, weight, bias, stride, padding, dilation, transposed, extra, groups)
    y = y if rest is None else y + rest
    return y.relu() if relu else y


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, rest: Tensor | None, running: list[Tensor],
    kind: str, groups: int, eps: float, momentum: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise one model's images [b, c, h, w], add `rest`, apply ReLU; also return the new running statistics.

    `kind` is evonorm, group or batch.
    """
    mean, variance = running or (bias.new_empty(0), bias.new_empty(0))
    x = x.to(bias.dtype)
    if kind == "batch":
        var, centre = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
        unit = (x - centre) / (var + eps).sqrt()
        if running:
            count = x.numel() // x.shape[1]
            mean = torch.lerp(mean, centre.flatten().to(mean.dtype), momentum)
            variance = torch.lerp(variance, (var.flatten() * (count / (count - 1))).to(mean.dtype), momentum)
    else:
        grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        var, centre = torch.var_mean(grouped, dim=(2, 3, 4), correction=int(kind == "evonorm"), keepdim=True)
        unit = nn.functional.silu(grouped) if kind == "evonorm" else grouped - centre
        unit = (unit / (var + eps).sqrt()).reshape(x.shape)
    weight, bias = (values.view(-1, *(1,) * (x.ndim - 2)) for values in (weight, bias))
    y = unit * weight + bias
    y = y if rest is None else y + rest
    return (y.relu() if relu else y), mean, variance


NORMALISE = operation(
    "normalise(Tensor x, Tensor weight, Tensor bias, Tensor? rest, Tensor[] running, str kind, int groups, float eps, "
    "float momentum, bool relu) -> (Tensor, Tensor, Tensor)",
    lambda *arguments: tuple(value.clone() for value in normalise(*arguments)),
)
"""`normalise` as one operation of a trace."""

LINEAR = operation("linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor", nn.functional.linear)
"""`linear` as one operation of a trace."""


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalise one model's x [..., c] over its last dimension."""
    return nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


LAYER_NORM = operation("layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> Tensor", layer_norm)
"""`layer_norm` as one operation of a trace."""

PLAIN: dict[Any, Callable[..., Any]] = {NORMALISE: normalise, LAYER_NORM: layer_norm, LINEAR: STACKED["linear"]}
"""Each operation in plain PyTorch, as vmap can compute it for many models."""


# ------------------------------------------------------------------------------------------- by kernels


class Convolution(torch.autograd.Function):
    """`convolve` of all models, which also returns x, so that its backward kernel adds later gradients of x.

    `weight` is an argument only for autograd: the kernels read `values`. They write the gradients of weight and bias to
    `shares` and `bias_shares`. A transposed convolution is the input gradient of a convolution, and vice versa. If
    `masked`, the gradient that arrives is that before the ReLU.
    """

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], bias_shares: Callable[[], Tensor], values: Tensor, x: Tensor,
        weight: Tensor, bias: Tensor | None, rest: Tensor | None, geometry: Geometry, relu: bool, masked: bool,
    ) -> tuple[Tensor, Tensor]:
        from quasiglobal.stacked.kernels.convolution import convolve, convolve_back
        from quasiglobal.stacked.kernels.shared import Epilogue

        linear = weight.ndim == 3
        images = _channels_last(x, linear)
        epilogue = Epilogue(None if rest is None else _channels_last(rest, linear), bias, relu)
        if geometry.transposed:
            n, batch, *size, _ = images.shape
            channels = weight.shape[2] * geometry.groups
            after = torch.Size((n, batch, *geometry.before(size), channels))
            y = convolve_back(images, values, after, geometry, epilogue)
        else:
            y = convolve(images, values, geometry, epilogue)
        ctx.save_for_backward(images, values, y if relu and not masked else None)
        ctx.shares, ctx.bias_shares, ctx.geometry, ctx.linear = shares, bias_shares, geometry, linear
        ctx.set_materialize_grads(False)
        return _channels_first(y, x, linear), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, later: Tensor | None) -> Any:
        from quasiglobal.stacked.kernels.convolution import convolve, convolve_back, weight_gradient
        from quasiglobal.stacked.kernels.shared import Epilogue, before

        dx, drest, geometry, linear = later, None, ctx.geometry, ctx.linear
        if dy is not None:
            images, values, result = ctx.saved_tensors
            g = before(_channels_last(dy, linear), result, ctx.bias_shares() if ctx.needs_input_grad[5] else None)
            drest = _channels_first(g, dy, linear) if ctx.needs_input_grad[6] else None
            g = g.to(images.dtype)
            left, right = (g, images) if geometry.transposed else (images, g)
            weight_gradient(left, right, ctx.shares(), geometry)
            if ctx.needs_input_grad[3]:
                epilogue = Epilogue(later if later is None else _channels_last(later, linear))
                if geometry.transposed:
                    dx = convolve(g, values, geometry, epilogue)
                else:
                    dx = convolve_back(g, values, images.shape, geometry, epilogue)
                dx = _channels_first(dx, dy, linear)
        return None, None, None, dx, None, None, drest, *(None,) * 3


class Normalised(torch.autograd.Function):
    """`normalise` of all models; writes the gradients of weight and bias to `shares`."""

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor,
        rest: Tensor | None, running: list[Tensor], kind: str, groups: int, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:
        from quasiglobal.stacked.kernels.normalisation import normalise

        images, added = _channels_last(x), None if rest is None else _channels_last(rest)
        y, moments, after = normalise(images, weight, bias, added, running, kind, groups, eps, momentum, relu, dtype)
        ctx.save_for_backward(images, y if relu and rest is not None else None, moments)
        ctx.shares, ctx.how = shares, (kind, groups, relu, rest is not None)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*after)
        return _channels_first(y, x), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        from quasiglobal.stacked.kernels.normalisation import normalise_back

        dx, drest = None, None
        if dy is not None:
            images, y, moments = ctx.saved_tensors
            dx, drest = normalise_back(images, y, moments, _channels_last(dy), ctx.shares(), *ctx.how)
            dx, drest = _channels_first(dx, dy), _channels_first(drest, dy) if ctx.how[-1] else None
        return None, None, dx, None, None, drest, *(None,) * 6


class LayerNormed(torch.autograd.Function):
    """`layer_norm` of all models; writes the gradients of weight and bias to `shares`."""

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        from quasiglobal.stacked.kernels.layer_norm import layer_norm

        pixels = x.reshape(len(x), -1, x.shape[-1]).contiguous()
        y, moments = layer_norm(pixels, weight, bias, eps, dtype)
        ctx.save_for_backward(pixels, weight, moments)
        ctx.shares = shares
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quasiglobal.stacked.kernels.layer_norm import layer_norm_back

        pixels, weight, moments = ctx.saved_tensors
        dx = layer_norm_back(pixels, weight, moments, dy.reshape(pixels.shape).contiguous(), ctx.shares())
        return None, None, dx.view(dy.shape), None, None, None


class Pooled(torch.autograd.Function):
    """Maximum pooling over squares of side `window`.

    If x is the result of a ReLU that only the pooling reads, `masks` computes the gradient before the ReLU.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int, masks: bool) -> Tensor:
        from quasiglobal.stacked.kernels.pooling import pool

        y, which = pool(_channels_last(x), window)
        ctx.save_for_backward(which, y if masks else None)
        ctx.window = window
        return y.movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quasiglobal.stacked.kernels.pooling import pool_back

        which, y = ctx.saved_tensors
        return pool_back(_channels_last(dy), y, which, ctx.window).movedim(-1, 2), None, None


def _channels_last(x: Tensor, linear: bool = False) -> Tensor:
    """[n, b, c, h, w] as [n, b, h, w, c], contiguous; inside a network this is a view. [n, b, c, w] gets h = 1.

    If `linear`, [n, ..., c] as [n, pixels, 1, 1, c].
    """
    if linear:
        return x.reshape(len(x), -1, 1, 1, x.shape[-1]).contiguous()
    x = x if x.ndim == 5 else x.unsqueeze(3)
    return x.movedim(2, -1).contiguous()


def _channels_first(y: Tensor, x: Tensor, linear: bool = False) -> Tensor:
    """[n, b, h, w, c] as [n, b, c, h, w], or as [n, b, c, w] if x has as many dimensions; if `linear`, like x."""
    if linear:
        return y.view(*x.shape[:-1], y.shape[-1])
    y = y.movedim(-1, 2)
    return y if x.ndim == 5 else y.squeeze(3)
