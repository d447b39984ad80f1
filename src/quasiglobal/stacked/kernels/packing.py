"""Parameters in the kernels' order: pack weights from rows [n, d], collect gradients into them."""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor, fx

from quasiglobal.stacked.kernels.shared import launched


class Region:
    """The parameters of some operations, in the kernels' order, and the partial sums (shares) of their gradients."""

    def __init__(self, operations: list[tuple[fx.Node, Tensor, int]]) -> None:
        """Accept each operation with its columns of x and its number of shares."""
        end = 0
        self.places: dict[fx.Node, tuple[slice, torch.Size, int]] = {}
        for node, own, shares in operations:
            begin, end = end, end + own.numel()
            self.places[node] = slice(begin, end), own.shape, shares
        self.columns = torch.cat([own.flatten() for _, own, _ in operations]).int()
        counts = torch.cat([torch.full_like(own, shares).flatten() for _, own, shares in operations]).int()
        self.most = max(shares for *_, shares in operations)
        places = self.columns.argsort().int()               # so that g is written in column order
        self.how = self.columns[places], places, counts[places]

    def open(self, x: Tensor) -> None:
        """Begin a step."""
        self.new_shares = partial(x.new_empty, self.most, len(x), len(self.columns))
        self.shares: Tensor | None = None
        self.missing = set(self.places)

    def own_shares(self, node: fx.Node) -> Tensor:
        """Shares [shares, n, …] of an operation, to be filled."""
        if self.shares is None:                             # allocated by the backward pass: evaluation has none
            self.shares = self.new_shares()
        self.missing.discard(node)
        columns, shape, shares = self.places[node]
        return self.shares[:shares, :, columns].view(shares, -1, *shape)

    def close(self, g: Tensor) -> None:
        """Sum the shares into g; operations without a gradient get 0."""
        for node in list(self.missing):
            self.own_shares(node).zero_()
        if self.shares is not None:
            collect(self.shares, *self.how, g)


class WeightRegion(Region):
    """The weights of convolutions, which the kernels read in their order (`Geometry.order`) and in autocast's type."""

    def open(self, x: Tensor) -> None:
        super().open(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        self.values = pack(x, self.columns, dtype)

    def own_values(self, node: fx.Node) -> Tensor:
        """Weights [n, …] of a convolution, in the kernels' order."""
        columns, shape, _ = self.places[node]
        return self.values[:, columns].view(-1, *shape)


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
