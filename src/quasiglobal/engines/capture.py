"""Record a step once and replay it: CUDA graphs, and in-place writes to the storage that they reference."""

from __future__ import annotations

import gc
import logging
import time
import warnings
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

log = logging.getLogger("quasiglobal")


class Captured:
    """Runs steps that change tensors in place, with one CUDA graph per kind of step.

    Two steps with the same key must apply the same operations to the same storage. The first step with a key runs
    twice without a graph, on a side stream, to compile kernels and allocate memory; the tensors are restored each time.
    Then the step is recorded, and from then on it is replayed. Random draws are as if it had run once.

    A step that waits for the GPU, as a model does that branches on the value of a tensor, cannot be recorded: it runs
    as it is each time, with one line in the log.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        self.tensors = tensors
        self.seconds = 0.0
        """Time spent on recording, which includes the compilation of kernels."""
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        if key not in self.graphs:
            began = time.perf_counter()
            self.graphs[key] = self._record(step)
            self.seconds += time.perf_counter() - began
        graph = self.graphs[key]
        if graph is None:
            step()
        else:
            graph.replay()

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph | None:
        before, drawn = [tensor.clone() for tensor in self.tensors()], torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        waits = False
        with torch.cuda.stream(stream):
            for tries in range(2):
                try:
                    with errors_on_waiting(tries == 1):
                        step()
                except RuntimeError as error:
                    if "synchronizing CUDA operation" not in str(error):
                        raise
                    waits = True
                for tensor, value in zip(self.tensors(), before, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        if waits:
            torch.cuda.set_rng_state(drawn)
            log.warning("a step waits for values on the GPU, so it is not recorded as a CUDA graph, which is slower")
            return None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        torch.cuda.set_rng_state(drawn)
        return graph


def release(device: torch.device) -> None:
    """Free the GPU memory of a finished training; collect garbage first, since captured graphs are in a cycle."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


@contextmanager
def errors_on_waiting(on: bool) -> Iterator[None]:
    """If `on`, raise an error at an operation that waits for the GPU."""
    before = torch.cuda.get_sync_debug_mode()

    def switch(mode: int | str) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
            torch.cuda.set_sync_debug_mode(mode)

    switch("error" if on else before)
    try:
        yield
    finally:
        switch(before)


def overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy new values into old storage; new values may alias it."""
    held = {tensor.data_ptr() for tensor in old}
    safe = [value.clone() if value.data_ptr() in held else value for value in new]
    for dtype in {value.dtype for value in old}:            # one foreach call needs one dtype
        here, there = ([value for value in values if value.dtype == dtype] for values in (old, safe))
        torch._foreach_copy_(here, there)
