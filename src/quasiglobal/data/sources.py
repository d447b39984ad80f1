"""Data sets by name, read from the user's disk into memory.

Readers search the data folder: the argument, else $QG_DATA, else ./data. A missing data set is downloaded from
the Hugging Face hub if the extra `[data]` is installed and a network is available.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Generic, Literal

import torch

from quasiglobal.common.files import reading
from quasiglobal.common.objects import imported, is_path
from quasiglobal.data.dataset import Dataset, Examples, Splits, agreed, moments
from quasiglobal.data.own import dataset_of
from quasiglobal.data.readers import Reader, csv_files, folders, hub, locate, npz, published
from quasiglobal.data.readers.hub import Content
from quasiglobal.data.shards import Blank
from quasiglobal.data.texts import Corpus
from quasiglobal.errors import InputError, unknown

__all__ = [
    "SOURCES", "TEXT_SOURCES", "Corpus", "Dataset", "Examples", "Found", "Source", "agreed", "available", "corpus",
    "is_text", "load", "named",
]  # fmt: skip

MEMORY_LIMIT = 64e9
"""Default limit on the bytes that `load` decodes."""


def reader_of(path: str) -> Reader | None:
    """The reader of a file, by the suffix of its name; None if no reader has it."""
    return next((reader for reader in READERS if path.endswith(reader.suffixes)), None)


@dataclass(frozen=True)
class DataName:
    """Parsed name of a data set, or path of a user's own.

    >>> DataName.parse("cifar10").kind, DataName.parse("csv:notes.csv").path
    ('named', 'notes.csv')
    """

    text: str
    kind: Literal["named", "files", "python"]
    path: str = ""
    reader: Reader | None = None

    @classmethod
    def parse(cls, text: str) -> DataName:
        """Parse the text in an experiment."""
        prefix, _, path = text.partition(":")
        if known := [reader for reader in READERS if reader.prefix == prefix]:
            reader = next((reader for reader in known if path.endswith(reader.suffixes)), known[-1])
            return cls(text, "files", os.path.expanduser(path), reader)
        return cls(text, "python" if is_path(text) else "named")

    @property
    def streams(self) -> bool:
        """Whether the data can stay on disk: image files, and a user's own Datasets."""
        return self.text == "imagenet" or self.kind == "python" or (self.reader is not None and self.reader.streams)

    @property
    def is_text(self) -> bool:
        """Whether the data are texts, which need a tokenizer."""
        return self.text in TEXT_SOURCES or (self.reader is not None and self.reader.corpus is not None)


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Content]):
    """Named data set of images or texts: where it is, its reader, how to download it, and how images are shown."""

    read: Callable[[Path, float], Content]
    """The reader, from a folder and a memory limit."""
    files: tuple[str, ...]
    """Required files; () for an embedded data set."""
    suffixes: tuple[str, ...] = ("",)
    """Accepted suffixes of a file's name."""
    folders: tuple[str, ...] = ()
    """Folders to search, relative to the data folder, best first."""
    fetch: Callable[[float], Content | None] = lambda memory_limit: None
    """Downloads the data set from the hub; returns None if a package for it is not installed."""
    steps: str
    """Download instructions, with {data} for the data folder."""
    examples: int
    """Training and test examples in the published set."""
    scale: float = 255
    mean: tuple[float, ...] | None = None
    """None: measured on the training examples."""
    std: tuple[float, ...] | None = None
    augmentation: str = "none"

    def missing(self, folder: Path) -> tuple[str, ...]:
        """The files that the folder lacks."""
        return tuple(name for name in self.files if locate(folder, name, self.suffixes) is None)

    def find(self, data: Path) -> Path | None:
        """The folder with most of the files; None if no folder has any."""
        places = [data / folder for folder in self.folders]
        best = min(places, key=lambda folder: len(self.missing(folder)), default=None)
        return None if best is None or self.missing(best) == self.files else best

    def steps_for(self, data: Path) -> str:
        """Download instructions for this data folder."""
        return self.steps.format(data=shlex.quote(str(data)))

    def load(self, name: str, data: Path, memory_limit: float) -> Content:
        """Read the data set, or download it from the hub; raise InputError with the instructions if that fails."""
        folder = self.find(data)
        if folder or not self.files:
            return self.read(folder or data, memory_limit)
        lost = f"{name} is not in {' or '.join(str(data / place) for place in self.folders)}"
        try:
            if found := self.fetch(memory_limit):
                return found
        except InputError as error:
            lost += f", and the Hugging Face hub failed ({error})"
        raise InputError(f"{lost}; get it: {self.steps_for(data)}")


@dataclass(frozen=True)
class Found:
    """One line of `qg data`."""

    name: str
    where: str | None
    """The folder it was found in, or None."""
    missing: tuple[str, ...]
    """The files that are missing there."""
    examples: int
    """Training and test examples in the published set."""
    steps: str
    """The exact command, or the steps, to download it."""


