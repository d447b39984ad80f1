"""The 8 × 8 handwritten digits included in scikit-learn: no network needed.

E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from quasiglobal.data.dataset import Splits, held_out, labelled


def read(folder: Path, memory_limit: float) -> Splits:
    """1,437 training and 360 test images, a fixed split; pixels are 0, …, 16."""
    from sklearn.datasets import load_digits  # takes a second to import

    features, labels = load_digits(return_X_y=True)
    x = features.astype(np.uint8).reshape(-1, 1, 8, 8)
    train, test = (labelled(x[cut], labels[cut], 10, "digits") for cut in held_out(len(x), "digits"))
    return Splits(train, test, tuple("0123456789"))
