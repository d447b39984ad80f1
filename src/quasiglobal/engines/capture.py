"""Record a step once and replay it: CUDA graphs, and in-place writes to the storage that they reference."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class Captured:
    """Runs steps that change tensors in place, with one CUDA graph per kind of step.

    Two steps with the same key must apply the same operations to the same storage. The first step with a key runs
    twice without a graph, on a side stream, to compile kernels and allocate memory; the tensors are restored each time.
    Then the step is recorded, and from then on it is replayed. Random draws are as if it had run once.
    """

    def __init__(self, tensors: Callable[[], list[Tensor]]) -> None:
        self.tensors = tensors
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        if key not in self.graphs:
            self.graphs[key] = self._record(step)
        self.graphs[key].replay()

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        before, drawn = [tensor.clone() for tensor in self.tensors()], torch.cuda.get_rng_state()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
                for tensor, value in zip(self.tensors(), before, strict=True):
                    tensor.copy_(value)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        torch.cuda.set_rng_state(drawn)
        return graph


def overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy new values into old storage; new values may alias it."""
    held = {tensor.data_ptr() for tensor in old}
    safe = [value.clone() if value.data_ptr() in held else value for value in new]
    for dtype in {value.dtype for value in old}:            # one foreach call needs one dtype
        here, there = ([value for value in values if value.dtype == dtype] for values in (old, safe))
        torch._foreach_copy_(here, there)
