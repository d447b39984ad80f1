"""Batches of 3 × 32 × 32 images, pickled: CIFAR-10, and ImageNet scaled down to that size.

A. Krizhevsky: Learning multiple layers of features from tiny images. 2009.
P. Chrabaszcz, I. Loshchilov, F. Hutter: A downsampled variant of ImageNet as an alternative to the CIFAR
datasets. arXiv:1707.08819, 2017.

A pickle is a program: it can call any function that it can import. Here it can import only the few names that
pickled arrays need, and they resolve to stand-ins that only record their arguments. NumPy never receives a state
from the file: its own `__setstate__` does not validate it, so one flipped byte can crash the process.
"""

from __future__ import annotations

import codecs
import io
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.readers import fits, labelled, member, npz
from quasiglobal.errors import InputError

CIFAR10_FILES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
IMAGENET32_FILES = (*(f"train_data_batch_{k}" for k in range(1, 11)), "val_data")
SUFFIXES = ("", ".npz")


def cifar10(folder: Path, memory_limit: float) -> Splits:
    """50,000 training and 10,000 test images of ten classes."""
    *train, test, meta = (member(folder, name) for name in CIFAR10_FILES)
    names = read_pickle(meta).get("label_names")
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
        batch = npz.arrays(path, memory_limit) if path.suffix == ".npz" else read_pickle(path)
        x, y = _images(batch.get("data"), path), _labels(batch.get("labels"), path)
        batches.append(labelled(x, y, classes, path, first))
    return Examples(torch.cat([batch.x for batch in batches]), torch.cat([batch.y for batch in batches]))


def _images(data: object, path: Path) -> NDArray[np.uint8]:
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.shape[1:] != (3072,):
        raise InputError(f"{path} has no array 'data' of bytes in the shape [m, 3072]")
    return data.reshape(-1, 3, 32, 32)


def _labels(labels: object, path: Path) -> NDArray[np.generic]:
    if isinstance(labels, list) and all(type(y) is int and abs(y) < 2**31 for y in labels):
        labels = np.array(labels, dtype=np.int64)
    if not isinstance(labels, np.ndarray) or labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise InputError(f"{path} has no list 'labels' of whole numbers")
    return labels


# ------------------------------------------------------------------------------------------------ pickles


def read_pickle(path: Path) -> dict[str, object]:
    """Read the dictionary in an untrusted file: text keys; values are numbers, bytes, text, lists and arrays."""
    with reading(path, "a pickled batch"):
        content = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
        if type(content) is not dict:
            raise pickle.UnpicklingError("it does not hold a dictionary")
        return {_text(key): _array(value) for key, value in content.items()}


class _Array:
    """Stand-in for an array: `_reconstruct(ndarray, (0,), b"b")`, then `__setstate__`."""

    def __init__(self, *_: object) -> None:
        pass

    def __setstate__(self, state: tuple[object, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, self.shape, self.dtype, self.is_fortran, self.content = state


class _Dtype:
    """Stand-in for a dtype: `dtype("u1", False, True)`, then `__setstate__` with the byte order."""

    def __init__(self, name: str | bytes, *_: object) -> None:
        self.name, self.order = _text(name), "|"

    def __setstate__(self, state: tuple[object, ...]) -> None:
        self.order = _text(state[1])


ADMITTED: dict[tuple[str, str], object] = {
    ("numpy.core.multiarray", "_reconstruct"): _Array,
    ("numpy._core.multiarray", "_reconstruct"): _Array,
    ("numpy", "ndarray"): "an argument of _reconstruct, never called",
    ("numpy", "dtype"): _Dtype,
    ("_codecs", "encode"): codecs.encode,  # used by protocol 2 for bytes
}


# The unpickler written in Python: the C version allocates the memo size that a damaged file declares.
class _Unpickler(pickle._Unpickler):
    def find_class(self, module: str, name: str) -> object:
        if (module, name) not in ADMITTED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}, but only arrays are admitted")
        return ADMITTED[module, name]


def _text(key: object) -> str:
    if isinstance(key, bytes):
        return key.decode("ascii")
    if not isinstance(key, str):
        raise pickle.UnpicklingError("it has a name that is not text")
    return key


PLAIN = {"u1", "i1", "i2", "i4", "i8", "f4", "f8"}


def _array(value: object) -> object:
    if not isinstance(value, _Array):
        return value
    if value.dtype.name not in PLAIN or value.dtype.order not in ("|", "<", ">"):
        raise pickle.UnpicklingError("it has an array that does not hold plain numbers")
    flat: NDArray[np.generic] = np.frombuffer(value.content, value.dtype.order + value.dtype.name)
    return flat.reshape(value.shape, order="F" if value.is_fortran else "C")
