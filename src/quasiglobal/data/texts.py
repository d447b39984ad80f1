"""Texts as they lie on the device, rows of ids, and as a model sees them: cut to what the batch needs."""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.data.partition import Indices

BUCKET = 16
"""Batches are cut to multiples of so many tokens: few shapes, so that few programs are compiled and captured."""


class Texts:
    """ids [m, length], padded, that stay on the device; what `Images` is for pictures.

    >>> texts = Texts(torch.arange(1, 41).repeat(2, 1) * torch.tensor([[1] * 20 + [0] * 20, [1] * 40]), pad=0)
    >>> texts.need(np.array([[0]])), texts.need(np.array([[0, 1]]))
    ((32,), (40,))
    >>> texts.show(torch.tensor([[0]]), 32).shape, texts.show(torch.tensor([[0]])).shape
    (torch.Size([1, 1, 32]), torch.Size([1, 1, 40]))
    """

    cost = 16
    """In the memory of a test, in images."""

    moving = False
    """Texts stay as they are in training."""

    def __init__(self, x: Tensor, *, pad: int, device: torch.device | None = None) -> None:
        self._lengths = _lengths(x, pad)
        self.x = x.to(device)

    @classmethod
    def of(cls, data: Dataset, examples: Examples, device: torch.device) -> Texts:
        """The examples as models for this data set take them."""
        assert data.pad is not None
        return cls(examples.x, pad=data.pad, device=device)

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """How `count` texts move: they do not."""
        return ()

    @cached_property
    def order(self) -> Indices:
        """In which they are tested: short ones together, for which little is padding."""
        return np.argsort(self._lengths, kind="stable")

    def need(self, index: Indices) -> tuple[int, ...]:
        """How many tokens a batch of these texts is cut to; known on the host, so that no device is waited for."""
        longest = int(self._lengths[index].max(initial=1))
        return (min(-(-longest // BUCKET) * BUCKET, self.x.shape[1]),)

    def show(self, index: Tensor, length: int | None = None) -> Tensor:
        """The ids of the texts at these positions, [..., length], int64; all columns if no length is given."""
        return self.x[:, :length][index].long()


def _lengths(x: Tensor, pad: int) -> NDArray[Any]:
    """Of each row, up to its last id that is no padding."""
    places = torch.arange(1, x.shape[1] + 1)
    return ((x != pad) * places).amax(dim=1).numpy()
