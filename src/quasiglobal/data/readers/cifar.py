"""Batches of 3 × 32 × 32 images, pickled: CIFAR-10, and ImageNet scaled down to that size.

A. Krizhevsky: Learning multiple layers of features from tiny images. 2009.
P. Chrabaszcz, I. Loshchilov, F. Hutter: A downsampled variant of ImageNet as an alternative to the CIFAR
datasets. arXiv:1707.08819, 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.readers import fits, labelled, member, npz, pickles
from quasiglobal.errors import InputError

CIFAR10_FILES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
IMAGENET32_FILES = (*(f"train_data_batch_{k}" for k in range(1, 11)), "val_data")
SUFFIXES = ("", ".npz")


def cifar10(folder: Path, memory_limit: float) -> Splits:
    """50,000 training and 10,000 test images of ten classes."""
    *train, test, meta = (member(folder, name) for name in CIFAR10_FILES)
    names = pickles.read(meta).get("label_names")
    if not isinstance(names, list) or len(names) != 10 or not all(isinstance(n, bytes | str) for n in names):
        raise InputError(f"{meta} has no list 'label_names' of ten names")
    classes = tuple(n.decode("ascii", "replace") if isinstance(n, bytes) else n for n in names)
    return Splits(_gather(train, 10, 0, memory_limit), _gather([test], 10, 0, memory_limit), classes)


def imagenet32(folder: Path, memory_limit: float) -> Splits:
    """1,281,167 training and 50,000 validation images; the files number their 1,000 classes from 1."""
    *train, test = (member(folder, name, SUFFIXES) for name in IMAGENET32_FILES)
    classes = tuple(str(k) for k in range(1, 1001))
    return Splits(_gather(train, 1000, 1, memory_limit), _gather([test], 1000, 1, memory_limit), classes)


def _gather(paths: Sequence[Path], classes: int, first: int, memory_limit: float) -> Examples:
    """Read several batches and concatenate their examples."""
    fits(sum(path.stat().st_size for path in paths), memory_limit, paths[0].parent)
    batches = []
    for path in paths:
        batch = npz.arrays(path, memory_limit) if path.suffix == ".npz" else pickles.read(path)
        x, y = _images(batch.get("data"), path), _labels(batch.get("labels"), path)
        batches.append(labelled(x, y, classes, path, first))
    return Examples(torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches]))


def _images(data: Any, path: Path) -> NDArray[np.uint8]:
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise InputError(f"{path} has no array 'data' of bytes in the shape [m, 3072]")
    return data.reshape(-1, 3, 32, 32)


def _labels(labels: Any, path: Path) -> NDArray[np.integer[Any]]:
    if isinstance(labels, list) and all(type(y) is int and abs(y) < 2**31 for y in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"{path} has no list 'labels' of whole numbers")
    return labels
