"""The precision of matrix products, and dtypes by name."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""The dtype of parameters, state and mixing. bf16 is autocast inside the model only."""


@contextmanager
def full_precision(device: str) -> Iterator[None]:
    """Compute matrix products and convolutions in the precision of their operands: no autocast, no TF32, no bf16."""
    backends = torch.backends
    switches = (backends.cuda.matmul, backends.cudnn.conv, backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [switch.fp32_precision for switch in switches]
    try:
        for switch in switches:
            switch.fp32_precision = "ieee"
        with torch.autocast(device, enabled=False):
            yield
    finally:
        for switch, precision in zip(switches, before, strict=True):
            switch.fp32_precision = precision
