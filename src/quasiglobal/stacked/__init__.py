"""Many copies of any module as one program: their parameters are the rows of one tensor.

It knows no node, topology or algorithm. The doors are `Stack`, whose routes compute the gradients and outputs of all
copies (`routes.py`, `kernels/`), and `compiled`, which makes a program of a function of such tensors
(`step_blocks.py`). `layout.py` says which columns are which parameters, and `guard.py` compares a route's gradients
with plain PyTorch's.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quasiglobal.stacked.stack import Stack
    from quasiglobal.stacked.step_blocks import compiled

__all__ = ["Stack", "compiled"]

_MODULES = {"Stack": "stack", "compiled": "step_blocks"}
"""The doors by module. Each is imported at its first use: other packages need smaller parts."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
