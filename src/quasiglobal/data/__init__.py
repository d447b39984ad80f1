"""Data sets, and their partition among nodes: the public module `qg.data`.

>>> import quasiglobal as qg
>>> data = qg.data.load("digits")
>>> [len(part) for part in qg.data.split(data.train.y, 4, alpha=0.1)]
[359, 359, 359, 359]
"""

from quasiglobal.data.dataset import Dataset
from quasiglobal.data.own import from_arrays
from quasiglobal.data.partition import split
from quasiglobal.data.sources import load

__all__ = ["Dataset", "from_arrays", "load", "split"]


def __dir__() -> list[str]:
    return sorted(__all__)
