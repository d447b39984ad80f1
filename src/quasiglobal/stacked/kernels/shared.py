"""Parts of several kernels: their launch, accumulators, the taps of a convolution, and its epilogue.

The epilogue follows a convolution in the same kernel, before the result is rounded; `before` computes the gradient
before it. `operations.convolve` computes the same in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import local

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.jit import JITFunction

_thread = local()


class Launched(JITFunction):  # type: ignore[misc]
    """A kernel whose launches only compile it inside `launches_only_compile`."""

    def run(self, *arguments: object, grid: object, warmup: bool, **options: object) -> object:
        warmup = warmup or getattr(_thread, "only_compiles", False)
        return super().run(*arguments, grid=grid, warmup=warmup, **options)


def launched(function: Callable[..., None]) -> JITFunction:
    """Make a function a kernel; in Triton's interpreter, an interpreted one."""
    kernel = triton.jit(function)
    return Launched(function) if isinstance(kernel, JITFunction) else kernel


@contextmanager
def launches_only_compile() -> Iterator[None]:
    """Make this thread's launches compile the kernels without running them."""
    _thread.only_compiles = True
    try:
        yield
    finally:
        _thread.only_compiles = False


def accumulator(x: Tensor) -> tl.dtype:
    """Accumulator dtype; in PyTorch it is `torch.promote_types(x.dtype, torch.float32)`."""
    return tl.float64 if x.dtype == torch.float64 else tl.float32


@triton.jit
def first_tap(edge, DOWN: tl.constexpr, DILATION: tl.constexpr, COUNT: tl.constexpr):
    """The first tap t with t · DILATION ≡ edge modulo DOWN; COUNT, beyond the last tap, if there is none."""
    if DOWN == 1:
        return 0
    first = COUNT + edge * 0
    for back in tl.static_range(DOWN):
        first = tl.where((edge - (DOWN - 1 - back) * DILATION) % DOWN == 0, DOWN - 1 - back, first)
    return first


@dataclass(frozen=True)
class Epilogue:
    """`later` and the bias are added to the result, then ReLU is applied."""

    later: Tensor | None = None
    bias: Tensor | None = None
    """[n, channels], a view of the parameters' rows."""
    relu: bool = False

    def dtype(self, x: Tensor) -> torch.dtype:
        """The result's dtype if x has the dtype of the matrix product: that of the sum, as in PyTorch."""
        return x.dtype if self.later is None else torch.promote_types(x.dtype, self.later.dtype)

    def arguments(self, y: Tensor) -> tuple[tuple[Tensor, Tensor], int, tuple[bool, bool, bool]]:
        """`later` and the bias (y for none), the stride of the biases; LATER, BIAS and RELU."""
        later, bias = (y if one is None else one for one in (self.later, self.bias))
        stride = 0 if self.bias is None else self.bias.stride(0)
        return (later, bias), stride, (self.later is not None, self.bias is not None, self.relu)


@triton.jit
def positive(value):
    """ReLU; NaN stays NaN, as in PyTorch."""
    return tl.where(value <= 0, 0.0, value)


@launched
def _before(
    dy, y, g, sums, places, of_share, of_node, SHARE: tl.constexpr, C: tl.constexpr, BIAS: tl.constexpr,
    RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """If RELU, g is dy where y is not 0, else dy; if BIAS, sum g over one share of the pixels of a model's images."""
    node = tl.program_id(2).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    total = tl.zeros([BP, BC], dtype=ACC)
    for p in range(0, SHARE, BP):
        place = tl.program_id(0) * SHARE + p + tl.arange(0, BP)
        inside = (place < places)[:, None] & (c < C)[None, :]
        at = (node * places + place)[:, None] * C + c[None, :]
        value = tl.load(dy + at, mask=inside, other=0.0)
        if RELU:
            value = tl.where(tl.load(y + at, mask=inside, other=0.0) <= 0, 0.0, value)
            tl.store(g + at, value, mask=inside)
        if BIAS:
            total += value.to(ACC)
    if BIAS:
        at = tl.program_id(0).to(tl.int64) * of_share + node * of_node + c
        tl.store(sums + at, tl.sum(total, axis=0), mask=c < C)


def before(dy: Tensor, y: Tensor | None, sums: Tensor | None) -> Tensor:
    """The gradient before ReLU, whose result is y, from dy after it; without ReLU y is None, and dy is returned.

    Fill `sums` [shares, n, channels] with the gradient of the bias, one partial sum per share of a model's pixels.
    """
    n, batch, height, width, channels = dy.shape
    places = batch * height * width
    g = dy if y is None else dy.new_empty(dy.shape)
    bc = min(64, max(16, triton.next_power_of_2(channels)))
    bp = BLOCK // bc
    count = shares(n, places) if sums is None else len(sums)
    share = triton.cdiv(triton.cdiv(places, count), bp) * bp
    if y is not None or sums is not None:
        strides = (0, 0) if sums is None else (sums.stride(0), sums.stride(1))
        _before[(count, triton.cdiv(channels, bc), n)](
            dy, dy if y is None else y, g, dy if sums is None else sums, places, *strides, share, channels,
            sums is not None, y is not None, bp, bc, accumulator(dy), num_warps=4,
        )
    return g


BLOCK = 4096
"""Numbers per step of `before`."""

PROGRAMS = 528
"""Number of blocks of `before` and of most weight gradients that fill the GPU."""


def shares(n: int, places: int) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradient of a bias."""
    return max(1, min(PROGRAMS // n, places // 64, 32))