def load(
    name: str, data_dir: Path | str | None = None, *, memory_limit: float = MEMORY_LIMIT, stream: bool = False
) -> Dataset:
    """Load a data set by name, or a user's own: `folder:PATH`, with class folders or an .npz archive.

    Image files and your own Datasets beyond the memory limit, in bytes, or with `stream`, stay on disk.

    >>> data = load("digits")
    >>> len(data.train), len(data.test), data.shape, data.scale
    (1437, 360, (1, 8, 8), 16)
    """
    asked = DataName.parse(name)
    if stream:
        check_streams(name)
        memory_limit = 0
    if asked.reader is not None and asked.reader.splits is not None:
        return _own(name, asked.reader.splits(Path(asked.path), memory_limit))
    if asked.kind == "python":
        return _from_python(name, memory_limit)
    if name == "own":
        raise InputError("every node of this run has its own data; give yours as folder:PATH or csv:PATH")
    if asked.is_text:
        raise InputError(f"{name} is text, which needs a language model, such as --model hf:PATH")
    if name not in SOURCES:
        if os.path.exists(name):
            raise InputError(f"{name} is a path; write {named(name)}")
        raise unknown("data set", name, [*SOURCES, *TEXT_SOURCES, *(f"{prefix}:PATH" for prefix in PREFIXES)])
    source = SOURCES[name]
    splits = source.load(name, data_folder(data_dir), memory_limit)
    mean, std = source.mean, source.std
    if mean is None or std is None:
        mean, std = _moments(splits.train, source.scale)
    return Dataset(name, *splits, source.scale, mean, std, source.augmentation)


def check_streams(name: str) -> None:
    """Raise InputError for data that cannot stay on disk."""
    if not DataName.parse(name).streams:
        raise InputError(
            f"{name} cannot be streamed; leave out --stream, or use image files, imagenet or a Dataset of your own"
        )


def corpus(
    name: str, data_dir: Path | str | None = None, testing: bool = False, *, memory_limit: float = MEMORY_LIMIT
) -> Corpus:
    """Load texts by name, or a user's own: `csv:PATH`, a file or a folder with train.csv and test.csv.

    With `testing`, all of a user's texts are test examples, in file order, and train.csv is not needed.
    """
    asked = DataName.parse(name)
    if asked.reader is not None and asked.reader.corpus is not None:
        return asked.reader.corpus(Path(asked.path), memory_limit, testing)
    if name not in TEXT_SOURCES:
        paths = (f"{reader.prefix}:PATH" for reader in READERS if reader.corpus is not None)
        raise unknown("data set of texts", name, [*TEXT_SOURCES, *paths])
    return TEXT_SOURCES[name].load(name, data_folder(data_dir), memory_limit)


def raw(name: str, data_dir: Path | str | None = None) -> Dataset | Corpus:
    """Load data by name: images or features by `load`, untokenised texts by `corpus`."""
    return corpus(name, data_dir) if is_text(name) else load(name, data_dir)


def published_examples(name: str) -> int:
    """Number of training and test examples of a named data set as published; 0 for a user's own."""
    return (SOURCES | TEXT_SOURCES)[name].examples if name in SOURCES or name in TEXT_SOURCES else 0


def is_text(name: str) -> bool:
    """Whether the named data are texts, which are loaded by `corpus` and need a tokenizer.

    >>> [is_text(name) for name in ("agnews", "csv:mine.csv", "cifar10")]
    [True, True, False]
    """
    return DataName.parse(name).is_text


def named(data: str) -> str:
    """Name of a user's own data, from a path; a name with a prefix is returned unchanged.

    >>> named("notes.csv.gz"), named("images"), named("csv:notes")
    ('csv:notes.csv.gz', 'folder:images', 'csv:notes')
    """
    if DataName.parse(data).kind != "named":
        return data
    folder = Path(os.path.expanduser(data))
    fits = (one for one in READERS if data.endswith(one.suffixes) or locate(folder, "train", one.suffixes) is not None)
    return f"{next((reader.prefix for reader in fits), 'folder')}:{data}"


def available(data_dir: Path | str | None = None) -> list[Found]:
    """Known data sets, which are installed, and how to get the rest."""
    data = data_folder(data_dir)
    found = []
    for name, source in (SOURCES | TEXT_SOURCES).items():
        folder = source.find(data)
        where = str(folder or "embedded") if folder or not source.files else None
        missing = source.missing(folder) if folder else source.files
        found.append(Found(name, where, missing, source.examples, source.steps_for(data)))
    return found


def data_folder(data_dir: Path | str | None) -> Path:
    """The folder to search for data sets."""
    return Path(os.path.expanduser(data_dir or os.environ.get("QG_DATA") or "data"))


def load_table(
    name: str, label: str, *, numbers: bool = False, memory_limit: float = MEMORY_LIMIT, testing: bool = False
) -> Dataset:
    """Load a table of numbers, such as csv:PATH: the column `label` is the target, the other columns are the input.

    With `numbers`, a target of whole numbers is not a class number. With `testing`, all rows are test examples.
    """
    asked = DataName.parse(name)
    if asked.reader is None or asked.reader.table is None:
        reader = reader_of(name)
        hint = f"leave it out with {name}" if reader is None or reader.table is None else (
            f"write {reader.prefix}:{asked.path or name}"
        )
        raise InputError(f"label is for CSV tables, csv:PATH; {hint}")
    return _own(name, asked.reader.table(Path(asked.path), label, memory_limit, numbers, testing))


