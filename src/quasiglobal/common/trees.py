"""Trees of tensors: the inputs and outputs of models."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch.utils._pytree import tree_map

from quasiglobal.common.modules import in_precision

Tree: TypeAlias = Any
"""A tensor, or a tuple, list or dict of tensors: the input or output of a model."""


def on_device(values: Tree, device: torch.device | None, dtype: torch.dtype) -> Tree:
    """Move tensors to the device; convert floating-point and complex numbers to the precision of the training."""
    return tree_map(lambda value: in_precision(value, device, dtype), values)
