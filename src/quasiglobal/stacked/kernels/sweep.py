"""Convolutions of n models at once with stride 1 and few channels, which read each row of an image once.

Images are [n, batch, height, width, channels], contiguous. With few channels, `_convolution` is as slow as its reads:
it reads each pixel R · S times. Here a program sweeps down the rows of some images. It multiplies each row by all R
rows of the kernel, and adds the products to the R rows of the output that the row belongs to.

Along a row, G neighbouring output pixels (a group) are one row of the matrix product. The left operand is the window of
G + S − 1 input pixels below them, whose channels are contiguous in memory. The right operand is a banded matrix: the
kernel's row of S taps, shifted by one pixel from one pixel of the group to the next.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.stacked.kernels.operations import Geometry, Pair
from quasiglobal.stacked.kernels.shared import PROGRAMS, Epilogue, accumulator, launched, positive


@triton.jit
def _band(
    w, r: tl.constexpr, k, out, C: tl.constexpr, OC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, G: tl.constexpr,
    BACK: tl.constexpr,
):
    """The right operand: row r of a kernel [OC, R, S, C] (BACK: flipped, [C, R, S, OC]) as a banded matrix."""
    pixel = out // OC
    k = k[:, None] - (pixel * C)[None, :]
    if BACK:
        at = (k % C * (R * S) + R * S - 1 - r * S - k // C) * OC + (out - pixel * OC)[None, :]
    else:
        at = (out - pixel * OC)[None, :] * (R * S * C) + r * (S * C) + k
    return tl.load(w + at, mask=(k >= 0) & (k < S * C) & (out < G * OC)[None, :], other=0.0)


@launched
def _sweep(
    x, w, y, later, bias, batch, stride, of_bias,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, BACK: tl.constexpr, G: tl.constexpr, ROWS: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
    LATER: tl.constexpr, BIAS: tl.constexpr, RELU: tl.constexpr,
):
    """ROWS rows of y, whose pixel (i, j) sums w's tap (r, s) times x's pixel (i − PAD[0] + r, j − PAD[1] + s).

    LATER, BIAS and RELU are parts of the `Epilogue`.
    """
    WINDOW: tl.constexpr = (G + S - 1) * C
    CHUNKS: tl.constexpr = (WINDOW + BK - 1) // BK
    GROUPS: tl.constexpr = (OW + G - 1) // G
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    y += node * batch * (OH * OW * OC)
    later += node * batch * (OH * OW * OC)
    w += node * stride
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) * ROWS
    image = place // GROUPS
    j = place % GROUPS * G
    k = tl.arange(0, BK)
    out = tl.arange(0, BN)
    right = ()
    for r in tl.static_range(R):
        for chunk in tl.static_range(CHUNKS):
            right = right + (_band(w, r, chunk * BK + k, out, C, OC, R, S, G, BACK),)
    window = ((image * H + first - PAD[0]) * W + j - PAD[1])[:, None] * C + k[None, :]
    result = ((image * OH + first - (R - 1)) * OW + j)[:, None] * OC + out[None, :]
    known = (image < batch)[:, None]
    inside = known & (out < G * OC)[None, :] & (j[:, None] + (out // OC)[None, :] < OW)
    if BIAS:
        offset = tl.load(bias + node * of_bias + out % OC).to(ACC)
    total = (tl.zeros([BM, BN], dtype=ACC),) * R            # total[r]: the row of y whose next row of the kernel is r
    for step in range(ROWS + R - 1):
        row = first - PAD[0] + step
        there = known & (row >= 0) & (row < H)
        for chunk in tl.static_range(CHUNKS):
            at = chunk * BK + k
            column = (j - PAD[1])[:, None] + (at // C)[None, :]
            real = there & (column >= 0) & (column < W) & (at < WINDOW)[None, :]
            left = tl.load(x + window + step * (W * C) + chunk * BK, mask=real, other=0.0)
            sums = ()
            for r in tl.static_range(R):
                product = tl.dot(left, right[r * CHUNKS + chunk], total[r], input_precision="ieee", out_dtype=ACC)
                sums = sums + (product,)
            total = sums
        finished = inside & (step >= R - 1) & (first + step - (R - 1) < OH)
        value = total[R - 1]
        if LATER:
            value += tl.load(later + result + step * (OW * OC), mask=finished, other=0.0).to(ACC)
        if BIAS:
            value += offset[None, :]
        if RELU:
            value = positive(value)
        tl.store(y + result + step * (OW * OC), value.to(y.dtype.element_ty), mask=finished)
        total = (tl.zeros([BM, BN], dtype=ACC),) + total[:R - 1]


@launched
def _sweep_weights(
    x, dy, dw, batch, of_share, of_node, SWEEPS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, ROWS: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):
    """One share of dw [OC, R, S, C]: SWEEPS sweeps, each over ROWS rows of x and BP columns of images."""
    PARTS: tl.constexpr = (H + ROWS - 1) // ROWS
    node = tl.program_id(1).to(tl.int64)
    x += node * batch * (H * W * C)
    dy += node * batch * (OH * OW * OC)
    dw += tl.program_id(0).to(tl.int64) * of_share + node * of_node
    k = tl.arange(0, BK)
    out = tl.arange(0, BN)
    total = (tl.zeros([BK, BN], dtype=ACC),) * R            # one row of the kernel each
    for sweep in range(SWEEPS):
        which = tl.program_id(0) * SWEEPS + sweep
        first = which % PARTS * ROWS
        place = which // PARTS * BP + tl.arange(0, BP)
        image = place // OW
        j = place % OW
        known = (image < batch)[:, None]
        column = (j - PAD[1])[:, None] + (k // C)[None, :]
        real = known & (column >= 0) & (column < W) & (k < S * C)[None, :]
        window = ((image * H + first) * W + j - PAD[1])[:, None] * C + k[None, :]
        pixels = ((image * OH + first + PAD[0]) * OW + j)[:, None] * OC + out[None, :]
        inside = known & (out < OC)[None, :]
        for step in range(ROWS):
            left = tl.load(x + window + step * (W * C), mask=real & (first + step < H), other=0.0)
            sums = ()
            for r in tl.static_range(R):
                row = first + step + PAD[0] - r
                there = inside & (row >= 0) & (row < OH)
                right = tl.load(dy + pixels + (step - r) * (OW * OC), mask=there, other=0.0)
                sums = sums + (tl.dot(left.T, right, total[r], input_precision="ieee", out_dtype=ACC),)
            total = sums
    where = k[:, None] + out[None, :] * (R * S * C)
    for r in tl.static_range(R):
        tl.store(dw + where + r * (S * C), total[r], mask=(k < S * C)[:, None] & (out < OC)[None, :])


FEWEST, MOST = 16, 32
"""Numbers of channels for which sweeping was the fastest on an H200."""

WARPS, STAGES = 4, 3
"""Warps per block, and stages of the pipeline of loads."""


def suits(geometry: Geometry, inner: int, outer: int) -> bool:
    """Whether a convolution with these channels in and out has few channels and a small kernel.

    All rows of the kernel and their sums stay on the multiprocessor.
    """
    plain = geometry.stride == geometry.dilation == (1, 1) and geometry.groups == 1
    small = 1 < geometry.kernel[0] <= 3 and geometry.kernel[1] <= 3
    return plain and small and min(inner, outer) >= FEWEST and max(inner, outer) <= MOST


def sweeps(x: Tensor, outer: int, geometry: Geometry, back: bool = False) -> bool:
    """Whether to sweep for a convolution of x to this number of channels; `back` for the gradient of its input."""
    images = len(x) * x.shape[1] if x.is_cuda else MANY     # in the interpreter, speed is no matter
    enough = images >= (MANY if back and outer > 16 else FEW)
    return enough and suits(geometry, x.shape[-1], outer)


FEW, MANY = 256, 1024
"""Images of all models from which sweeping is faster: with fewer, it has too few programs to fill the GPU.

