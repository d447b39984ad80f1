"""Decentralized deep learning on heterogeneous data: quasi-global momentum and the methods it is compared with.

>>> import quasiglobal as qg
>>> qg.algorithm("qg-dsgdm-n").citation
'Lin et al. 2021'
>>> qg.topology.ring(16)
<Topology ring:16: n = 16, period 1>
"""

import sys

# Python puts the current folder first on the path for `python -m quasiglobal`; a file torch.py there is no PyTorch.
if sys.argv[:1] == ["-m"] and sys.orig_argv[-len(sys.argv)] in ("quasiglobal", "-mquasiglobal"):
    del sys.path[: not sys.flags.safe_path]

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quasiglobal import callbacks, data, metrics, optim, topology
    from quasiglobal.algorithms import ALGORITHMS, Algorithm, Node, State, algorithm
    from quasiglobal.api.train import train
    from quasiglobal.checks import CheckFailed, check_algorithm
    from quasiglobal.errors import InputError
    from quasiglobal.minimize import Diverged, Result, minimize
    from quasiglobal.topology import Topology
    from quasiglobal.training.task import Task

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "CheckFailed",
    "Diverged",
    "InputError",
    "Node",
    "Result",
    "State",
    "Task",
    "Topology",
    "algorithm",
    "callbacks",
    "check_algorithm",
    "data",
    "metrics",
    "minimize",
    "optim",
    "topology",
    "train",
]

__version__ = "0.1.0"

_MODULES = {
    "algorithms": ("ALGORITHMS", "Algorithm", "Node", "State", "algorithm"),
    "api.train": ("train",),
    "checks": ("CheckFailed", "check_algorithm"),
    "errors": ("InputError",),
    "minimize": ("Diverged", "Result", "minimize"),
    "topology": ("Topology",),
    "training.task": ("Task",),
}
"""Public names by module. Each is imported at its first use, so that `qg --help` does not load PyTorch."""


def __getattr__(name: str) -> Any:
    if name in ("callbacks", "data", "metrics", "optim", "topology"):
        return import_module(f"quasiglobal.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"quasiglobal.{module}"), name)
    raise AttributeError(f"module 'quasiglobal' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)


class _Package(ModuleType):
    """Package type that keeps `qg.minimize` a function; importing the module of that name would replace it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "minimize" and isinstance(value, ModuleType):
            value = value.minimize
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
