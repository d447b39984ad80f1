"""A step recorded once and replayed: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import torch
from torch import Tensor


class Captured:
    """Runs a step that changes tensors in place, each kind of step as one graph.

    Two steps of the same key must do the same to the same storage. The first step of a key runs ordinarily on
    a side stream, so that whatever compiles or allocates does so, and the tensors are put back each time; then
    the step is recorded, and from then on it is replayed. What it draws at random is as if it had run once.
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
