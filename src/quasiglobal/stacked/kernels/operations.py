"""Convolution, linear layer and normalisations of one model in plain PyTorch: the reference of the kernels.

Some are operations of a trace. The last part serves the autograd functions of the kernels, each next to its kernel.
This file does not need Triton, which is available only with a GPU, or in tests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from quasiglobal.stacked.recording import operation
from quasiglobal.stacked.stackable import STACKED

Pair = tuple[int, int]
"""A number for the rows and one for the columns."""


@dataclass(frozen=True)
class Geometry:
    """A 2-D convolution, or the transpose of one: then its input is the convolution's output, and vice versa."""

    kernel: Pair
    stride: Pair = (1, 1)
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    groups: int = 1
    depthwise: bool = False
    """Whether each group has one input channel (transposed: one output channel)."""
    transposed: bool = False
    extra: Pair = (0, 0)
    """Rows and columns that a transposed convolution adds at the end (`output_padding`)."""

    @property
    def order(self) -> tuple[int, ...]:
        """Permutation of a weight [out, in, r, s] to the kernels' order: [out, r, s, in], or depthwise [in, r, s, out].

        A transposed convolution has weights [in, out, r, s]: out and in of the convolution that it transposes.
        """
        return (1, 2, 3, 0) if self.depthwise else (0, 2, 3, 1)

    @property
    def reach(self) -> Pair:
        """Distance between the first and the last tap."""
        return self.dilation[0] * (self.kernel[0] - 1), self.dilation[1] * (self.kernel[1] - 1)

    def moves(self, back: bool) -> tuple[Pair, Pair, Pair, Pair]:
        """UP, DOWN, STEP and PAD of the kernels: for the convolution or, if `back`, for the gradient of its input.

        The gradient of the input is a convolution of the output's gradient with flipped taps.
        """
        if not back:
            return self.stride, (1, 1), (1, 1), self.padding
        rows, columns = (by // gcd(by, dilation) for by, dilation in zip(self.stride, self.dilation, strict=True))
        around = self.reach[0] - self.padding[0], self.reach[1] - self.padding[1]
        return (1, 1), self.stride, (rows, columns), around

    def after(self, size: Sequence[int]) -> list[int]:
        """Height and width of the convolution's output."""
        terms = zip(size, self.padding, self.reach, self.stride, strict=True)
        return [(side + 2 * padding - reach - 1) // stride + 1 for side, padding, reach, stride in terms]

    def before(self, size: Sequence[int]) -> list[int]:
        """Height and width of the transposed convolution's output."""
        terms = zip(size, self.padding, self.reach, self.stride, self.extra, strict=True)
        return [(side - 1) * stride - 2 * padding + reach + extra + 1 for side, padding, reach, stride, extra in terms]


def geometry_of(
    weight: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], transposed: bool,
    extra: Sequence[int], groups: int,
) -> Geometry:
    """The geometry from a weight's shape and the arguments of ATen's `convolution`.

    A 1-D convolution is a 2-D one of images of height 1, and a linear layer one of single pixels.
    """
    depthwise = groups > 1 and weight[1] == 1
    kernel, stride, padding, dilation = (
        _pair(values, first) for values, first in ((weight[2:], 1), (stride, 1), (padding, 0), (dilation, 1))
    )
    return Geometry(kernel, stride, padding, dilation, groups, depthwise, transposed, _pair(extra, 0))


def _pair(values: Sequence[int], first: int) -> Pair:
    """Values of two axes; `first` is that of an axis that the convolution does not have."""
    rows, columns = (first, first, *values)[-2:]
    return rows, columns


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

PLAIN: dict[object, Callable[..., object]] = {NORMALISE: normalise, LAYER_NORM: layer_norm, LINEAR: STACKED["linear"]}
"""Each operation in plain PyTorch, as vmap can compute it for many models."""


# ------------------------------------------------------------------- for the autograd functions of the kernels


How = TypeVar("How")

Shares = Callable[[], Tensor]
"""Return memory [shares, n, …] for the partial sums of the gradients of a kernel's parameters."""


class Context(Protocol[How]):
    """Carrier of tensors and settings from the forward pass of an operation to its backward pass, made by autograd."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]
    how: How
    """Settings, if there are any."""

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def channels_last(x: Tensor, linear: bool = False) -> Tensor:
    """[n, b, c, h, w] as [n, b, h, w, c], contiguous; inside a network this is a view. [n, b, c, w] gets h = 1.

    If `linear`, [n, ..., c] as [n, pixels, 1, 1, c].
    """
    if linear:
        return x.reshape(len(x), -1, 1, 1, x.shape[-1]).contiguous()
    x = x if x.ndim == 5 else x.unsqueeze(3)
    return x.movedim(2, -1).contiguous()


def channels_first(y: Tensor, x: Tensor, linear: bool = False) -> Tensor:
    """[n, b, h, w, c] as [n, b, c, h, w], or as [n, b, c, w] if x has as many dimensions; if `linear`, like x."""
    if linear:
        return y.view(*x.shape[:-1], y.shape[-1])
    y = y.movedim(-1, 2)
    return y if x.ndim == 5 else y.squeeze(3)
