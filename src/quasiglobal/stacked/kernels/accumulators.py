"""Accumulator dtypes of the kernels (float64 for float64, float32 otherwise), and dtypes for tensor cores."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """Accumulator dtype in PyTorch."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def accumulator(x: Tensor) -> tl.dtype:
    """Accumulator dtype in Triton."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


def on_tensor_cores(x: Tensor) -> bool:
    """Whether to use settings for tensor cores: for 16-bit types, and in the interpreter, where speed is no matter.

    Products of other types need several times the registers.
    """
    return x.element_size() == 2 or not x.is_cuda
