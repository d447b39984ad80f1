"""Record a step once and replay it: CUDA graphs, and in-place writes to the storage that they reference."""

from __future__ import annotations

import gc
import logging
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import _POOL_HANDLE

log = logging.getLogger("quasiglobal")

WAITED = "synchronizing CUDA operation"
"""Part of PyTorch's warning."""


class Captured:
    """Runs steps that change tensors in place, with one CUDA graph per kind of step.

    Two steps with the same key must apply the same operations to the same storage. The first step with a key runs as it
    is, which compiles kernels, and so does the second, which shows whether a step waits for the GPU. The third is
    recorded, which does not run it, and from then on steps are replayed. So no copy of the tensors is ever needed.

    A step that waits for the GPU, as a model does that branches on the value of a tensor, cannot be recorded: it runs
    as it is each time, with one line in the log.

    All graphs have one memory: no step needs what another has left there.
    """

    def __init__(self) -> None:
        self.seconds = 0.0
        """Time until steps are replayed, which includes the compilation of kernels."""
        self.graphs: dict[Hashable, torch.cuda.CUDAGraph | None] = {}
        self._runs: Counter[Hashable] = Counter()
        """Steps with each key that ran as they are."""
        self._memory: _POOL_HANDLE | None = None

    def __call__(self, key: Hashable, step: Callable[[], None]) -> None:
        graph = self.graphs.get(key)
        if graph is not None:
            graph.replay()
        elif key in self.graphs:
            step()
        else:
            began = time.perf_counter()
            if self._runs[key] == 2:
                self.graphs[key] = recorded = self._record(step)
                recorded.replay()
            elif self._runs[key] == 0:
                step()
            elif waits(step):
                log.warning(
                    "a step waits for values on the GPU, so it is not recorded as a CUDA graph, which is slower"
                )
                self.graphs[key] = None
            self._runs[key] += 1
            self.seconds += time.perf_counter() - began

    def _record(self, step: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Record a step; random draws are as if this had not happened."""
        self._memory = self._memory or torch.cuda.graph_pool_handle()
        drawn, graph = torch.cuda.get_rng_state(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory):
            step()
        torch.cuda.set_rng_state(drawn)
        return graph


def release(device: torch.device) -> None:
    """Free the GPU memory of a finished training; collect garbage first, since captured graphs are in a cycle."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def waits(step: Callable[[], None]) -> bool:
    """Run a step; return whether it waited for the GPU, which PyTorch then warns of."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode(before)
    for one in said:
        if not re.search(f"{WAITED}|Synchronization debug mode", str(one.message)):
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    return any(WAITED in str(one.message) for one in said)


def overwrite(old: Sequence[Tensor], new: Sequence[Tensor]) -> None:
    """Copy new values into old storage; new values may alias it. Values that are the old tensors are not copied."""
    pairs = [(before, after) for before, after in zip(old, new, strict=True) if after is not before]
    if not pairs:
        return
    old, new = ([pair[k] for pair in pairs] for k in (0, 1))
    held = {tensor.data_ptr() for tensor in old}
    safe = [value.clone() if value.data_ptr() in held else value for value in new]
    for dtype in {value.dtype for value in old}:            # one foreach call needs one dtype
        here, there = ([value for value in values if value.dtype == dtype] for values in (old, safe))
        torch._foreach_copy_(here, there)
