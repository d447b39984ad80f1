"""Convolutions of n models at once: forward, and the gradients of inputs and weights.

Images are [n, batch, height, width, channels], contiguous. A convolution is a matrix product: the left operand has a
row per output pixel with the input patch around it, and is never stored; the right operand is the kernel. A tap is one
position (r, s) of the kernel. UP, DOWN, STEP, DILATION and PAD are pairs (rows, columns).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quasiglobal.stacked.kernels import depthwise, sweep
from quasiglobal.stacked.kernels.operations import Context, Geometry, Pair, Shares, channels_first, channels_last
from quasiglobal.stacked.kernels.shared import PROGRAMS, Epilogue, accumulator, before, first_tap, launched, positive


@triton.jit
def _taps(first, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Kernel row, kernel column and channel of the columns first, first + 1, … of the left operand."""
    k = first + tl.arange(0, BK)
    tap = first // C if C % BK == 0 else k // C
    return tap // S, tap % S, k - tap * C


@launched
def _convolution(
    x, w, y, later, bias, batch, stride, of_bias,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, STEP: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, BLOCKS: tl.constexpr, TOGETHER: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    LATER: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
):
    """Pixel (i, j) of y sums w's tap (r, s) times x's pixel ((i · UP − PAD + r · DILATION) / DOWN, and so for j and s).

    w is [channels out, R, S, channels in]; BACK reads it flipped and transposed. LATER, BIAS and RELU are parts of the
    `Epilogue`. Only taps with an integer pixel index count. All i of a block are equal modulo DOWN, and so
    are all j: all pixels of a block use the same taps, every STEP-th. C and OC are the channels of a block of groups:
    of BLOCKS blocks, each of TOGETHER groups, and between two of these groups the weights are 0.
    """
    KINDS: tl.constexpr = DOWN[0] * DOWN[1]
    RU: tl.constexpr = (R + STEP[0] - 1) // STEP[0]
    SU: tl.constexpr = (S + STEP[1] - 1) // STEP[1]
    HU: tl.constexpr = (OH + DOWN[0] - 1) // DOWN[0]
    WU: tl.constexpr = (OW + DOWN[1] - 1) // DOWN[1]
    XC: tl.constexpr = C * BLOCKS
    YC: tl.constexpr = OC * BLOCKS
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * XC)
    y += node * batch * (OH * OW * YC)
    later += node * batch * (OH * OW * YC)
    w += node * stride
    bias += node * of_bias
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    kind = tl.program_id(1) % KINDS
    part = tl.program_id(1) // KINDS
    if BLOCKS > 1:
        x += part % BLOCKS * C
        y += part % BLOCKS * OC
        later += part % BLOCKS * OC
        bias += part % BLOCKS * OC
        w += part % BLOCKS * (C * R * S * OC // TOGETHER)
        part = part // BLOCKS
    out = part * BN + tl.arange(0, BN)
    image = place // (HU * WU)
    i = (place // WU % HU) * DOWN[0] + kind // DOWN[1]
    j = (place % WU) * DOWN[1] + kind % DOWN[1]
    known = (image < batch) & (i < OH) & (j < OW)
    where = ((image * OH + i) * OW + j)[:, None] * YC + out[None, :]
    inside = known[:, None] & (out < OC)[None, :]
    i = i * UP[0] - PAD[0]
    j = j * UP[1] - PAD[1]
    r0 = first_tap(PAD[0] - kind // DOWN[1], DOWN[0], DILATION[0], R)
    s0 = first_tap(PAD[1] - kind % DOWN[1], DOWN[1], DILATION[1], S)
    total = tl.zeros([BM, BN], dtype=ACC)
    if LATER:
        total += tl.load(later + where, mask=inside, other=0.0).to(ACC)
    for first in range(0, RU * SU * C, BK):
        u, v, c = _taps(first, C, SU, BK)
        r = r0 + u * STEP[0]
        s = s0 + v * STEP[1]
        if C % BK == 0:
            row = ((i + r * DILATION[0]) // DOWN[0])[:, None]
            column = ((j + s * DILATION[1]) // DOWN[1])[:, None]
            real = (r < R) & (s < S) & (c < C)
        else:
            row = (i[:, None] + r[None, :] * DILATION[0]) // DOWN[0]
            column = (j[:, None] + s[None, :] * DILATION[1]) // DOWN[1]
            real = (r < R) & (s < S) & (u < RU)
        there = known[:, None] & real[None, :] & (row >= 0) & (column >= 0) & (row < H) & (column < W)
        left = tl.load(x + ((image[:, None] * H + row) * W + column) * XC + c[None, :], mask=there, other=0.0)
        tap = r * S + s
        present = real[:, None] & (out < OC)[None, :]
        inner, outer = c, out
        if TOGETHER > 1:
            present &= (c // (C // TOGETHER))[:, None] == (out // (OC // TOGETHER))[None, :]
            inner, outer = c % (C // TOGETHER), out % (OC // TOGETHER)
        if BACK:
            at = (c * (R * S) + R * S - 1 - tap)[:, None] * (OC // TOGETHER) + outer[None, :]
        else:
            at = (tap * (C // TOGETHER) + inner)[:, None] + out[None, :] * (R * S * C // TOGETHER)
        right = tl.load(w + at, mask=present, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    if BIAS:
        total += tl.load(bias + out, mask=out < OC, other=0.0).to(ACC)[None, :]
    if RELU:
        total = positive(total)
    tl.store(y + where, total.to(y.dtype.element_ty), mask=inside)


@launched
def _weight_gradient(
    x, dy, dw, places, of_share, of_node, SHARE: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    BLOCKS: tl.constexpr, TOGETHER: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):
    """dw[tap and channel in, channel out], summed over one share of the pixels of a model's images."""
    XC: tl.constexpr = C * BLOCKS
    YC: tl.constexpr = OC * BLOCKS
    node = tl.program_id(2).to(tl.int64)
    x += node * (places // (OH * OW)) * (H * W * XC)
    dy += node * places * YC
    dw += tl.program_id(1).to(tl.int64) * of_share + node * of_node
    part = tl.program_id(0)
    if BLOCKS > 1:
        x += part % BLOCKS * C
        dy += part % BLOCKS * OC
        dw += part % BLOCKS * (C * R * S * OC // TOGETHER)
        part = part // BLOCKS
    blocks: tl.constexpr = (R * S * C + BK - 1) // BK
    first = part % blocks * BK
    out = part // blocks * BN + tl.arange(0, BN)
    k = first + tl.arange(0, BK)
    r, s, c = _taps(first, C, S, BK)
    total = tl.zeros([BK, BN], dtype=ACC)
    for p in range(0, SHARE, BP):
        place = tl.program_id(1) * SHARE + p + tl.arange(0, BP)
        i = (place // OW % OH) * UP[0] - PAD[0]
        j = (place % OW) * UP[1] - PAD[1]
        if C % BK == 0:
            row, column = (i + r * DILATION[0])[None, :], (j + s * DILATION[1])[None, :]
        else:
            row, column = i[None, :] + r[:, None] * DILATION[0], j[None, :] + s[:, None] * DILATION[1]
        inside = (place < places)[None, :]
        there = inside & (row >= 0) & (column >= 0) & (row < H) & (column < W) & (k < R * S * C)[:, None]
        image = (place // (OH * OW))[None, :]
        left = tl.load(x + ((image * H + row) * W + column) * XC + c[:, None], mask=there, other=0.0)
        at = place[:, None] * YC + out[None, :]
        right = tl.load(dy + at, mask=(place < places)[:, None] & (out < OC)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    known = (k < R * S * C)[:, None] & (out < OC)[None, :]
    if TOGETHER > 1:
        known &= (c // (C // TOGETHER))[:, None] == (out // (OC // TOGETHER))[None, :]
        k = k // C * (C // TOGETHER) + k % (C // TOGETHER)
    tl.store(dw + k[:, None] + out[None, :] * (R * S * C // TOGETHER), total, mask=known)


class Convolution(torch.autograd.Function):
    """`operations.convolve` of all models, which also returns x, so that its backward kernel adds later gradients of x.

    `weight` is an argument only for autograd: the kernels read `values`. They write the gradients of weight and bias to
    `shares` and `bias_shares`. A transposed convolution is the input gradient of a convolution, and vice versa. If
    `masked`, the gradient that arrives is that before the ReLU.
    """

    @staticmethod
    def forward(
        ctx: Context[tuple[Shares, Shares, Geometry, bool]], shares: Shares, bias_shares: Shares, values: Tensor,
        x: Tensor, weight: Tensor, bias: Tensor | None, rest: Tensor | None, geometry: Geometry, relu: bool,
        masked: bool,
    ) -> tuple[Tensor, Tensor]:
        linear = weight.ndim == 3
        images = channels_last(x, linear)
        epilogue = Epilogue(None if rest is None else channels_last(rest, linear), bias, relu)
        n, batch, *size, _ = images.shape
        if geometry.transposed:
            shape = n, batch, *geometry.before(size), weight.shape[2] * geometry.groups
        else:
            shape = n, batch, *geometry.after(size), weight.shape[1]
        y = convolve(images, values, shape, geometry, epilogue, back=geometry.transposed)
        ctx.save_for_backward(images, values, y if relu and not masked else None)
        ctx.how = shares, bias_shares, geometry, linear
        ctx.set_materialize_grads(False)
        return channels_first(y, x, linear), x

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[Shares, Shares, Geometry, bool]], dy: Tensor | None, later: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        dx, drest, (shares, bias_shares, geometry, linear) = later, None, ctx.how
        if dy is not None:
            images, values, result = ctx.saved_tensors
            g = before(channels_last(dy, linear), result, bias_shares() if ctx.needs_input_grad[5] else None)
            drest = channels_first(g, dy, linear) if ctx.needs_input_grad[6] else None
            g = g.to(images.dtype)
            left, right = (g, images) if geometry.transposed else (images, g)
            weight_gradient(left, right, shares(), geometry)
            if ctx.needs_input_grad[3]:
                epilogue = Epilogue(later if later is None else channels_last(later, linear))
                dx = convolve(g, values, images.shape, geometry, epilogue, back=not geometry.transposed)
                dx = channels_first(dx, dy, linear)
        return None, None, None, dx, None, None, drest, *(None,) * 3


def convolve(
    x: Tensor, w: Tensor, shape: Sequence[int], geometry: Geometry, epilogue: Epilogue, back: bool
) -> Tensor:
    """Convolve x [n, b, h, w, c] with each model's own kernels w [n, out, r, s, c / groups] to images of this shape.

    If `back`, x is the gradient of a convolution's output, and the result that of its input; the `later` of the
    epilogue is the gradient of the input's other uses. Depthwise kernels are [n, 1, r, s, out], here and below.
    """
    y = x.new_empty(shape, dtype=epilogue.dtype(x))
    if sweep.sweeps(x, y.shape[4], geometry, back):
        return sweep.launch(x, w, y, epilogue, geometry, back)
    return (depthwise.launch if geometry.depthwise else _launch)(x, w, y, epilogue, geometry, back)


def _launch(x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, geometry: Geometry, back: bool) -> Tensor:
    n, _, *source = x.shape
    _, batch, height, width, channels = y.shape
    blocks, together = _of_groups(geometry.groups, source[2], channels)
    inner, outer = source[2] // blocks, channels // blocks
    r, s = geometry.kernel
    up, down, step, padding = geometry.moves(back)
    places = batch * triton.cdiv(height, down[0]) * triton.cdiv(width, down[1])
    kinds = blocks * down[0] * down[1]
    bm, bn, most, stages = _tile(places, outer, n * kinds)
    bk = _columns(r * s, inner, most)
    grid = (triton.cdiv(places, bm), triton.cdiv(outer, bn) * kinds, n)
    tensors, of_bias, parts = epilogue.arguments(y)
    _convolution[grid](
        x, w, y, *tensors, batch, w.stride(0), of_bias, *source[:2], inner, height, width, outer, r, s, up, down, step,
        geometry.dilation, padding, blocks, together, back, bm, bk, bn, accumulator(x), *parts,
        num_warps=4, num_stages=stages,
    )
    return y


def _tile(places: int, outer: int, count: int) -> tuple[int, int, int, int]:
    """Block sizes in pixels, channels out, and taps × channels in (at most); stages of the pipeline of loads.

    The largest tile that gives every multiprocessor a block, for `count` products [places, …] × […, outer].
    """
    columns = _wide(outer)
    if columns < 64:
        return 256, columns, 64, 2
    tiles = [tile for tile in TILES if tile[1] <= columns]
    for tile in tiles:
        if triton.cdiv(places, tile[0]) * triton.cdiv(outer, tile[1]) * count >= MULTIPROCESSORS:
            return tile
    return tiles[-1]


def _wide(outer: int) -> int:
    """Widest block of channels out: 128 if it pads no more channels than 64 does."""
    return min(BLOCK if triton.cdiv(outer, BLOCK) % 2 else 2 * BLOCK, max(16, int(triton.next_power_of_2(outer))))


TILES = [(128, 128, 64, 3), (64, 128, 64, 4), (128, 64, 64, 3), (64, 64, 128, 3)]
"""The fastest of the tested settings on an H200, for products of 16 bits."""

MULTIPROCESSORS = 132
"""Number of multiprocessors of an H200."""

BLOCK = 64
"""Block size of `weight_gradient` in pixels, and in taps × channels in."""

NARROW = 32
"""Groups of fewer channels are computed together, up to this width, with weights 0 between them."""


def shares(n: int, places: int, weight: torch.Size, geometry: Geometry) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradient of a weight in kernel order."""
    if geometry.depthwise:
        return depthwise.shares(n, places, weight)
    out, *taps, width = weight
    if sweep.suits(geometry, width, out):
        return sweep.shares(n, places, width)
    blocks, _ = _of_groups(geometry.groups, width * geometry.groups, out)
    inner = taps[0] * taps[1] * width * geometry.groups // blocks
    programs = blocks * triton.cdiv(out // blocks, 2 * BLOCK) * triton.cdiv(inner, BLOCK)
    return max(1, min(PROGRAMS // int(programs * n), places // (4 * BLOCK), 32))


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, geometry: Geometry) -> None:
    """Fill dw [shares, n, out, r, s, c / groups] with the gradient of the kernels, one partial sum per share."""
    if geometry.depthwise:
        depthwise.weight_gradient(x, dy, dw, geometry)
        return
    if sweep.sweeps(x, dy.shape[4], geometry):
        sweep.weight_gradient(x, dy, dw, geometry)
        return
    n, batch, height, width, channels = x.shape
    _, _, *side, out = dy.shape
    count, (r, s) = len(dw), geometry.kernel
    blocks, together = _of_groups(geometry.groups, channels, out)
    inner, outer = channels // blocks, out // blocks
    places = batch * side[0] * side[1]
    bn = _wide(outer)
    bk = min(BLOCK, max(16, triton.next_power_of_2(r * s * inner)))
    share = triton.cdiv(triton.cdiv(places, count), BLOCK) * BLOCK
    _weight_gradient[(triton.cdiv(r * s * inner, bk) * triton.cdiv(outer, bn) * blocks, count, n)](
        x, dy, dw, places, dw.stride(0), dw.stride(1), share, height, width, inner, *side, outer, r, s,
        geometry.stride, geometry.dilation, geometry.padding, blocks, together, BLOCK, bk, bn, accumulator(x),
        num_warps=4, num_stages=min(3, share // BLOCK),
    )


def _of_groups(groups: int, channels: int, out: int) -> Pair:
    """Number of blocks of groups, and of groups in a block."""
    most = max(1, NARROW * groups // max(channels, out))
    together = max(count for count in range(1, min(groups, most) + 1) if groups % count == 0)
    return groups // together, together


def _columns(taps: int, channels: int, most: int) -> int:
    """Number of columns of the left operand per block; all from one tap if the number of channels allows."""
    if channels % 16 == 0:
        return min(most, channels & -channels)
    return min(most, max(16, int(triton.next_power_of_2(taps * channels))))
