"""IDX files, plain or gzipped: the format of MNIST, and of Fashion-MNIST.

H. Xiao, K. Rasul, R. Vollgraf: Fashion-MNIST, a novel image dataset for benchmarking machine learning
algorithms. arXiv:1708.07747, 2017.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.readers import Pixels, fits, labelled, member, opened
from quasiglobal.errors import InputError

TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
SUFFIXES = ("", ".gz")

CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat",
    "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def fashion_mnist(folder: Path, memory_limit: float) -> Splits:
    """60,000 training and 10,000 test images of clothes, 28 × 28, grayscale."""

    def split(images: str, labels: str) -> Examples:
        path = member(folder, images, SUFFIXES)
        x = read(path, 3, memory_limit)
        if x.shape[1:] != (28, 28):
            raise InputError(f"{path} holds images of {x.shape[1]} x {x.shape[2]} pixels, expected 28 x 28")
        path = member(folder, labels, SUFFIXES)
        return labelled(x[:, None], read(path, 1, memory_limit), len(CLASSES), path)

    return Splits(split(*TRAIN), split(*TEST), CLASSES)


def read(path: Path, dimensions: int, memory_limit: float) -> Pixels:
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