`MANY` for the gradients of inputs with more than 16 channels, and for one pixel at a time instead of two.
"""


def launch(x: Tensor, w: Tensor, y: Tensor, epilogue: Epilogue, geometry: Geometry, back: bool) -> Tensor:
    """Fill y with a convolution or, if `back`, with the gradient of a convolution's input."""
    n, _, *source = x.shape
    _, batch, height, width, channels = y.shape
    group = 2 if channels <= 16 or (n * batch < MANY and not back) else 1
    window = (group + geometry.kernel[1] - 1) * source[2]
    bn = max(16, triton.next_power_of_2(group * channels))
    bk = triton.next_power_of_2(window) if group == 2 else 32
    bm, rows = 64, min(8, height)
    grid = triton.cdiv(batch * triton.cdiv(width, group), bm), triton.cdiv(height, rows), n
    tensors, of_bias, parts = epilogue.arguments(y)
    _sweep[grid](
        x, w, y, *tensors, batch, w.stride(0), of_bias, *source, height, width, channels, *geometry.kernel,
        geometry.moves(back)[-1], back, group, rows, bm, bk, bn, accumulator(x), *parts,
        num_warps=WARPS, num_stages=STAGES,
    )
    return y


def shares(n: int, places: int, channels: int) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradient of a weight."""
    rows, columns = _part(channels)
    count = max(1, places // (rows * columns))
    return int(triton.cdiv(count, triton.cdiv(count, max(1, min(PROGRAMS // n, 32)))))


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, geometry: Geometry) -> None:
    """Fill dw [shares, n, out, r, s, in] with the gradient of the kernels, one partial sum per share."""
    n, batch, height, width, channels = x.shape
    _, _, *side, out = dy.shape
    rows, bp = _part(channels)
    rows = min(rows, height)
    bk = triton.next_power_of_2(geometry.kernel[1] * channels)
    bn = triton.next_power_of_2(out)
    each = triton.cdiv(triton.cdiv(height, rows) * triton.cdiv(batch * side[1], bp), len(dw))
    _sweep_weights[(len(dw), n)](
        x, dy, dw, batch, dw.stride(0), dw.stride(1), each, height, width, channels, *side, out, *geometry.kernel,
        geometry.padding, rows, bp, bk, bn, accumulator(x), num_warps=WARPS, num_stages=STAGES,
    )


def _part(channels: int) -> Pair:
    """Rows and columns per sweep for the weight gradient."""
    return (16, 128) if channels <= 16 else (8, 64)
