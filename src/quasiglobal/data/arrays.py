"""A user's own examples on the device: any tensors, passed to the model as they are."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import in_precision
from quasiglobal.data.dataset import Indices


class Arrays:
    """A tensor, tuple or dict of tensors with m rows; the counterpart of `Images` for any other data.

    Floating-point numbers get the precision of the training; nothing else is changed.

    >>> Arrays({"a": torch.arange(6.0).view(3, 2)}).show(torch.tensor([[2, 0]]))
    {'a': tensor([[[4., 5.],
             [0., 1.]]])}
    """

    cost = 1
    """Memory per example in evaluation, in units of one image."""

    moving = False
    """The examples are not augmented."""

    def __init__(self, x: Any, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.x = on_device(x, device, dtype)

    @property
    def order(self) -> Indices:
        """Order of evaluation."""
        return np.arange(len(tree_leaves(self.x)[0]))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Random augmentation: none."""
        return ()

    def need(self, index: Indices) -> tuple[int, ...]:
        """Shape of a batch besides the batch size: ()."""
        return ()

    def show(self, index: Tensor) -> Any:
        """The examples at these indices."""
        return tree_map(lambda values: values[index], self.x)


def on_device(values: Any, device: torch.device | None, dtype: torch.dtype) -> Any:
    """Move tensors to the device; convert floating-point and complex numbers to the precision of the training."""
    return tree_map(lambda value: in_precision(value, device, dtype), values)
