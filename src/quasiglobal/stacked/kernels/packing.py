"""Copy between rows of parameters [n, d] and the kernels' parameter order: pack weights, collect gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.stacked.kernels.shared import launched


@launched
def _pack(x, columns, y, n, d, size, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS rows of a block of columns, whose indices are loaded once."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns + k, mask=k < size, other=0)
    row = (tl.program_id(1) * ROWS).to(tl.int64)
    values = ()
    for i in tl.static_range(ROWS):                         # these loads are in flight together
        values = values + (tl.load(x + (row + i) * d + column, mask=(k < size) & (row + i < n), other=0.0),)
    for i in tl.static_range(ROWS):
        tl.store(y + (row + i) * size + k, values[i].to(y.dtype.element_ty), mask=(k < size) & (row + i < n))


def pack(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather these columns of x [n, d], in this order and dtype."""
    n, size = len(x), len(columns)
    y = torch.empty(n, size, dtype=dtype, device=x.device)
    block, rows = 512, 4                                    # fastest of the tested settings on an H200
    _pack[triton.cdiv(size, block), triton.cdiv(n, rows)](
        x, columns, y, n, x.stride(0), size, rows, block, num_warps=block // 32
    )
    return y


@launched
def _collect(
    shares, columns, places, counts, g, n, d, size, step, AHEAD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """ROWS rows of a block of columns, whose indices are loaded once; stops after the block's last share."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + k, mask=k < size, other=0)
    place = tl.load(places + k, mask=k < size, other=0)
    column = tl.load(columns + k, mask=k < size, other=0)
    row = (tl.program_id(1) * ROWS).to(tl.int64)
    total = (tl.zeros([BLOCK], dtype=shares.dtype.element_ty),) * ROWS
    most = tl.max(count, axis=0)
    first = most * 0
    while first < most:
        for ahead in tl.static_range(AHEAD):                # these loads are in flight together, for all rows
            own = shares + (first + ahead).to(tl.int64) * step
            sums = ()
            for i in tl.static_range(ROWS):
                present = (first + ahead < count) & (row + i < n)
                sums = sums + (total[i] + tl.load(own + (row + i) * size + place, mask=present, other=0.0),)
            total = sums
        first += AHEAD
    for i in tl.static_range(ROWS):
        tl.store(g + (row + i) * d + column, total[i], mask=(k < size) & (row + i < n))


def collect(shares: Tensor, columns: Tensor, places: Tensor, counts: Tensor, g: Tensor) -> None:
    """Sum gradient shares [most, n, size] into g [n, d]: g[:, columns[i]] = sum of shares[:counts[i], :, places[i]]."""
    most, n, size = shares.shape
    grid = triton.cdiv(size, BLOCK), triton.cdiv(n, ROWS)
    _collect[grid](
        shares, columns, places, counts, g, n, g.stride(0), size, shares.stride(0), min(most, AHEAD), ROWS, BLOCK,
        num_warps=WARPS,
    )


BLOCK, ROWS = 256, 8
"""Columns and rows per block of `collect`."""

WARPS = BLOCK // 32
"""One column per thread: neighbouring threads load neighbouring columns, and nothing is exchanged between threads."""

AHEAD = 2
"""Shares that `collect` loads at a time."""
