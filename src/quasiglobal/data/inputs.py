"""A data set's examples on the device, and as model input: images, texts, or a user's own tensors."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.arrays import Arrays
from quasiglobal.data.dataset import Dataset, Examples, Indices
from quasiglobal.data.images import Images
from quasiglobal.data.streams import Streamed
from quasiglobal.data.texts import Texts


class Inputs(Protocol):
    """Common interface of `Images`, `Texts` and `Arrays`."""

    x: Any
    """The stored examples, a tensor or several."""
    cost: int
    """Memory per example in evaluation, in units of one image."""
    moving: bool
    """Whether examples are augmented by `draw`."""

    @property
    def order(self) -> Indices:
        """Order of evaluation."""

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` examples."""

    def need(self, index: Indices) -> tuple[int, ...]:
        """Shape of a batch besides the batch size, such as the length in tokens; computed on the host."""

    def show(self, index: Tensor, *args: Any, **kwargs: Any) -> Any:
        """The examples at these indices as model input, augmented as drawn, or truncated to the batch's length."""


def inputs_of(
    data: Dataset,
    examples: Examples,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    moving: bool = False,
) -> Inputs:
    """The examples as model input for this data set; `moving` augments images for training."""
    if data.pad is not None:
        return Texts.of(data, examples, device)
    if examples.shards is not None:
        return Streamed.of(data, examples, device=device, dtype=dtype, moving=moving)
    if data.plain:
        return Arrays(examples.x, device, dtype)
    return Images.of(data, examples, device=device, dtype=dtype, moving=moving)
