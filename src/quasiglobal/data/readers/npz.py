"""NumPy's .npz archives: a user's own examples with additional columns."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits, held_out
from quasiglobal.data.readers import fits, labelled
from quasiglobal.errors import InputError

MOST_CLASSES = 1_000_000
"""Limit on labels; a larger label is a mistake, not a class."""


def read(path: Path, memory_limit: float) -> Splits:
    """Read x, y and, if present, x_test, y_test; every other array is a column.

    x is uint8 [m, height, width] or [m, channels, height, width], or floating point [m, …]; y is 0, 1, ….
    A column `c` belongs to the training examples and `c_test` to the test examples. Without x_test and y_test, a
    fixed fifth of the examples is held out, with their rows of the columns.
    """
    content = arrays(path, memory_limit)
    is_split = "x_test" in content or "y_test" in content
    train = _examples(path, {name: a for name, a in content.items() if not (is_split and name.endswith("_test"))})
    if is_split:
        tests = {name.removesuffix("_test"): a for name, a in content.items() if name.endswith("_test")}
        test = _examples(path, tests, suffix="_test")
    else:
        train, test = (train.at(cut) for cut in held_out(len(train), path))
    classes = 1 + max(int(train.y.max()), int(test.y.max()))
    return Splits(train, test, tuple(str(k) for k in range(classes)))


def inputs(path: Path, memory_limit: float) -> Tensor:
    """The array x of an archive without labels, or its only array."""
    content = arrays(path, memory_limit)
    if "x" not in content and len(content) != 1:
        raise InputError(f"{path} has the arrays {', '.join(content) or 'none'}; it needs x")
    name = "x" if "x" in content else next(iter(content))
    return torch.from_numpy(np.require(numbers(content[name], f"{name} in {path}"), requirements=["C", "W"]))


def arrays(path: Path, memory_limit: float) -> dict[str, NDArray[np.generic]]:
    """Read all arrays of the archive; pickled objects raise an error."""
    with reading(path, "an .npz archive"), zipfile.ZipFile(path) as archive:
        fits(sum(entry.file_size for entry in archive.infolist()), memory_limit, path)
        with np.load(path, allow_pickle=False) as content:
            return {name: np.asarray(content[name]) for name in content.files}


def _examples(path: Path, content: dict[str, NDArray[np.generic]], suffix: str = "") -> Examples:
    for name in ("x", "y"):
        if name not in content:
            raise InputError(f"{path} has no array {name}{suffix}; it needs x, y, or x, y, x_test, y_test")
    x, y = numbers(content.pop("x"), f"x{suffix} in {path}"), content.pop("y")
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise InputError(f"y{suffix} in {path} is {y.dtype} {list(y.shape)}; it needs whole numbers [m]")
    examples = labelled(x, y, MOST_CLASSES, f"x{suffix}, y{suffix} in {path}")
    for name, column in content.items():
        if column.shape[:1] != y.shape:
            raise InputError(
                f"column {name}{suffix} in {path} is {list(column.shape)}; it needs a row for each of the "
                f"{len(y)} examples"
            )
    return Examples(examples.x, examples.y, content)


def numbers(x: NDArray[np.generic], where: str) -> NDArray[np.generic]:
    """uint8 images with a channel dimension, or float32 features."""
    if x.dtype.kind == "f" and x.ndim >= 2:
        with np.errstate(over="ignore"):
            features = x.astype(np.float32)
        if not np.isfinite(features).all():
            raise InputError(f"{where} has a value that is not a finite number")
        return features
    if x.dtype == np.uint8 and x.ndim == 3:
        return x[:, None]
    if x.dtype == np.uint8 and x.ndim == 4:
        if x.shape[3] in (1, 3, 4) and x.shape[1] not in (1, 3, 4):
            raise InputError(f"{where} is {list(x.shape)}: put channels first, x.transpose(0, 3, 1, 2)")
        return x
    raise InputError(
        f"{where} is {x.dtype} {list(x.shape)}; it needs uint8 images [m, height, width] or "
        "[m, channels, height, width], or floating-point features [m, ...]"
    )
