"""Rows in pieces: the models of an engine as tensors that belong to somebody else, such as a network's parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


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
        return read(self.pieces)

    def cut(self, blocks: Sequence[slice]) -> list[list[Tensor]]:
        """Return the parts of each block as views; the blocks are in order, without gaps between them."""
        found: list[list[Tensor]] = [[] for _ in blocks]
        begin, k = 0, 0
        for piece in self.pieces:
            end = begin + piece.shape[1]
            while k < len(blocks) and blocks[k].start < end:
                first, last = max(blocks[k].start, begin), min(blocks[k].stop, end)
                if first < last:
                    found[k].append(piece[:, first - begin : last - begin])
                if blocks[k].stop > end:                    # the block goes on in the next piece
                    break
                k += 1
            begin = end
        return found


def read(parts: Sequence[Tensor]) -> Tensor:
    """Return parts side by side: a view of a single one, else a copy."""
    return parts[0] if len(parts) == 1 else torch.cat([*parts], dim=1)


def write(parts: Sequence[Tensor], values: Tensor) -> None:
    """Overwrite parts side by side; values that `read` returned as a view are already there."""
    if len(parts) > 1:
        torch._foreach_copy_([*parts], torch.split(values, [part.shape[1] for part in parts], dim=1))
    elif values.data_ptr() != parts[0].data_ptr():
        parts[0].copy_(values)
