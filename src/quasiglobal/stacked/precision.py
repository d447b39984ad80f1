"""The precision of matrix products, and dtypes by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any

import torch

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""The dtype of parameters, state and mixing. bf16 is autocast inside the model only."""


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Compute matrix products and convolutions in the precision of their operands: no autocast, no TF32, no bf16."""
    with _switches("cuda" if device == "cuda" else "cpu"), torch.autocast(device, enabled=False):
        yield


@cache
def _switches(device: str) -> _Switches:
    backends: Any = torch.backends
    if device == "cpu":
        return _Switches([backends.mkldnn.matmul])
    return _Switches([backends.cuda.matmul, backends.cudnn.conv, backends.cudnn.rnn], older=backends.cudnn)


class _Switches:
    """PyTorch's switches for the whole process: the first thread that enters sets them, the last resets them.

    While the older switch of cuDNN contradicts the others, `cudnn.flags` fails, which a user's module may call.
    """

    def __init__(self, parts: list[Any], older: Any = None) -> None:
        self.parts, self.older = parts, older
        self.lock, self.inside = Lock(), 0
        self.before: list[str] = []
        self.allowed = False

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before, self.allowed = [part.fp32_precision for part in self.parts], self._allows_tf32()
                if self.allowed:
                    self.older.allow_tf32 = False
                for part in self.parts:
                    part.fp32_precision = "ieee"
            self.inside += 1

    def __exit__(self, *error: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                if self.allowed:
                    self.older.allow_tf32 = True
                for part, precision in zip(self.parts, self.before, strict=True):
                    part.fp32_precision = precision

    def _allows_tf32(self) -> bool:
        with suppress(RuntimeError):                        # somebody has set the others alone
            return self.older is not None and bool(self.older.allow_tf32)
        return False
