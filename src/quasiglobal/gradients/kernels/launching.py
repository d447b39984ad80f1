"""Early launches: a kernel is launched while the one before it ends, and waits for its results.

This is CUDA's programmatic dependent launch, which hides the latency of launches between short kernels. Every kernel
that is launched with `OPTIONS` must call `wait` before its first load or store.
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl


def _supported() -> bool:
    """Whether this is a GPU with early launches: NVIDIA's Hopper or later, and not Triton's interpreter."""
    if os.environ.get("TRITON_INTERPRET") == "1" or torch.version.hip or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (9, 0)


EARLY = tl.constexpr(_supported())
"""Whether kernels are launched early; assign false to switch it off, before the first launch."""

OPTIONS = {"launch_pdl": True} if EARLY.value else {}
"""Triton's options of a launch."""


@triton.jit
def wait():
    """Wait for the results of all kernels before this one, and let the next one be launched."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
