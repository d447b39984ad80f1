"""Data sets from the Hugging Face hub, through its package `datasets` (the extra `[data]`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from quasiglobal.tasks.datasets.base import Examples, Pixels, Splits, fits, labelled, reading

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Hub:
    """Where the hub keeps a data set, and how it calls things."""

    repository: str
    array: Callable[[Image], Pixels]
    image: str = "image"
    test: str = "test"


def fetch(hub: Hub, memory_limit: float) -> Splits | None:
    """Download the data set, or take what an earlier download left in the cache; None if not installed."""
    try:
        package = import_module("datasets")
    except ImportError:
        return None
    if not hasattr(package, "load_dataset"):  # Python takes any folder of that name for a package
        return None

    def examples(rows: Any) -> Examples:
        first = hub.array(rows[0][hub.image])
        fits(len(rows) * math.prod(first.shape), memory_limit, hub.repository)
        x = np.empty((len(rows), *first.shape), np.uint8)
        for i, row in enumerate(rows):
            x[i] = hub.array(row[hub.image])
        y = np.array(list(rows["label"]))
        return labelled(x, y, len(rows.features["label"].names), hub.repository)

    with reading(hub.repository, "a data set of the Hugging Face hub"):
        train, test = package.load_dataset(hub.repository, split=["train", hub.test])
        return Splits(examples(train), examples(test), tuple(train.features["label"].names))
