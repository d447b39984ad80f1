"""Examples that are read anew each epoch, as random transforms need: a function of (seed, node, epoch, index)."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map

from quasiglobal.data.randomness import generator

Key = tuple[int, int, int, int]
"""(seed, node, epoch, index)"""


@dataclass(frozen=True)
class Fresh:
    """Reads an example by calling the user's data set, with all random generators seeded by its key."""

    read: Callable[[int], tuple[Any, Any]]
    """(row of the training examples) → (input, target), as tensors."""
    index: Sequence[int]
    """For each row, its index in the data set that it comes from."""
    sources: tuple[Any, ...] = ()
    """The user's data sets."""

    def batch(self, rows: Sequence[Sequence[int]], owners: Sequence[tuple[int, int]], epoch: int) -> tuple[Any, Any]:
        """Inputs and targets [k, size, …] of the rows [k, size] of each owner (seed, node)."""
        with restored_generators():
            read = [
                self.example(row, (*owner, epoch, self.index[row]))
                for of, owner in zip(rows, owners, strict=True)
                for row in of
            ]
        k = len(owners)
        x, y = tree_map(lambda *values: torch.stack(values).view(k, -1, *values[0].shape), *read)
        return x, y

    def example(self, row: int, key: Key) -> tuple[Any, Any]:
        """One example; overwrites the state of the global generators."""
        seed = int(generator(*key).integers(2**63))
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        return self.read(row)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of torch (CPU), NumPy and Python afterwards."""
    numbers, states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(states)
