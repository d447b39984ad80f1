"""Image files: a user's own and ImageNet, in one folder per class; and images without labels, for predictions.

O. Russakovsky et al.: ImageNet large scale visual recognition challenge. IJCV, 2015.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quasiglobal.common.files import cache_folder, reading
from quasiglobal.data.dataset import Examples, Splits, held_out
from quasiglobal.data.readers import Pixels, npz
from quasiglobal.data.shards import UNDECODED, Blank, Shards
from quasiglobal.errors import InputError

if TYPE_CHECKING:
    from PIL.Image import Image

SUFFIXES = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm"}
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "PPM")
"""Accepted image formats, whatever the file's suffix: some other Pillow formats start external programs."""

SIDE = 256
"""Side of an ImageNet image in memory, in pixels."""

Files = list[tuple[Path, int]]
"""Paths of images with their class indices."""


def read(path: Path, memory_limit: float) -> Splits:
    """Read a user's own images, from class folders or an .npz archive.

    Layouts: PATH/train/CLASS/… with PATH/test/CLASS/… or PATH/val/CLASS/…; or PATH/CLASS/…, with a fixed fifth
    held out. All images must have the same size. They stay grayscale if all are grayscale, and are RGB otherwise.
    Images beyond the memory limit stay on disk, in shards.
    """
    if os.path.isfile(path):
        return npz.read(path, memory_limit)
    if not os.path.isdir(path):
        raise InputError(f"{path} is neither an .npz file nor a folder of class folders")
    parts = [name for name in ("train", "test", "val") if os.path.isdir(path / name)]
    if not parts:
        classes = _classes(path)
        files = _files(path, classes)
        train, test = ([files[i] for i in cut] for cut in held_out(len(files), path))
    elif "train" in parts and len(parts) > 1:
        train, test, classes = _split(path / "train", path / parts[1])
    else:
        raise InputError(f"{path} has {' and '.join(parts)} alone; it needs train and test, or only class folders")
    shape = _common_shape([file for file, _ in train + test])
    return _decode_both(train, test, classes, shape, partial(pixels, channels=shape[0]), memory_limit)


def imagenet(folder: Path, memory_limit: float) -> Splits:
    """Read train/CLASS/… and val/CLASS/…; images may have any size.

    Each is stored as 256 × 256 pixels: the shorter side scaled to 256, the longer side center-cropped. Training takes
    its random crops from these squares, not from the whole images. Beyond the memory limit they stay on disk.
    """
    train, test, classes = _split(folder / "train", folder / "val")
    return _decode_both(train, test, classes, (3, SIDE, SIDE), middle, memory_limit)


def image_files(path: Path) -> list[Path]:
    """The file itself, or all images under a folder, sorted by name."""
    if not os.path.isdir(path):
        return [path]
    with reading(path, "a folder of images"):
        found = sorted(file for file in path.rglob("*") if file.suffix.lower() in SUFFIXES and file.is_file())
    if not found:
        raise InputError(f"{path} holds no images ({', '.join(sorted(SUFFIXES))})")
    return found


def images(files: Sequence[Path], shape: Sequence[int], resize: bool) -> Tensor:
    """Image files as uint8 [m, channels, height, width]; with `resize`, their middle is scaled to this size."""
    channels, height, width = shape
    found = []
    for file in files:
        with opened_image(file) as image:
            check_depth(image, file)
            if resize:
                found.append(middle(image, shape))
            elif image.size != (width, height):
                raise InputError(
                    f"{file} has {image.size[0]} x {image.size[1]} pixels, but the model takes {width} x {height}; "
                    "scale it, or add --resize"
                )
            else:
                found.append(pixels(image, channels))
    return torch.from_numpy(np.ascontiguousarray(np.stack(found)))


def pixels(image: Image, channels: int) -> Pixels:
    """Pixels [channels, height, width] of an image in its own size, grayscale or RGB."""
    values = np.asarray(image.convert("L" if channels == 1 else "RGB"))
    return np.atleast_3d(values).transpose(2, 0, 1)


def middle(image: Image, shape: Sequence[int] = (3, SIDE, SIDE)) -> Pixels:
    """The middle of an image, as large as possible, scaled to [channels, height, width] (bilinear)."""
    from PIL import ImageOps
    from PIL.Image import Resampling

    channels, height, width = shape
    mode = "L" if channels == 1 else "RGB"
    return pixels(ImageOps.fit(image.convert(mode), (width, height), Resampling.BILINEAR), channels)


