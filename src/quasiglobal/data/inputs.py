"""A data set's examples as model input: images, texts, or a user's own tensors, in memory or in shards."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quasiglobal.common.trees import Tree, on_device
from quasiglobal.data.dataset import Dataset, Examples, Inputs
from quasiglobal.data.images import Images
from quasiglobal.data.shards import ExampleShards, Streamed, Unpacked
from quasiglobal.data.texts import Texts


def inputs_of(
    data: Dataset,
    examples: Examples,
    *,
    device: torch.device,
    dtype: torch.dtype = torch.float32,
    moving: bool = False,
) -> Inputs:
    """The examples as model input for this data set; `moving` augments images for training."""
    shards = examples.shards
    if data.pad is not None:
        return Texts(examples.x, pad=data.pad, device=device)
    if isinstance(shards, ExampleShards):
        return Streamed(shards, Unpacked(shards.form, dtype), device)
    if shards is None and not data.mean:                  # not normalised
        return Arrays(examples.x, device, dtype)
    images = Images(
        examples.x if shards is None else shards.x[:0], scale=data.scale, mean=data.mean, std=data.std,
        augmentation=data.augmentation, device=device, dtype=dtype, moving=moving,
    )
    return images if shards is None else Streamed(shards, images, device)


class Arrays(Inputs):
    """A tensor, tuple or dict of tensors with m rows, passed to the model as they are.

    Floating-point numbers get the precision of the training; nothing else is changed.

    >>> Arrays({"a": torch.arange(6.0).view(3, 2)}).show(torch.tensor([[2, 0]]))
    {'a': tensor([[[4., 5.],
             [0., 1.]]])}
    """

    def __init__(self, x: Tree, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.x = on_device(x, device, dtype)

    def show(self, index: Tensor) -> Tree:
        """The examples at these indices."""
        return tree_map(lambda values: values[index], self.x)
