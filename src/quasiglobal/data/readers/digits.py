"""The 8 × 8 handwritten digits included in scikit-learn: no network needed.

E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from quasiglobal.data.dataset import Splits, held_out
from quasiglobal.data.readers import labelled
from quasiglobal.errors import InputError


def read(folder: Path, memory_limit: float) -> Splits:
    """1,437 training and 360 test images, a fixed split; pixels are 0, …, 16."""
    package = find_spec("sklearn")                          # importing it takes a second in every process
    if package is None or package.origin is None:
        raise InputError("the digits are part of scikit-learn, which is not installed: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", np.int64, delimiter=",")
    x, labels = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1]
    train, test = (labelled(x[cut], labels[cut], 10, "digits") for cut in held_out(len(x), "digits"))
    return Splits(train, test, tuple("0123456789"))
