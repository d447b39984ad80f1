"""Convolutions of n models at once with stride 1, for few channels: each row of an image is read once, not R · S times.

Images are [n, batch, height, width, channels], contiguous. A program sweeps down the rows of some images. It multiplies
each row by all R rows of the kernel, and adds the products to the R rows of the output that the row belongs to.

Along a row, G neighbouring output pixels (a group) are one row of the matrix product: the left operand is the window of
G + S − 1 input pixels below them, whose channels are contiguous in memory; the right operand is a banded matrix, with the
kernel's row of S taps shifted by one pixel from one pixel of the group to the next.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.gradients.kernels.accumulators import accumulator


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


@triton.jit
def _sweep(
    x, w, later, y, batch, stride, ROWS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, BACK: tl.constexpr,
    G: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, LATER: tl.constexpr,
):
    """Rows of y: pixel (i, j) sums w's tap (r, s) times x's pixel (i − TOP + r, j − LEFT + s), plus `later` if LATER."""
    CHUNKS: tl.constexpr = ((G + S - 1) * C + BK - 1) // BK
    GROUPS: tl.constexpr = (OW + G - 1) // G
    PARTS: tl.constexpr = (OH + ROWS - 1) // ROWS
    node = tl.program_id(2).to(tl.int64)
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    first = tl.program_id(1) % PARTS * ROWS
    out = tl.program_id(1) // PARTS * BN + tl.arange(0, BN)
    image = place // GROUPS
    j = place % GROUPS * G
    k = tl.arange(0, BK)
    w += node * stride
    right = ()
    for r in tl.static_range(R):
        for chunk in tl.static_range(CHUNKS):
            right = right + (_band(w, r, chunk * BK + k, out, C, OC, R, S, G, BACK),)
    x += node * batch * (H * W * C)
    window = ((image * H + first - TOP) * W + j - LEFT)[:, None] * C + k[None, :]
    result = ((image * OH + first - (R - 1)) * OW + j)[:, None] * OC + out[None, :]
    y += node * batch * (OH * OW * OC)
    later += node * batch * (OH * OW * OC)
    known = (image < batch)[:, None]
    inside = known & (out < G * OC)[None, :] & (j[:, None] + (out // OC)[None, :] < OW)
    total = ()
    for _ in tl.static_range(R):
        total = total + (tl.zeros([BM, BN], dtype=ACC),)
    for step in range(ROWS + R - 1):
        row = first - TOP + step
        there = known & (row >= 0) & (row < H)
        for chunk in tl.static_range(CHUNKS):
            at = chunk * BK + k
            column = (j - LEFT)[:, None] + (at // C)[None, :]
            real = there & (column >= 0) & (column < W) & (at < (G + S - 1) * C)[None, :]
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
        tl.store(y + result + step * (OW * OC), value.to(y.dtype.element_ty), mask=finished)
        total = (tl.zeros([BM, BN], dtype=ACC),) + total[:R - 1]


@triton.jit
def _sweep_weights(
    x, dy, dw, batch, of_share, of_node, ROWS: tl.constexpr, BLOCKS: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, PAD: tl.constexpr, G: tl.constexpr, TAPS: tl.constexpr,
    CARRY: tl.constexpr, BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):
    """One share of dw [OC, R, S, C]: windows of x times groups of dy, summed over ROWS rows of x of some images.

    A program computes TAPS rows of the kernel.
    """
    CHUNKS: tl.constexpr = ((G + S - 1) * C + BK - 1) // BK
    GROUPS: tl.constexpr = (OW + G - 1) // G
    PARTS: tl.constexpr = (H + ROWS - 1) // ROWS
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    dy += node * batch * (OH * OW * OC)
    dw += tl.program_id(1).to(tl.int64) * of_share + node * of_node
    tap = tl.program_id(0) % (R // TAPS) * TAPS
    out = tl.program_id(0) // (R // TAPS) * BN + tl.arange(0, BN)
    first = tl.program_id(1) % PARTS * ROWS
    k = tl.arange(0, BK)
    total = ()
    for _ in tl.static_range(TAPS * CHUNKS):
        total = total + (tl.zeros([BK, BN], dtype=ACC),)
    for block in range(BLOCKS):
        place = (tl.program_id(1) // PARTS * BLOCKS + block) * BP + tl.arange(0, BP)
        image = place // GROUPS
        j = place % GROUPS * G
        known = (image < batch)[:, None]
        window = ((image * H + first) * W + j - PAD)[:, None] * C + k[None, :]
        group = ((image * OH + first + PAD - tap) * OW + j)[:, None] * OC + out[None, :]
        inside = known & (out < G * OC)[None, :] & (j[:, None] + (out // OC)[None, :] < OW)
        recent = ()
        if CARRY:
            for r in tl.static_range(1, TAPS):
                row = first + PAD - tap - r
                there = inside & (row >= 0) & (row < OH)
                recent = recent + (tl.load(dy + group - r * (OW * OC), mask=there, other=0.0),)
        for step in range(ROWS):
            left = ()
            for chunk in tl.static_range(CHUNKS):
                at = chunk * BK + k
                column = (j - PAD)[:, None] + (at // C)[None, :]
                real = known & (first + step < H) & (column >= 0) & (column < W) & (at < (G + S - 1) * C)[None, :]
                left = left + (tl.load(x + window + step * (W * C) + chunk * BK, mask=real, other=0.0),)
            sums = ()
            if CARRY:
                row = first + step + PAD - tap
                there = inside & (row >= 0) & (row < OH)
                recent = (tl.load(dy + group + step * (OW * OC), mask=there, other=0.0),) + recent
            for r in tl.static_range(TAPS):
                row = first + step + PAD - tap - r
                there = inside & (row >= 0) & (row < OH)
                if CARRY:
                    right = recent[r]
                else:
                    right = tl.load(dy + group + (step - r) * (OW * OC), mask=there, other=0.0)
                for chunk in tl.static_range(CHUNKS):
                    product = tl.dot(
                        left[chunk].T, right, total[r * CHUNKS + chunk], input_precision="ieee", out_dtype=ACC
                    )
                    sums = sums + (product,)
            total = sums
            if CARRY:
                recent = recent[:TAPS - 1]
    for r in tl.static_range(TAPS):
        dw_r = dw + (tap + r) * (S * C)
        for chunk in tl.static_range(CHUNKS):
            if G == 1:
                at = chunk * BK + k
                where = at[:, None] + out[None, :] * (R * S * C)
                tl.store(dw_r + where, total[r * CHUNKS + chunk], mask=(at < S * C)[:, None] & (out < OC)[None, :])
            else:
                _store_taps(dw_r, total[r], C, OC, R, S, G)


@triton.jit
def _store_taps(dw, products, C: tl.constexpr, OC: tl.constexpr, R: tl.constexpr, S: tl.constexpr, G: tl.constexpr):
    """Sum the products [pixel of the window, C, pixel of the group, OC] of equal distance: these are a tap's."""
    products = products.reshape(G + S - 1, C, G, OC)
    distance = tl.arange(0, G + S - 1)[:, None, None, None] - tl.arange(0, G)[None, None, :, None]
    for s in tl.static_range(S):
        value = tl.sum(tl.sum(tl.where(distance == s, products, 0.0), axis=2), axis=0)
        where = s * C + tl.arange(0, C)[:, None] + tl.arange(0, OC)[None, :] * (R * S * C)
        tl.store(dw + where, value)
