"""A data set's examples as they lie on the device, and as a model sees them: images or texts."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.data.images import Images
from quasiglobal.data.partition import Indices
from quasiglobal.data.texts import Texts


class Inputs(Protocol):
    """What `Images` and `Texts` have in common."""

    x: Tensor
    """The examples as they are stored."""
    cost: int
    """Of an example in the memory of a test, in images."""
    moving: bool
    """Whether training moves them, as `draw` says."""

    @property
    def order(self) -> Indices:
        """In which they are tested."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """How `count` of them move."""

    def need(self, index: Indices) -> tuple[int, ...]:
        """What a batch of these needs to be known of on the host, besides its size."""

    def show(self, index: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Those at these positions as a model takes them, moved as drawn, or cut to what they need."""


def inputs_of(
    data: Dataset,
    examples: Examples,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    moving: bool = False,
) -> Inputs:
    """The examples as models for this data set take them; `moving` is for training on images."""
    if data.pad is not None:
        return Texts.of(data, examples, device)
    return Images.of(data, examples, device=device, dtype=dtype, moving=moving)
