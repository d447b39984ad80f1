"""Published image data sets in their original files: digits, Fashion-MNIST, CIFAR-10, and ImageNet at 32 × 32 pixels.

E. Alpaydin, C. Kaynak: Optical recognition of handwritten digits. UCI Machine Learning Repository, 1998.
H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking machine learning
algorithms. arXiv:1708.07747, 2017.
A. Krizhevsky: Learning multiple layers of features from tiny images. 2009.
P. Chrabaszcz, I. Loshchilov, F. Hutter: A downsampled variant of ImageNet as an alternative to the CIFAR
datasets. arXiv:1707.08819, 2017.

CIFAR-10 and ImageNet32 are pickled. A pickle is a program: it can call any function that it can import. Here it can
import only the few names that pickled arrays need, and they resolve to stand-ins that only record their arguments.
NumPy never receives a state from the file: its own `__setstate__` does not validate it, so one flipped byte can crash
the process.
"""

from __future__ import annotations

import codecs
import io
import math
import pickle
import struct
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits, held_out
from quasiglobal.data.readers import Pixels, fits, labelled, member, npz, opened
from quasiglobal.errors import InputError

FASHION_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
FASHION_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
FASHION_SUFFIXES = ("", ".gz")
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip

CIFAR10_FILES = (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch", "batches.meta")
IMAGENET32_FILES = (*(f"train_data_batch_{k}" for k in range(1, 11)), "val_data")
IMAGENET32_SUFFIXES = ("", ".npz")


def digits(folder: Path, memory_limit: float) -> Splits:
    """1,437 training and 360 test images of 8 × 8 pixels from scikit-learn, a fixed split; pixels are 0, …, 16."""
    package = find_spec("sklearn")                          # importing it takes a second in every process
    if package is None or package.origin is None:
        raise InputError("the digits are part of scikit-learn, which is not installed: pip install scikit-learn")
    table = np.loadtxt(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", np.int64, delimiter=",")
    x, labels = table[:, :-1].astype(np.uint8).reshape(-1, 1, 8, 8), table[:, -1]
    train, test = (labelled(x[cut], labels[cut], 10, "digits") for cut in held_out(len(x), "digits"))
    return Splits(train, test, tuple("0123456789"))


def fashion_mnist(folder: Path, memory_limit: float) -> Splits:
    """60,000 training and 10,000 test images of clothes, 28 × 28, grayscale."""

    def split(images: str, labels: str) -> Examples:
        path = member(folder, images, FASHION_SUFFIXES)
        x = _read_idx(path, 3, memory_limit)
        if x.shape[1:] != (28, 28):
            raise InputError(f"{path} holds images of {x.shape[1]} x {x.shape[2]} pixels, expected 28 x 28")
        path = member(folder, labels, FASHION_SUFFIXES)
        return labelled(x[:, None], _read_idx(path, 1, memory_limit), len(FASHION_CLASSES), path)

    return Splits(split(*FASHION_TRAIN), split(*FASHION_TEST), FASHION_CLASSES)


def _read_idx(path: Path, dimensions: int, memory_limit: float) -> Pixels:
    """Read an array of bytes: 0 0, the type (8: uint8), the number of dimensions, each size, then the content."""
    with opened(path, "an IDX file") as file:
        magic = struct.unpack(">HBB", file.read(4))
        if magic != (0, 8, dimensions):
            raise InputError(f"{path} is not an IDX file of bytes in {dimensions} dimensions")
        shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
        size = math.prod(shape)
        fits(size, memory_limit, path)
        content = file.read(size + 1)
    if len(content) != size:
        amount = "more" if len(content) > size else f"only {len(content)}"
        raise InputError(f"{path} declares {size} bytes, but holds {amount}; download it again")
    return np.frombuffer(content, np.uint8).reshape(shape)


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
    *train, test = (member(folder, name, IMAGENET32_SUFFIXES) for name in IMAGENET32_FILES)
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
