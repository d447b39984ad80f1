"""LayerNorm of n models at once, over the channels of each pixel.

x is [n, pixels, channels], contiguous. `operations.layer_norm` computes the same in plain PyTorch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.stacked.kernels.shared import accumulator, launched, wide


@launched
def _layer_norm(
    x, weight, bias, y, moments, pixels, stride, eps, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalise, scale and shift BP pixels; store mean and 1 / standard deviation of each."""
    node = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    p = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    at = (node * pixels + p) * C + c
    inside = (p < pixels) & (c < C)
    value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
    mean = tl.sum(value, axis=1, keep_dims=True) / C
    apart = tl.where(c < C, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, axis=1, keep_dims=True) / C + eps)
    factor = tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    offset = tl.load(bias + node * stride + c, mask=c < C, other=0.0).to(ACC)
    tl.store(y + at, (apart * scale * factor + offset).to(y.dtype.element_ty), mask=inside)
    moments += (node * pixels + p) * 2
    tl.store(moments, mean, mask=p < pixels)
    tl.store(moments + 1, scale, mask=p < pixels)


@launched
def _layer_norm_back(
    x, weight, dy, moments, dx, sums, pixels, stride, of_share, of_node, SHARE: tl.constexpr, C: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """Gradient of x in one share of a model's pixels, and its part of the gradients of weight and bias."""
    node = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    factor = tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    along = tl.zeros([BP, BC], dtype=ACC)
    total = tl.zeros([BP, BC], dtype=ACC)
    for first in range(0, SHARE, BP):
        p = (tl.program_id(0) * SHARE + first + tl.arange(0, BP))[:, None]
        at = (node * pixels + p) * C + c
        inside = (p < pixels) & (c < C)
        value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
        g = tl.load(dy + at, mask=inside, other=0.0).to(ACC)
        mean = tl.load(moments + (node * pixels + p) * 2, mask=p < pixels, other=0.0)
        scale = tl.load(moments + (node * pixels + p) * 2 + 1, mask=p < pixels, other=0.0)
        unit = tl.where(inside, (value - mean) * scale, 0.0)
        along += g * unit
        total += g
        g *= factor
        level = tl.sum(g, axis=1, keep_dims=True) / C
        slope = tl.sum(g * unit, axis=1, keep_dims=True) / C
        tl.store(dx + at, (scale * (g - level - unit * slope)).to(dx.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * of_share + node * of_node + c
    tl.store(sums + at, tl.sum(along, axis=0)[None, :], mask=c < C)
    tl.store(sums + at + C, tl.sum(total, axis=0)[None, :], mask=c < C)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y in `dtype`, and the moments for the backward pass; weight and bias are [n, channels], rows of x."""
    n, pixels, channels = x.shape
    y, moments = torch.empty_like(x, dtype=dtype), x.new_empty(n, pixels, 2, dtype=wide(x))
    bp, bc = _block(channels)
    _layer_norm[(triton.cdiv(pixels, bp), n)](
        x, weight, bias, y, moments, pixels, bias.stride(0), eps, channels, bp, bc, accumulator(x), num_warps=WARPS
    )
    return y, moments


def layer_norm_back(x: Tensor, weight: Tensor, moments: Tensor, dy: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of x; fill `sums` [shares, n, 2 · channels] with the gradients of weight and bias."""
    n, pixels, channels = x.shape
    dx = torch.empty_like(x)
    bp, bc = _block(channels)
    share = triton.cdiv(triton.cdiv(pixels, len(sums)), bp) * bp
    _layer_norm_back[(len(sums), n)](
        x, weight, dy, moments, dx, sums, pixels, weight.stride(0), sums.stride(0), sums.stride(1), share, channels,
        bp, bc, accumulator(x), num_warps=WARPS,
    )
    return dx


WARPS = 4
"""Warps per block."""

BLOCK = 2048
"""Numbers of a block, at least one pixel."""

PROGRAMS = 1056
"""Number of blocks of the backward pass that fill the GPU."""


def _block(channels: int) -> tuple[int, int]:
    """Pixels and channels of a block."""
    width = int(triton.next_power_of_2(channels))
    return max(1, BLOCK // width), width


def shares(n: int, pixels: int) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradients of weight and bias."""
    return max(1, min(PROGRAMS // n, pixels // 64, 64))