def _from_python(path: str, memory_limit: float) -> Dataset:
    """Load package.module:name: data as for `quasiglobal.Task`, a dict of train and test, or a function."""
    found = imported(path, "data set")
    if isinstance(found, type) or (callable(found) and not hasattr(found, "__getitem__")):
        with reading(path, "data"):
            found = found()
    both = found if isinstance(found, Mapping) and "train" in found else {"train": found}
    return replace(dataset_of(both["train"], both.get("test"), memory_limit=memory_limit), name=path)


def _own(name: str, splits: Splits) -> Dataset:
    scale = 255.0 if splits.train.x.dtype == torch.uint8 else 1.0
    return Dataset(name, *splits, scale, *_moments(splits.train if len(splits.train) else splits.test, scale), "none")


def _moments(examples: Examples, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of the examples per channel; 0.5 for images that are not decoded."""
    blank = isinstance(examples.shards, Blank)
    return ((0.5,) * examples.x.shape[1],) * 2 if blank else moments(examples.x, scale)


READERS = (
    Reader(prefix="folder", suffixes=(".npz",), splits=npz.read, inputs=npz.inputs),
    Reader(prefix="folder", splits=folders.read, streams=True),
    Reader(
        prefix="csv", suffixes=csv_files.SUFFIXES, corpus=csv_files.read_corpus, texts=csv_files.read_text_column,
        table=csv_files.read_table, columns=csv_files.read_columns,
    ),
)
"""Formats of a user's files; a path belongs to the first reader that fits."""

PREFIXES = tuple(dict.fromkeys(reader.prefix for reader in READERS))

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

SOURCES: dict[str, Source[Splits]] = {
    "digits": Source(
        read=published.digits,
        files=(),
        steps="nothing to do: included in scikit-learn",
        examples=1_797,
        scale=16,
    ),
    "fashion-mnist": Source(
        read=published.fashion_mnist,
        files=published.FASHION_TRAIN + published.FASHION_TEST,
        suffixes=published.FASHION_SUFFIXES,
        folders=("fashion-mnist", ".", "/usr/share/datasets/fashion-mnist"),
        fetch=partial(hub.images, "zalando-datasets/fashion_mnist", partial(folders.pixels, channels=1)),
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
        read=published.cifar10,
        files=published.CIFAR10_FILES,
        folders=("cifar-10-batches-py", "."),
        fetch=partial(hub.images, "uoft-cs/cifar10", partial(folders.pixels, channels=3), image="img"),
        steps=(
            "mkdir -p {data} && "
            "curl https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz | tar xz -C {data}"
        ),
        examples=60_000,
        # From the released code. Its std is the mean of the per-image stds, not the .247 .243 .262 over all pixels.
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2023, 0.1994, 0.2010),
        augmentation="flip-crop",
    ),
    "imagenet32": Source(
        read=published.imagenet32,
        files=published.IMAGENET32_FILES,
        suffixes=published.IMAGENET32_SUFFIXES,
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
        fetch=partial(hub.images, "ILSVRC/imagenet-1k", folders.middle, test="validation"),
        steps=(
            "register at https://image-net.org/download-images, download ILSVRC2012, and put the images in "
            "{data}/imagenet/train/CLASS/ and {data}/imagenet/val/CLASS/"
        ),
        examples=1_331_167,
        mean=IMAGENET_MEAN,
        std=IMAGENET_STD,
        augmentation="resize-crop",
    ),
}
"""Data sets of `load` by name. Users can register their own: SOURCES["mine"] = Source(…)."""

TEXT_SOURCES: dict[str, Source[Corpus]] = {
    "agnews": Source(
        read=partial(csv_files.read_pair, name="agnews", tests="test", classes=csv_files.AGNEWS),
        files=("train", "test"),
        suffixes=csv_files.SUFFIXES,
        folders=("agnews", "ag_news_csv"),
        fetch=partial(hub.texts, "fancyzhx/ag_news", "agnews", csv_files.AGNEWS),
        steps=(
            "curl --create-dirs --output-dir {data}/agnews --remote-name-all "
            "'https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/{{train,test}}.csv'"
        ),
        examples=127_600,
    ),
    "sst2": Source(
        read=partial(csv_files.read_pair, name="sst2", tests="dev", classes=csv_files.SST2),
        files=("train", "dev"),                             # GLUE does not publish the labels of `test`
        suffixes=csv_files.SUFFIXES,
        folders=("sst2", "SST-2"),
        fetch=partial(
            hub.texts, "stanfordnlp/sst2", "sst2", csv_files.SST2, text="sentence", test="validation"
        ),
        steps=(
            "mkdir -p {data} && curl --output {data}/SST-2.zip https://dl.fbaipublicfiles.com/glue/data/SST-2.zip && "
            "unzip -d {data} {data}/SST-2.zip"
        ),
        examples=68_221,
    ),
}
"""Data sets of `corpus` by name."""
