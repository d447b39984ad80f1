"""Texts as rows of ids on the device, truncated per batch as model input."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples, Indices

BUCKET = 16
"""Batch lengths are multiples of this number of tokens: few shapes, so few programs are compiled and captured."""


class Texts:
    """Padded ids [m, length] on the device; the counterpart of `Images` for texts.

    >>> texts = Texts(torch.arange(1, 41).repeat(2, 1) * torch.tensor([[1] * 20 + [0] * 20, [1] * 40]), pad=0)
    >>> texts.need(np.array([[0]])), texts.need(np.array([[0, 1]]))
    ((32,), (40,))
    >>> texts.show(torch.tensor([[0]]), 32).shape, texts.show(torch.tensor([[0]])).shape
    (torch.Size([1, 1, 32]), torch.Size([1, 1, 40]))
    """

    cost = 16
    """Memory per example in evaluation, in units of one image."""

    moving = False
    """Texts are not augmented."""

    def __init__(self, x: Tensor, *, pad: int, device: torch.device | None = None) -> None:
        self._lengths = _lengths(x, pad)
        self.x = x.to(device)

    @classmethod
    def of(cls, data: Dataset, examples: Examples, device: torch.device) -> Texts:
        """The examples as model input for this data set."""
        assert data.pad is not None
        return cls(examples.x, pad=data.pad, device=device)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Random augmentation of `count` texts: none."""
        return ()

    @cached_property
    def order(self) -> Indices:
        """Order of evaluation: sorted by length, which reduces padding."""
        return np.argsort(self._lengths, kind="stable")

    def need(self, index: Indices) -> tuple[int, ...]:
        """Length in tokens of a batch of these texts; computed on the host, without a device synchronisation."""
        longest = int(self._lengths[index].max(initial=1))
        return (min(-(-longest // BUCKET) * BUCKET, self.x.shape[1]),)

    def show(self, index: Tensor, length: int | None = None) -> Tensor:
        """The ids of the texts at these indices, [..., length], int64; all columns if no length is given."""
        return self.x[:, :length][index].long()


def _lengths(x: Tensor, pad: int) -> NDArray[Any]:
    """Length of each row, up to its last id that is not padding."""
    places = torch.arange(1, x.shape[1] + 1)
    return ((x != pad) * places).amax(dim=1).numpy()
