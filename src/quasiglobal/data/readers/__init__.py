"""Readers of data files, one file per format or family of data sets; here their description and shared functions."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.texts import Corpus
from quasiglobal.errors import InputError

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Reader:
    """A format of a user's files, which are named PREFIX:PATH, and its functions.

    Each function gets a path, and a limit on the bytes that it reads.
    """

    prefix: str
    suffixes: tuple[str, ...] = ()
    """Suffixes of its files' names. (): folders, and files with the suffix of no other reader."""
    streams: bool = False
    """Whether data beyond the limit stay on disk."""

    splits: Callable[[Path, float], Splits] | None = None
    """Images or features with class numbers."""
    table: Callable[[Path, str, float, bool, bool], Splits] | None = None
    """(path, column of the targets, limit, whether whole numbers are not classes, whether all rows are tests)."""
    corpus: Callable[[Path, float, bool], Corpus] | None = None
    """Labelled texts: (path, limit, whether all are tests)."""

    inputs: Callable[[Path, float], Tensor] | None = None
    """Without labels: images or features."""
    columns: Callable[[Path, Sequence[str], str, int, float], Tensor] | None = None
    """Without labels: (path, columns, or none for all but the label, the label, number of columns, limit)."""
    texts: Callable[[Path, float], list[str]] | None = None
    """Without labels: texts."""


def labelled(x: NDArray[np.generic], y: NDArray[np.generic], classes: int, where: object, first: int = 0) -> Examples:
    """Check x and y, and build examples; the file's labels are first, …, first + classes − 1."""
    if len(x) == 0:
        raise InputError(f"{where} holds no examples")
    if len(x) != len(y):
        raise InputError(f"{where} has {len(x)} examples, but {len(y)} labels")
    lowest, highest = int(y.min()), int(y.max())
    if lowest < first or highest >= first + classes:
        bad = lowest if lowest < first else highest
        raise InputError(f"{where} has the label {bad}; labels are {first} to {first + classes - 1}")
    labels = torch.from_numpy(y.astype(np.int64) - first)
    return Examples(torch.from_numpy(np.require(x, requirements=["C", "W"])), labels)


@contextmanager
def opened(path: Path, what: str) -> Iterator[IO[bytes]]:
    """Open a file, plain or gzipped, with the errors of `reading`."""
    with reading(path, what), open(path, "rb") as raw:
        gzipped = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        with gzip.open(raw) if gzipped else raw as content:
            yield cast(IO[bytes], content)


def locate(folder: Path, name: str, suffixes: Sequence[str] = ("",)) -> Path | None:
    """Path of the first name + suffix that exists in the folder; None if absent."""
    paths = (folder / f"{name}{suffix}" for suffix in suffixes)
    return next((path for path in paths if os.path.exists(path)), None)


def member(folder: Path, name: str, suffixes: Sequence[str] = ("",)) -> Path:
    """Path of the file `name` in the folder, with one of the suffixes; raise an error if it is missing."""
    path = locate(folder, name, suffixes)
    if path is None or not os.path.isfile(path):
        raise InputError(f"{folder / name} is missing; download the data set again")
    return path


def fits(size: int, memory_limit: float, where: object) -> None:
    """Raise an error if the size in bytes exceeds the memory limit."""
    if size > memory_limit:
        raise InputError(
            f"{where} needs {size / 1e9:.3g} GB of memory, above the limit of {memory_limit / 1e9:.3g} GB; "
            "raise memory_limit, --memory-limit in GB, if this machine has more memory"
        )
