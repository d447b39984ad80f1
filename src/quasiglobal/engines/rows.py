"""Rows in pieces: the models of an engine as tensors that belong to somebody else, such as a network's parameters."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


class Rows:
    """A tensor [k, d] in pieces side by side, such as the parameters of a model: read and written by columns.

    >>> rows = Rows([torch.zeros(1, 2), torch.ones(1, 3)])
    >>> rows.write(slice(1, 4), torch.tensor([[5.0, 6.0, 7.0]]))
    >>> rows.read(slice(0, 5))
    tensor([[0., 5., 6., 7., 1.]])
    """

    def __init__(self, pieces: Sequence[Tensor], d: int | None = None) -> None:
        """A single piece may also broadcast to d columns: it is the same for all columns."""
        self.pieces = pieces
        self.same = d is not None and (pieces[0].ndim == 0 or pieces[0].shape[-1] != d)
        self.ends = [0] if self.same else list(itertools.accumulate(piece.shape[-1] for piece in pieces))

    @property
    def shape(self) -> tuple[int, ...]:
        """Numbers of rows and of columns."""
        return tuple(self.pieces[0].shape) if self.same else (*self.pieces[0].shape[:-1], self.ends[-1])

    def whole(self) -> Tensor:
        """Return all columns."""
        return self.read(slice(0, self.ends[-1]))

    def view(self, columns: slice) -> Tensor | None:
        """Return these columns as a view; None if they are in several pieces."""
        if self.same:
            return self.pieces[0]
        parts = self._parts(columns)
        return parts[0] if len(parts) == 1 else None

    def read(self, columns: slice) -> Tensor:
        """Return these columns: a view if they are in one piece, else a copy."""
        view = self.view(columns)
        return torch.cat(self._parts(columns), dim=1) if view is None else view

    def write(self, columns: slice, values: Tensor) -> None:
        """Overwrite these columns; values that `read` returned as a view are already there."""
        parts = self._parts(columns)
        if len(parts) > 1:
            torch._foreach_copy_(parts, torch.split(values, [part.shape[1] for part in parts], dim=1))
        elif values.data_ptr() != parts[0].data_ptr():
            parts[0].copy_(values)

    def _parts(self, columns: slice) -> list[Tensor]:
        first = bisect_right(self.ends, columns.start)
        parts = []
        for piece, end in zip(self.pieces[first:], self.ends[first:], strict=True):
            begin = end - piece.shape[-1]
            if begin >= columns.stop:
                break
            if piece.shape[-1]:
                parts.append(piece[..., max(columns.start - begin, 0) : columns.stop - begin])
        return parts
