"""Taps of a strided and dilated convolution that have an integer pixel index."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def first_tap(edge, DOWN: tl.constexpr, DILATION: tl.constexpr, COUNT: tl.constexpr):
    """The first tap t with t · DILATION ≡ edge modulo DOWN; COUNT, beyond the last tap, if there is none."""
    if DOWN == 1:
        return 0
    first = COUNT + edge * 0
    for back in tl.static_range(DOWN):
        first = tl.where((edge - (DOWN - 1 - back) * DILATION) % DOWN == 0, DOWN - 1 - back, first)
    return first
