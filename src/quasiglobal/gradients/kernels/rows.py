"""Copy between rows of parameters [n, d] and the kernels' parameter order: pack weights, collect gradients."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _pack(x, columns, y, d, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns + k, mask=k < size, other=0)
    value = tl.load(x + row * d + column, mask=k < size, other=0.0)
    tl.store(y + row * size + k, value.to(y.dtype.element_ty), mask=k < size)


def pack(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather these columns of x [n, d], in this order and dtype."""
    y = torch.empty(len(x), len(columns), dtype=dtype, device=x.device)
    _pack[(triton.cdiv(len(columns), 1024), len(x))](x, columns, y, x.stride(0), len(columns), 1024)
    return y


@triton.jit
def _collect(
    shares, columns, places, counts, g, d, size, MOST: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + k, mask=k < size, other=0)
    step = tl.num_programs(1).to(tl.int64) * size
    shares += row * size + tl.load(places + k, mask=k < size, other=0)
    total = tl.load(shares, mask=count > 0, other=0.0)
    for share in tl.static_range(1, FEW):
        total += tl.load(shares + share * step, mask=share < count, other=0.0)
    if tl.max(count, axis=0) > FEW:
        for more in range(FEW, MOST, 8):
            for i in tl.static_range(8):                    # 8 loads in flight
                total += tl.load(shares + (more + i) * step, mask=more + i < count, other=0.0)
    tl.store(g + row * d + tl.load(columns + k, mask=k < size, other=0), total, mask=k < size)


def collect(shares: Tensor, columns: Tensor, places: Tensor, counts: Tensor, g: Tensor) -> None:
    """Sum gradient shares [most, n, size] into g [n, d]: g[:, columns[i]] = sum of shares[:counts[i], :, places[i]]."""
    most, n, size = shares.shape
    grid = triton.cdiv(size, 1024), n
    _collect[grid](shares, columns, places, counts, g, g.stride(0), size, most, min(most, 4), 1024)
