"""Compile a program at once, before its first step.

Triton compiles a kernel at its first launch: dozens of kernels of a network one after the other, half a second each. In
a rehearsal the program runs on zeros, and a launch only submits its kernel to a pool of threads. Most of the compiler's
time is outside of Python, so the threads use all cores. Meanwhile the rehearsal compiles the segments.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from threading import Thread, Timer
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from quasiglobal.common.trees import Tree
    from quasiglobal.stacked.kernels.network import KernelNetwork

log = logging.getLogger("quasiglobal")

QUICK = 1.0
"""Seconds after which a rehearsal logs a line; it takes less if it finds everything in the caches on disk."""


@cache
def prepare() -> None:
    """Import Triton and hash its files, for its cache, in the background, as data are loaded: this takes a second."""
    def run() -> None:
        with suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    Thread(target=run, daemon=True).start()


def sum_of(outputs: Tree) -> Tensor:
    """The sum of all numbers: a loss without kernels."""
    leaves = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
    return torch.stack([one.float().sum() for one in leaves]).sum()


def rehearse(
    program: KernelNetwork, name: str, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor,
    loss: Callable[[Tree], Tensor],
) -> None:
    """Compile a program for arguments like these, and log it under the network's `name` if that takes a while.

    The loss is compiled too, if a kernel computes it. Nothing is lost if the rehearsal fails: the rest is compiled when
    it is first called.
    """
    from triton import AsyncCompileMode

    from quasiglobal.stacked.kernels.shared import launches_only_compile

    text = f"compiling {name} for {len(x)} models: {program.parts}; later starts find them in the cache"
    line = Timer(QUICK, log.info, [text])
    line.start()
    try:
        with (
            _Loaded(x.device) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
            torch.random.fork_rng([x.device] if x.is_cuda else []),
        ):
            program.postponed = []
            # Triton's compilation is of one thread, so the backward pass may not have its own.
            with torch.autograd.set_multithreading_enabled(False), launches_only_compile(), _Zeros():
                outputs, _, gradient = program(x, buffers, inputs)
                total = loss(outputs)
                if total.requires_grad:
                    gradient(total)
            program.compile_postponed(x)                    # while the threads compile the kernels
    except Exception as error:
        log.debug(f"the rehearsal of {name} failed: {error!r}")
    finally:
        program.postponed = None
        line.cancel()


class _Loaded(ThreadPoolExecutor):
    """Threads that compile and load kernels: a kernel's launcher is a small C program, compiled as it is loaded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def submit(  # type: ignore[override]
        self, compiling: Callable[[], CompiledKernel]
    ) -> Future[CompiledKernel]:
        return super().submit(self._compile_and_load, compiling)

    def _compile_and_load(self, compiling: Callable[[], CompiledKernel]) -> CompiledKernel:
        kernel = compiling()
        if self.device.type == "cuda":                      # elsewhere, in tests, nothing can be loaded
            with torch.cuda.device(self.device):            # the current device is that of a thread
                _ = kernel.run
        return kernel


class _Zeros(TorchFunctionMode):
    """Fill new memory of this thread, which no kernel fills now, with zeros: other operations may use it as indices."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return ZEROS.get(function, function)(*args, **(kwargs or {}))


ZEROS: dict[Callable[..., object], Callable[..., object]] = {
    torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros,
}
