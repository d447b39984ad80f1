"""Data sets from the Hugging Face hub, by its package `datasets` (the extra `[data]`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits
from quasiglobal.data.readers import Pixels, fits, labelled
from quasiglobal.data.texts import Corpus, Rows

if TYPE_CHECKING:
    from PIL.Image import Image

Table: TypeAlias = Any
"""A split of a data set of the package `datasets`, which need not be installed."""


@dataclass(frozen=True)
class Hub:
    """Repository of an image data set on the hub, and the names of its columns and splits."""

    repository: str
    array: Callable[[Image], Pixels]
    image: str = "image"
    test: str = "test"


@dataclass(frozen=True)
class TextHub:
    """Repository of a text data set on the hub, and the names of its columns and splits."""

    repository: str
    text: str = "text"
    test: str = "test"


def fetch(hub: Hub, memory_limit: float) -> Splits | None:
    """Download images, or read them from the cache of `datasets`; None if that package is not installed."""
    def examples(rows: Table) -> Examples:
        first = hub.array(rows[0][hub.image])
        fits(len(rows) * math.prod(first.shape), memory_limit, hub.repository)
        x = np.empty((len(rows), *first.shape), np.uint8)
        for i, row in enumerate(rows):
            x[i] = hub.array(row[hub.image])
        y = np.array(list(rows["label"]))
        return labelled(x, y, len(rows.features["label"].names), hub.repository)

    with reading(hub.repository, "a data set of the Hugging Face hub"):
        if (splits := _splits(hub)) is None:
            return None
        train, test = splits
        return Splits(examples(train), examples(test), tuple(train.features["label"].names))


def fetch_texts(hub: TextHub, name: str, classes: tuple[str, ...]) -> Corpus | None:
    """Download texts, or read them from the cache of `datasets`; None if that package is not installed."""
    def rows(split: Table) -> Rows:
        texts, y = list(split[hub.text]), np.array(list(split["label"]))
        return Rows(texts, labelled(y, y, len(classes), hub.repository).y)

    with reading(hub.repository, "a data set of the Hugging Face hub"):
        if (splits := _splits(hub)) is None:
            return None
        train, test = splits
        return Corpus(name, rows(train), rows(test), classes)


def _splits(hub: Hub | TextHub) -> tuple[Table, Table] | None:
    """Training and test split; None if the package `datasets` is not installed."""
    try:
        package = import_module("datasets")
    except ImportError:
        return None
    if not hasattr(package, "load_dataset"):  # Python imports any folder of that name as a package
        return None
    train, test = package.load_dataset(hub.repository, split=["train", hub.test])
    return train, test
