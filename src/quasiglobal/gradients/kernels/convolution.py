"""Convolutions of n models at once: forward, and the gradients of inputs and weights.

Images are [n, batch, height, width, channels], contiguous. A convolution is a matrix product: the left operand has a
row per output pixel with the input patch around it, and is never stored; the right operand is the kernel. A tap is one
position (r, s) of the kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.gradients.kernels.accumulators import accumulator


@triton.jit
def _taps(first, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Kernel row, kernel column and channel of the columns first, first + 1, … of the left operand."""
    k = first + tl.arange(0, BK)
    tap = first // C if C % BK == 0 else k // C
    return tap // S, tap % S, k - tap * C


@triton.jit
def _convolution(
    x, w, later, y, batch, stride,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, LATER: tl.constexpr,
):
    """Pixel (i, j) of y sums w's tap (r, s) times x's pixel ((i · UP − TOP + r) / DOWN, (j · UP − LEFT + s) / DOWN).

    w is [channels out, R, S, channels in]; BACK reads it flipped and transposed. If LATER, `later` is added to y. Only
    taps with an integer pixel index count. All i of a block are equal modulo DOWN, and so are all j: all pixels of a
    block use the same taps.
    """
    RU: tl.constexpr = (R + DOWN - 1) // DOWN
    SU: tl.constexpr = (S + DOWN - 1) // DOWN
    HU: tl.constexpr = (OH + DOWN - 1) // DOWN
    WU: tl.constexpr = (OW + DOWN - 1) // DOWN
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    y += node * batch * (OH * OW * OC)
    later += node * batch * (OH * OW * OC)
    w += node * stride
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    kind = tl.program_id(1) % (DOWN * DOWN)
    out = tl.program_id(1) // (DOWN * DOWN) * BN + tl.arange(0, BN)
    image = place // (HU * WU)
    i = (place // WU % HU) * DOWN + kind // DOWN
    j = (place % WU) * DOWN + kind % DOWN
    known = (image < batch) & (i < OH) & (j < OW)
    where = ((image * OH + i) * OW + j)[:, None] * OC + out[None, :]
    inside = known[:, None] & (out < OC)[None, :]
    i = i * UP - TOP
    j = j * UP - LEFT
    r0 = ((TOP - kind // DOWN) % DOWN + DOWN) % DOWN
    s0 = ((LEFT - kind % DOWN) % DOWN + DOWN) % DOWN
    total = tl.zeros([BM, BN], dtype=ACC)
    if LATER:
        total += tl.load(later + where, mask=inside, other=0.0).to(ACC)
    for first in range(0, RU * SU * C, BK):
        u, v, c = _taps(first, C, SU, BK)
        r = r0 + u * DOWN
        s = s0 + v * DOWN
        if C % BK == 0:
            row, column = ((i + r) // DOWN)[:, None], ((j + s) // DOWN)[:, None]
            real = (r < R) & (s < S) & (c < C)
        else:
            row, column = (i[:, None] + r[None, :]) // DOWN, (j[:, None] + s[None, :]) // DOWN
            real = (r < R) & (s < S) & (u < RU)
        there = known[:, None] & real[None, :] & (row >= 0) & (column >= 0) & (row < H) & (column < W)
        left = tl.load(x + ((image[:, None] * H + row) * W + column) * C + c[None, :], mask=there, other=0.0)
        tap = r * S + s
        if BACK:
            at = (c * (R * S) + R * S - 1 - tap)[:, None] * OC + out[None, :]
        else:
            at = (tap * C + c)[:, None] + out[None, :] * (R * S * C)
        right = tl.load(w + at, mask=real[:, None] & (out < OC)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    tl.store(y + where, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    x, dy, dw, places, of_share, of_node, SHARE: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):
    """dw[tap and channel in, channel out], summed over one share of the pixels of a model's images."""
    node = tl.program_id(2).to(tl.int64)
    x += node * (places // (OH * OW)) * (H * W * C)
    dy += node * places * OC
    dw += tl.program_id(1).to(tl.int64) * of_share + node * of_node
    blocks: tl.constexpr = (R * S * C + BK - 1) // BK
    first = tl.program_id(0) % blocks * BK
    out = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    k = first + tl.arange(0, BK)
    r, s, c = _taps(first, C, S, BK)
    total = tl.zeros([BK, BN], dtype=ACC)
    for p in range(0, SHARE, BP):
        place = tl.program_id(1) * SHARE + p + tl.arange(0, BP)
        i = (place // OW % OH) * STRIDE - PAD
        j = (place % OW) * STRIDE - PAD
        if C % BK == 0:
            row, column = (i + r)[None, :], (j + s)[None, :]
        else:
            row, column = i[None, :] + r[:, None], j[None, :] + s[:, None]
        inside = (place < places)[None, :]
        there = inside & (row >= 0) & (column >= 0) & (row < H) & (column < W) & (k < R * S * C)[:, None]
        image = (place // (OH * OW))[None, :]
        left = tl.load(x + ((image * H + row) * W + column) * C + c[:, None], mask=there, other=0.0)
        at = place[:, None] * OC + out[None, :]
        right = tl.load(dy + at, mask=(place < places)[:, None] & (out < OC)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    where = k[:, None] + out[None, :] * (R * S * C)
    tl.store(dw + where, total, mask=(k < R * S * C)[:, None] & (out < OC)[None, :])


def convolve(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """Convolve x [n, b, h, w, c] with each model's own kernels w [n, out, r, s, c]."""
    n, batch, height, width, _ = x.shape
    _, channels, r, s, _ = w.shape
    side = [(size + 2 * padding - k) // stride + 1 for size, k in ((height, r), (width, s))]
    y = x.new_empty(n, batch, *side, channels)
    return _launch(x, w, None, y, up=stride, down=1, padding=(padding, padding))


def convolve_back(
    dy: Tensor, w: Tensor, later: Tensor | None, size: torch.Size, stride: int, padding: int
) -> Tensor:
    """The gradient of a convolution's input of shape `size`, plus `later`, the gradient of its other uses."""
    around = w.shape[2] - 1 - padding, w.shape[3] - 1 - padding
    return _launch(dy, w, later, dy.new_empty(size), up=1, down=stride, padding=around, back=True)


def _launch(
    x: Tensor, w: Tensor, later: Tensor | None, y: Tensor, *, up: int, down: int, padding: tuple[int, int],
    back: bool = False,
) -> Tensor:
    n, _, *source = x.shape
    _, batch, height, width, channels = y.shape
    r, s = w.shape[2:4]
    bn = min(64, max(16, triton.next_power_of_2(channels)))
    bk = _columns(r * s, source[2])
    bm, stages = (256, 2) if bn < 64 else (128, 3)          # fastest of the tested settings on an H200
    places = batch * triton.cdiv(height, down) * triton.cdiv(width, down)
    grid = (triton.cdiv(places, bm), triton.cdiv(channels, bn) * down**2, n)
    _convolution[grid](
        x, w, x if later is None else later, y, batch, w.stride(0), *source, height, width, channels, r, s,
        up, down, *padding, back, bm, bk, bn, accumulator(x), later is not None,
        num_warps=4, num_stages=stages,
    )
    return y


BLOCK = 64
"""Block size of `weight_gradient` in pixels, in taps × channels in, and in channels out."""

PROGRAMS = 528
"""Number of blocks of `weight_gradient` that fill the GPU."""


def shares(n: int, places: int, weight: torch.Size) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradient of a weight [out, r, s, c]."""
    blocks = triton.cdiv(weight[0], BLOCK) * triton.cdiv(weight[1:].numel(), BLOCK)
    return max(1, min(PROGRAMS // int(blocks * n), places // (4 * BLOCK), 32))


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, stride: int, padding: int) -> None:
    """Fill dw [shares, n, out, r, s, c] with the gradient of the kernels, one partial sum per share."""
    n, batch, height, width, channels = x.shape
    _, _, *side, out = dy.shape
    count, _, _, r, s, _ = dw.shape
    places = batch * side[0] * side[1]
    bn = min(BLOCK, max(16, triton.next_power_of_2(out)))
    bk = min(BLOCK, max(16, triton.next_power_of_2(r * s * channels)))
    share = triton.cdiv(triton.cdiv(places, count), BLOCK) * BLOCK
    _weight_gradient[(triton.cdiv(r * s * channels, bk) * triton.cdiv(out, bn), count, n)](
        x, dy, dw, places, dw.stride(0), dw.stride(1), share, height, width, channels, *side, out, r, s,
        stride, padding, BLOCK, bk, bn, accumulator(x), num_warps=4, num_stages=3,
    )


def _columns(taps: int, channels: int) -> int:
    """Number of columns of the left operand per block; all from one tap if the number of channels allows."""
    if channels % 16 == 0:
        return min(64, channels & -channels)
    return min(64, max(16, int(triton.next_power_of_2(taps * channels))))
