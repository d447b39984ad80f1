"""The types in which the kernels sum: float64 for float64, float32 for anything else."""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor


def wide(x: Tensor) -> torch.dtype:
    """As PyTorch names it."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def accumulator(x: Tensor) -> tl.dtype:
    """As Triton names it."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32
