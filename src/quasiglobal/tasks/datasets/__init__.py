"""Data sets by name, read from the user's disk into memory.

Each is looked for in the data folder: the argument, else $QG_DATA, else ./data. What is not there comes from
the Hugging Face hub, where the extra `[data]` is installed and a network is there.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from quasiglobal.errors import InputError, unknown
from quasiglobal.tasks.datasets import cifar, digits, folders, hub, idx
from quasiglobal.tasks.datasets.base import Dataset, Examples, Splits, agreed, locate, moments
from quasiglobal.tasks.datasets.hub import Hub

__all__ = ["SOURCES", "Dataset", "Examples", "Found", "Source", "agreed", "available", "load"]

MEMORY_LIMIT = 64e9
"""Bytes: the most that `load` decodes unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """A data set with a name: where it lies, what to know about it, and how to get it."""

    read: Callable[[Path, float], Splits]
    """The reader, from a folder and a memory limit."""
    files: tuple[str, ...]
    """What the folder must have; () for what is embedded."""
    suffixes: tuple[str, ...] = ("",)
    """What a file's name may end with."""
    folders: tuple[str, ...] = ()
    """Where to look, relative to the data folder, best first."""
    hub: Hub | None = None
    steps: str
    """How to get it, with {data} for the data folder."""
    examples: int
    """Training and test examples in the published set."""
    scale: float = 255
    mean: tuple[float, ...] | None = None
    """None: measured on the training examples."""
    std: tuple[float, ...] | None = None
    augmentation: str = "none"

    def places(self, data: Path) -> list[Path]:
        """The folders to look in."""
        return [data / folder for folder in self.folders]

    def missing(self, folder: Path) -> tuple[str, ...]:
        """The files that the folder lacks."""
        return tuple(name for name in self.files if locate(folder, name, self.suffixes) is None)

    def find(self, data: Path) -> Path | None:
        """The folder with most of the files, if one has any."""
        best = min(self.places(data), key=lambda folder: len(self.missing(folder)), default=None)
        return None if best is None or self.missing(best) == self.files else best


@dataclass(frozen=True)
class Found:
    """A line of `qg data`."""

    name: str
    where: str | None
    """The folder it was found in, or None."""
    missing: tuple[str, ...]
    """The files that are missing there."""
    examples: int
    """Training and test examples in the published set."""
    steps: str
    """The exact command, or the steps, to get it."""


def load(name: str, data_dir: Path | str | None = None, *, memory_limit: float = MEMORY_LIMIT) -> Dataset:
    """The data set of that name, or a user's own: `folder:PATH`, of class folders or an .npz archive.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), data.shape, data.scale
    (1437, 360, (1, 8, 8), 16)
    """
    kind, _, path = name.partition(":")
    if kind == "folder":
        return _own(name, folders.read(Path(os.path.expanduser(path)), memory_limit))
    if name == "own":
        raise InputError("every node of this run has its own data; name yours, as folder:PATH")
    if name not in SOURCES:
        raise unknown("data set", name, [*SOURCES, "folder:PATH"])
    source = SOURCES[name]
    splits = _read(name, source, data_folder(data_dir), memory_limit)
    mean, std = source.mean, source.std
    if mean is None or std is None:
        mean, std = moments(splits.train.x, source.scale)
    return Dataset(name, *splits, source.scale, mean, std, source.augmentation)


def available(data_dir: Path | str | None = None) -> list[Found]:
    """What `load` knows by name, what of it is on this machine, and how to get the rest."""
    data = data_folder(data_dir)
    found = []
    for name, source in SOURCES.items():
        folder = source.find(data)
        where = str(folder or "embedded") if folder or not source.files else None
        missing = source.missing(folder) if folder else source.files
        found.append(Found(name, where, missing, source.examples, _steps(source, data)))
    return found


def data_folder(data_dir: Path | str | None) -> Path:
    """Where data sets are looked for."""
    return Path(os.path.expanduser(data_dir or os.environ.get("QG_DATA") or "data"))


def _steps(source: Source, data: Path) -> str:
    return source.steps.format(data=shlex.quote(str(data)))


def _read(name: str, source: Source, data: Path, memory_limit: float) -> Splits:
    folder = source.find(data)
    if folder or not source.files:
        return source.read(folder or data, memory_limit)
    lost = f"{name} is not in {' or '.join(map(str, source.places(data)))}"
    if source.hub:
        try:
            splits = hub.fetch(source.hub, memory_limit)
        except InputError as error:
            lost += f", and the hub did not help ({error})"
        else:
            if splits:
                return splits
    raise InputError(f"{lost}; get it: {_steps(source, data)}")


def _own(name: str, splits: Splits) -> Dataset:
    scale = 255.0 if splits.train.x.dtype == torch.uint8 else 1.0
    return Dataset(name, *splits, scale, *moments(splits.train.x, scale), "none")


IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SOURCES: dict[str, Source] = {
    "digits": Source(
        read=digits.read,
        files=(),
        steps="nothing to do: scikit-learn carries it",
        examples=1_797,
        scale=16,
    ),
    "fashion-mnist": Source(
        read=idx.fashion_mnist,
        files=idx.TRAIN + idx.TEST,
        suffixes=idx.SUFFIXES,
        folders=("fashion-mnist", ".", "/usr/share/datasets/fashion-mnist"),
        hub=Hub("zalando-datasets/fashion_mnist", partial(folders.pixels, channels=1)),
        steps=(
            "apt-get install dataset-fashion-mnist (Debian, Ubuntu), or "
            "curl --create-dirs --output-dir {data}/fashion-mnist --remote-name-all "
            "'http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/{{train-images-idx3,train-labels-idx1,"
            "t10k-images-idx3,t10k-labels-idx1}}-ubyte.gz'"
        ),
        examples=70_000,
        mean=(0.2860,),
        std=(0.3530,),
    ),
    "cifar10": Source(
        read=cifar.cifar10,
        files=cifar.CIFAR10_FILES,
        folders=("cifar-10-batches-py", "."),
        hub=Hub("uoft-cs/cifar10", partial(folders.pixels, channels=3), image="img"),
        steps=(
            "mkdir -p {data} && "
            "curl https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz | tar xz -C {data}"
        ),
        examples=60_000,
        # The released code's. Its std is the mean of the images' own, not .247 .243 .262 of all pixels.
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augmentation="flip-crop",
    ),
    "imagenet32": Source(
        read=cifar.imagenet32,
        files=cifar.IMAGENET32_FILES,
        suffixes=cifar.SUFFIXES,
        folders=("imagenet32", "."),
        steps=(
            "register at https://image-net.org/download-images, download Imagenet32_train.zip and "
            "Imagenet32_val.zip, then unzip -j -d {data}/imagenet32 'Imagenet32_*.zip'"
        ),
        examples=1_331_167,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation="flip-crop",
    ),
    "imagenet": Source(
        read=folders.imagenet,
        files=("train", "val"),
        folders=("imagenet", "."),
        hub=Hub("ILSVRC/imagenet-1k", folders.middle, test="validation"),
        steps=(
            "register at https://image-net.org/download-images, download ILSVRC2012, and put the pictures in "
            "{data}/imagenet/train/CLASS/ and {data}/imagenet/val/CLASS/"
        ),
        examples=1_331_167,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation="resize-crop",
    ),
}
"""What `load` knows by name. A user's own source goes here too: SOURCES["mine"] = Source(…)."""
