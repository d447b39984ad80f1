"""Depthwise convolutions of n models at once: forward, and the gradients of inputs and weights.

Images are [n, batch, height, width, channels], contiguous; kernels are [n, 1, R, S, channels out]. A thread has some
channels of a strip, T consecutive pixels of an image row: it loads a pixel of the input once for all taps of a row of
the kernel. With `multiplier` m, output channel c reads input channel c // m. UP, DOWN, STEP, DILATION and PAD are
pairs (rows, columns), with the meaning that they have in convolution.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.stacked.kernels.operations import Geometry
from quasiglobal.stacked.kernels.shared import Epilogue, accumulator, first_tap, launched, positive


@launched
def _depthwise(
    x, w, y, later, bias, batch, stride, of_bias,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr, STEP: tl.constexpr,
    DILATION: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr,
    T: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
    LATER: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
):
    """One block of strips × channels of y, as `_convolution`; BACK reads w flipped. T is a multiple of DOWN[1]."""
    STRIPS: tl.constexpr = (OW + T - 1) // T
    HU: tl.constexpr = (OH + DOWN[0] - 1) // DOWN[0]
    FIRST: tl.constexpr = -(PAD[1] // DOWN[1])
    LAST: tl.constexpr = ((T - 1) * UP[1] - PAD[1] + (S - 1) * DILATION[1]) // DOWN[1]
    EACH: tl.constexpr = C // OC if BACK else OC // C
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    y += node * batch * (OH * OW * OC)
    later += node * batch * (OH * OW * OC)
    w += node * stride
    kind = tl.program_id(1) % DOWN[0]
    c = (tl.program_id(1) // DOWN[0] * BC + tl.arange(0, BC))[None, :]
    place = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    image = place // (HU * STRIPS)
    i = place // STRIPS % HU * DOWN[0] + kind
    j = place % STRIPS * T
    known = (image < batch) & (i < OH)
    where = ((image * OH + i) * OW + j) * OC + c
    total = (tl.zeros([BP, BC], dtype=ACC),) * T
    r0 = first_tap(PAD[0] - kind, DOWN[0], DILATION[0], R)
    for u in range((R + STEP[0] - 1) // STEP[0]):
        r = r0 + u * STEP[0]
        row = (i * UP[0] - PAD[0] + r * DILATION[0]) // DOWN[0]
        column = j * UP[1] // DOWN[1]
        there = known & (row >= 0) & (row < H) & (r < R) & (c < OC)
        for each in tl.static_range(EACH if BACK else 1):
            inner, outer = c, c
            if BACK:
                inner, outer = c * EACH + each, c * EACH + each
            elif EACH > 1:
                inner = c // EACH
            taps = ()
            for s in tl.static_range(S):
                at = (R - 1 - r) * S + S - 1 - s if BACK else r * S + s
                at = at * (C if BACK else OC) + outer + place * 0   # one load per thread: no exchange between threads
                taps = taps + (tl.load(w + at, mask=(c < OC) & (r < R), other=0.0).to(ACC),)
            pixels = ()
            first = x + ((image * H + row) * W + column) * C + inner
            for v in tl.static_range(FIRST, LAST + 1):
                inside = there & (column >= -v) & (column < W - v)
                pixels = pixels + (tl.load(first + v * C, mask=inside, other=0.0).to(ACC),)
            after = ()
            for t in tl.static_range(T):
                result = total[t]
                for s in tl.static_range(S):
                    if (t * UP[1] - PAD[1] + s * DILATION[1]) % DOWN[1] == 0:
                        result += pixels[(t * UP[1] - PAD[1] + s * DILATION[1]) // DOWN[1] - FIRST] * taps[s]
                after = after + (result,)
            total = after
    if BIAS:
        offset = tl.load(bias + node * of_bias + c, mask=c < OC, other=0.0).to(ACC)
    for t in tl.static_range(T):
        inside = known & (j + t < OW) & (c < OC)
        result = total[t]
        if LATER:
            result += tl.load(later + where + t * OC, mask=inside, other=0.0).to(ACC)
        if BIAS:
            result += offset
        if RELU:
            result = positive(result)
        tl.store(y + where + t * OC, result.to(y.dtype.element_ty), mask=inside)


@launched
def _depthwise_weights(
    x, dy, dw, batch, of_share, of_node, SHARE: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DILATION: tl.constexpr, PAD: tl.constexpr,
    T: tl.constexpr, ROWS: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """dw[tap, channel] of ROWS rows of the kernel, summed over one share of the strips of a model's images."""
    STRIPS: tl.constexpr = (OW + T - 1) // T
    PARTS: tl.constexpr = (R + ROWS - 1) // ROWS
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    dy += node * batch * (OH * OW * OC)
    dw += tl.program_id(1).to(tl.int64) * of_share + node * of_node
    r0 = tl.program_id(0) % PARTS * ROWS
    c = (tl.program_id(0) // PARTS * BC + tl.arange(0, BC))[None, :]
    inner = c // (OC // C) if OC > C else c
    total = (tl.zeros([BP, BC], dtype=ACC),) * (ROWS * S)
    for p in range(0, SHARE, BP):
        place = (tl.program_id(1) * SHARE + p + tl.arange(0, BP))[:, None]
        image = place // (OH * STRIPS)
        i = place // STRIPS % OH
        j = place % STRIPS * T
        known = (image < batch) & (c < OC)
        pixels = ()
        first = dy + ((image * OH + i) * OW + j) * OC + c
        for t in tl.static_range(T):
            pixels = pixels + (tl.load(first + t * OC, mask=known & (j < OW - t), other=0.0).to(ACC),)
        rows = ()
        for u in tl.static_range(ROWS):
            row = i * UP[0] - PAD[0] + (r0 + u) * DILATION[0]
            there = known & (row >= 0) & (row < H) & (r0 + u < R)
            column = j * UP[1] - PAD[1]
            first = x + ((image * H + row) * W + column) * C + inner
            values = ()
            for v in tl.static_range((T - 1) * UP[1] + (S - 1) * DILATION[1] + 1):
                inside = there & (column >= -v) & (column < W - v)
                values = values + (tl.load(first + v * C, mask=inside, other=0.0).to(ACC),)
            for s in tl.static_range(S):
                result = total[u * S + s]
                for t in tl.static_range(T):
                    result += values[t * UP[1] + s * DILATION[1]] * pixels[t]
                rows = rows + (result,)
        total = rows
    for u in tl.static_range(ROWS):
        for s in tl.static_range(S):
            at = ((r0 + u) * S + s) * OC + c
            tl.store(dw + at, tl.sum(total[u * S + s], axis=0)[None, :], mask=(c < OC) & (r0 + u < R))


def launch(x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, geometry: Geometry, back: bool) -> Tensor:
    """Fill y with a convolution or, if `back`, with the gradient of a convolution's input."""
    n, _, *source = x.shape
    _, batch, height, width, channels = y.shape
    bc = _channels(channels)
    up, down, step, padding = geometry.moves(back)
    longest, together = (16, 4) if up[1] == 1 else (8, 8)   # fastest of the tested settings on an H200
    strip = triton.cdiv(_strip(width, longest), down[1]) * down[1]
    bp = max(1, 32 * WARPS * together // bc)
    places = batch * triton.cdiv(height, down[0]) * triton.cdiv(width, strip)
    tensors, of_bias, parts = epilogue.arguments(y)
    _depthwise[(triton.cdiv(places, bp), triton.cdiv(channels, bc) * down[0], n)](
        x, w, y, *tensors, batch, w.stride(0), of_bias, *source, height, width, channels, *geometry.kernel, up, down,
        step, geometry.dilation, padding, back, strip, bp, bc, accumulator(x), *parts, num_warps=WARPS,
    )
    return y


WARPS = 4
"""Warps per block."""

LONGEST = 8
"""Pixels of a strip of the weight gradient, at most."""

TOGETHER = 4
"""Channels per thread of the weight gradient, which are loaded together."""

SUMS = 112
"""Sums per thread of the weight gradient for a whole kernel, at most: taps × channels."""

PROGRAMS, PROGRAMS_OF_ROWS = 264, 1056
"""Number of blocks of the weight gradient that fill the GPU, with whole kernels and with single rows."""


def shares(n: int, places: int, weight: torch.Size) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradient of a weight [1, r, s, out]."""
    _, r, s, channels = weight
    rows, bc = _rows(r, s), _channels(channels)
    programs = int(n * triton.cdiv(channels, bc) * triton.cdiv(r, rows))
    most = PROGRAMS if rows == r else PROGRAMS_OF_ROWS
    return max(1, min(most // programs, places * bc // (64 * 32 * WARPS * TOGETHER), 32))


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, geometry: Geometry) -> None:
    """Fill dw [shares, n, 1, r, s, out] with the gradient of the kernels, one partial sum per share."""
    n, batch, *size = x.shape
    _, _, height, width, channels = dy.shape
    rows, bc = _rows(*geometry.kernel), _channels(channels)
    strip = _strip(width, LONGEST if geometry.stride[1] == 1 else LONGEST // 2)
    bp = max(1, 32 * WARPS * TOGETHER // bc)
    share = triton.cdiv(triton.cdiv(batch * height * triton.cdiv(width, strip), len(dw)), bp) * bp
    _depthwise_weights[(triton.cdiv(channels, bc) * triton.cdiv(geometry.kernel[0], rows), len(dw), n)](
        x, dy, dw, batch, dw.stride(0), dw.stride(1), share, *size, height, width, channels, *geometry.kernel,
        geometry.stride, geometry.dilation, geometry.padding, strip, rows, bp, bc, accumulator(x), num_warps=WARPS,
    )


def _strip(width: int, longest: int) -> int:
    """Pixels per strip: a row of an image in equal strips."""
    return int(triton.cdiv(width, triton.cdiv(width, longest)))


def _channels(channels: int) -> int:
    """Channels per block: as few as possible beyond the last one."""
    return min((64, 32, 16), key=lambda size: triton.cdiv(channels, size) * size)


def _rows(r: int, s: int) -> int:
    """Rows of the kernel per block of the weight gradient: all of a small kernel, or one."""
    return r if r * s * TOGETHER <= SUMS else 1
