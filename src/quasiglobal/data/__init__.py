"""Data sets, and their partition among nodes: the public module `qg.data`.

>>> import quasiglobal as qg
>>> data = qg.data.load("digits")
>>> [len(part) for part in qg.data.split(data.train.y, 4, alpha=0.1)]
[359, 359, 359, 359]
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quasiglobal.data.dataset import Dataset
    from quasiglobal.data.own import from_arrays
    from quasiglobal.data.partition import split
    from quasiglobal.data.sources import load

__all__ = ["Dataset", "from_arrays", "load", "split"]

_MODULES = {"Dataset": "dataset", "from_arrays": "own", "load": "sources", "split": "partition"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'quasiglobal.data' has no attribute {name!r}")
    return getattr(import_module(f"quasiglobal.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
