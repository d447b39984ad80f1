"""Maximum pooling of n models at once over squares that tile the images [n, batch, height, width, channels]."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quasiglobal.stacked.kernels.operations import Context, channels_last
from quasiglobal.stacked.kernels.shared import accumulator, launched


@triton.jit
def _place(at, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Offset of the first pixel of a pooled pixel's square, for its channel."""
    image, i, j = at // (OH * OW * C), at // (OW * C) % OH, at // C % OW
    return ((image * (OH * K) + i * K) * (OW * K) + j * K) * C + at % C


@launched
def _pool(
    x, y, which, total, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    ACC: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    first = _place(at, OH, OW, C, K)
    best = tl.load(x + first, mask=at < total, other=0.0).to(ACC)
    where = tl.zeros([SIZE], dtype=tl.int32)
    for k in tl.static_range(1, K * K):
        value = tl.load(x + first + (k // K * (OW * K) + k % K) * C, mask=at < total, other=0.0).to(ACC)
        better = (value > best) | (value != value)          # NaN wins, as in PyTorch
        best = tl.where(better, value, best)
        where = tl.where(better, k, where)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=at < total)
    tl.store(which + at, where.to(tl.uint8), mask=at < total)


@launched
def _pool_back(
    dy, y, dx, which, total, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    RELU: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    first = _place(at, OH, OW, C, K)
    value = tl.load(dy + at, mask=at < total, other=0.0)
    where = tl.load(which + at, mask=at < total, other=0)
    if RELU:
        value = tl.where(tl.load(y + at, mask=at < total, other=0.0) <= 0, 0.0, value)
    for k in tl.static_range(0, K * K):
        tl.store(dx + first + (k // K * (OW * K) + k % K) * C, tl.where(where == k, value, 0.0), mask=at < total)


class Pooled(torch.autograd.Function):
    """Maximum pooling over squares of side `window`.

    If x is the result of a ReLU that only the pooling reads, `masks` computes the gradient before the ReLU.
    """

    @staticmethod
    def forward(ctx: Context[int], x: Tensor, window: int, masks: bool) -> Tensor:
        y, which = pool(channels_last(x), window)
        ctx.save_for_backward(which, y if masks else None)
        ctx.how = window
        return y.movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[int], dy: Tensor) -> tuple[Tensor, None, None]:
        which, y = ctx.saved_tensors
        return pool_back(channels_last(dy), y, which, ctx.how).movedim(-1, 2), None, None


def pool(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Maximum of each square of x [n, b, h, w, c], and its index within the square."""
    n, batch, height, width, channels = x.shape
    y = x.new_empty(n, batch, height // window, width // window, channels)
    which = torch.empty_like(y, dtype=torch.uint8)
    _pool[(triton.cdiv(y.numel(), POOLED),)](x, y, which, y.numel(), *y.shape[2:], window, POOLED, accumulator(x))
    return y, which


def pool_back(dy: Tensor, y: Tensor | None, which: Tensor, window: int) -> Tensor:
    """The gradient of the pooling's input; with the result y, the gradient before a ReLU that precedes the pooling."""
    n, batch, height, width, channels = dy.shape
    dx = dy.new_empty(n, batch, height * window, width * window, channels)
    _pool_back[(triton.cdiv(dy.numel(), POOLED),)](
        dy, dy if y is None else y, dx, which, dy.numel(), *dy.shape[2:], window, POOLED, y is not None
    )
    return dx


POOLED = 1024
"""Pooled values per block."""
