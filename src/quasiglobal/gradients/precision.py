"""The precision of matrix products, and dtypes by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""The dtype of parameters, state and mixing. bf16 is autocast inside the model only."""


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Compute matrix products and convolutions in the precision of their operands: no autocast, no TF32, no bf16."""
    with _switches, torch.autocast(device, enabled=False):
        yield


class _Switches:
    """PyTorch's switches for the whole process: the first thread that enters turns them off, the last that leaves on."""

    def __init__(self) -> None:
        self.lock, self.inside, self.before = Lock(), 0, [""]

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = [part.fp32_precision for part in self.parts]
                for part in self.parts:
                    part.fp32_precision = "ieee"
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                for part, precision in zip(self.parts, self.before, strict=True):
                    part.fp32_precision = precision

    @property
    def parts(self) -> tuple[Any, ...]:
        backends: Any = torch.backends
        # PyTorch refuses questions about cuDNN while its convolutions and recurrences differ.
        return backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn, backends.mkldnn.matmul


_switches = _Switches()
