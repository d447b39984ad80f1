"""Data sets from the Hugging Face hub, by its package `datasets` (the extra `[data]`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.readers import Pixels, fits, labelled
from quasiglobal.data.texts import Corpus, Rows

if TYPE_CHECKING:
    from PIL.Image import Image

Content = TypeVar("Content", Splits, Corpus)

Table: TypeAlias = Any
"""A split of a data set of the package `datasets`, which need not be installed."""


def images(
    repository: str, array: Callable[[Image], Pixels], memory_limit: float, *, image: str = "image", test: str = "test"
) -> Splits | None:
    """Download images, or read them from the cache of `datasets`; None if that package is not installed.

    `array` converts an image; `image` is the name of their column, and `test` that of the test split.
    """
    def examples(rows: Table) -> Examples:
        first = array(rows[0][image])
        fits(len(rows) * math.prod(first.shape), memory_limit, repository)
        x = np.empty((len(rows), *first.shape), np.uint8)
        for i, row in enumerate(rows):
            x[i] = array(row[image])
        return labelled(x, np.array(list(rows["label"])), len(rows.features["label"].names), repository)

    return _fetched(repository, test, lambda train, held: Splits(
        examples(train), examples(held), tuple(train.features["label"].names)
    ))


def texts(
    repository: str, name: str, classes: tuple[str, ...], memory_limit: float, *, text: str = "text", test: str = "test"
) -> Corpus | None:
    """Download texts, or read them from the cache of `datasets`; None if that package is not installed."""
    def rows(split: Table) -> Rows:
        y = np.array(list(split["label"]))
        return Rows(list(split[text]), labelled(y, y, len(classes), repository).y)

    return _fetched(repository, test, lambda train, held: Corpus(name, rows(train), rows(held), classes))


def _fetched(repository: str, test: str, convert: Callable[[Table, Table], Content]) -> Content | None:
    """Convert the training and the test split; None if the package `datasets` is not installed."""
    with reading(repository, "a data set of the Hugging Face hub"):
        try:
            package = import_module("datasets")
        except ImportError:
            return None
        if not hasattr(package, "load_dataset"):            # Python imports any folder of that name as a package
            return None
        return convert(*package.load_dataset(repository, split=["train", test]))
