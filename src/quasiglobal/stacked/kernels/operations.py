"""Convolution, linear layer and normalisation as operations of a trace in plain PyTorch: the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

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