def _split(train: Path, test: Path) -> tuple[Files, Files, tuple[str, ...]]:
    classes = _classes(train)
    strange = set(_classes(test)) - set(classes)
    if strange:
        raise InputError(f"{test} has the class {min(strange)!r}, which is not in {train}")
    return _files(train, classes), _files(test, classes), classes


def _classes(folder: Path) -> tuple[str, ...]:
    with reading(folder, "a folder of class folders"):
        names = sorted(e.name for e in os.scandir(folder) if e.is_dir() and not e.name.startswith("."))
    if not names:
        raise InputError(f"{folder} has no folders; it needs one folder of images per class")
    return tuple(names)


def _files(folder: Path, classes: tuple[str, ...]) -> Files:
    files: Files = []
    empty: list[str] = []
    for label, name in enumerate(classes):
        if not os.path.isdir(folder / name):                # a class without test images
            continue
        with reading(folder / name, "a folder of images"):
            entries = os.scandir(folder / name)
            found = sorted(Path(e) for e in entries if e.is_file() and Path(e).suffix.lower() in SUFFIXES)
        if not found:
            empty.append(name)
        files += [(file, label) for file in found]
    if not files:
        raise InputError(f"{folder} holds no images in its class folders ({', '.join(sorted(SUFFIXES))})")
    for name in empty:
        warnings.warn(f"{folder / name} holds no images, but counts as a class; remove it otherwise", stacklevel=2)
    return files


def check_depth(image: Image, file: Path) -> None:
    """Raise InputError for an image with more than 8 bits per pixel."""
    if image.mode[0] in "IF":
        raise InputError(f"{file} has more than 8 bits per pixel; convert it to 8 bits")


def _common_shape(files: list[Path]) -> tuple[int, int, int]:
    """The shape of all images, read from their headers."""
    sizes: dict[tuple[int, int], Path] = {}
    channels = 1
    for file in files:
        with opened_image(file) as image:
            check_depth(image, file)
            channels = max(channels, 1 if image.mode in ("1", "L", "LA") else 3)
            sizes.setdefault(image.size, file)
        if len(sizes) > 1:
            (size, first), (other, second) = sizes.items()
            raise InputError(
                f"all images need one size, but {first} has {size[0]} x {size[1]} pixels "
                f"and {second} has {other[0]} x {other[1]}"
            )
    (width, height), *_ = sizes
    return channels, height, width


def _decode_both(
    train: Files, test: Files, classes: tuple[str, ...], shape: tuple[int, int, int],
    array: Callable[[Image], Pixels], memory_limit: float,
) -> Splits:
    """Decode the images into memory, or into shards if they exceed the memory limit."""
    large = len(train + test) * math.prod(shape) > memory_limit

    def examples(files: Files) -> Examples:
        shards: Shards | None = None
        if UNDECODED.get():
            shards = Blank(Path(), (len(files), *shape), not large)
        elif large:
            shards = _decode_to_disk(files, shape, array)
        x = _decode(files, shape, array) if shards is None else shards.x
        return Examples(x, torch.tensor([label for _, label in files]), shards=shards)

    return Splits(examples(train), examples(test), classes)


def _decode_to_disk(files: Files, shape: tuple[int, int, int], array: Callable[[Image], Pixels]) -> Shards:
    """Decode the images into shards in the cache folder; the folder's name depends on the files and their times."""
    digest = hashlib.sha256(json.dumps([shape, getattr(array, "__name__", "pixels")]).encode())
    for file, _ in files:
        with reading(file, "an image"):
            found = os.stat(file)
        digest.update(os.fsencode(f"{os.path.abspath(file)} {found.st_size} {found.st_mtime_ns}\n"))
    shards = Shards(cache_folder("shards") / digest.hexdigest()[:32], (len(files), *shape))

    def read(row: int) -> Pixels:
        with opened_image(files[row][0]) as image:
            return np.ascontiguousarray(array(image))

    shards.make(read)
    return shards


def _decode(files: Files, shape: tuple[int, int, int], array: Callable[[Image], Pixels]) -> Tensor:
    x = np.empty((len(files), *shape), np.uint8)
    block = 64

    def fill(start: int) -> None:
        for row in range(start, min(start + block, len(files))):
            with opened_image(files[row][0]) as image:
                x[row] = array(image)

    with ThreadPoolExecutor() as pool:  # Pillow releases Python's lock while it decodes and scales
        for _ in pool.map(fill, range(0, len(files), block)):
            pass
    return torch.from_numpy(x)


@contextmanager
def opened_image(file: Path) -> Iterator[Image]:
    """Open an image file of one of the accepted formats."""
    import PIL.Image

    with reading(file, "an image"), PIL.Image.open(file, formats=FORMATS) as image:
        yield image
