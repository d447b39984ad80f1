"""Rows in pieces: the models of an engine as tensors that belong to somebody else, such as a network's parameters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

Views = Tensor | list[Tensor]
"""Some columns of a tensor in pieces, as a view of a piece, or as views of several."""


class ModelRows:
    """A tensor [k, d] in pieces side by side, such as the parameters of a model: read and written by blocks of columns.

    >>> rows = ModelRows([torch.zeros(1, 2), torch.ones(1, 3)])
    >>> first, second = rows.cut([slice(0, 1), slice(1, 5)])
    >>> write(second, torch.tensor([[5.0, 6.0, 7.0, 8.0]]))
    >>> rows.whole()
    tensor([[0., 5., 6., 7., 8.]])
    """

    def __init__(self, pieces: Sequence[Tensor]) -> None:
        self.pieces = pieces

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and of columns."""
        return len(self.pieces[0]), sum(piece.shape[1] for piece in self.pieces)

    def whole(self) -> Tensor:
        """Return all columns: the piece if there is one, else a copy."""
        return read(self.all)

    @property
    def all(self) -> Views:
        """All columns as one part."""
        return self.pieces[0] if len(self.pieces) == 1 else [*self.pieces]

    def cut(self, blocks: Sequence[slice]) -> list[Views]:
        """Return the part of each block; the blocks are in order, without gaps between them."""
        found: list[Views] = []
        ends = blocks[0].start, *(block.stop for block in blocks)
        for k, skipped, block, sizes in _parts(tuple([piece.shape[1] for piece in self.pieces]), ends):
            views = self.pieces[k].narrow(1, skipped, sum(sizes)).split_with_sizes(sizes, dim=1)
            if block < len(found):                          # it goes on from an earlier piece
                before = found[block]
                found[block] = [*(before if isinstance(before, list) else [before]), views[0]]
                views = views[1:]
            found += views
        return found


@lru_cache(maxsize=16)
def _parts(widths: Sequence[int], ends: Sequence[int]) -> list[tuple[int, int, int, list[int]]]:
    """For each piece that blocks between these ends cut: its number, the columns before the first block, the number of
    the first block, and the widths of its parts."""
    found, begin = [], 0
    for k, width in enumerate(widths):
        low, high = max(begin, ends[0]), min(begin + width, ends[-1])
        if low < high:
            cuts = [low, *(end for end in ends if low < end < high), high]
            sizes = [last - first for first, last in itertools.pairwise(cuts)]
            found.append((k, low - begin, bisect_right(ends, low) - 1, sizes))
        begin += width
    return found


def read(part: Views) -> Tensor:
    """Return all columns of a part: a view, or a copy of several."""
    return part if isinstance(part, Tensor) else torch.cat(part, dim=1)


def write(part: Views, values: Tensor) -> None:
    """Overwrite a part; values that `read` returned as a view are already there."""
    if not isinstance(part, Tensor):
        torch._foreach_copy_(part, torch.split(values, [view.shape[1] for view in part], dim=1))
    elif values.data_ptr() != part.data_ptr():
        part.copy_(values)
