"""A step recorded once and replayed: CUDA graphs, and writing into the storage that they hold on to."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor


class Captured:
    """Runs a step that changes tensors in place, each kind of step as one graph.

    Two steps of the same key must do the same to the same storage. The first step of a key runs ordinarily on
    a side stream, so that it compiles and allocates what it needs, and the tensors are put back each time; then
    the step is recorded, and from then on it is replayed. Random draws are as if it had run once.
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
    """Copy new values into old storage, which they may themselves lie in."""
    held = {tensor.data_ptr() for tensor in old}
    safe = [value.clone() if value.data_ptr() in held else value for value in new]
    for dtype in {value.dtype for value in old}:            # many at a time, which have to be of one type
        here, there = ([value for value in values if value.dtype == dtype] for values in (old, safe))
        torch._foreach_copy_(here, there)
