"""Examples that are read anew each epoch, as random transforms need: a function of (seed, node, epoch, index)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.data.randomness import generator, restored_generators, seed_all
from quasiglobal.errors import InputError

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
        flat = [row for of in rows for row in of]
        for row, example in zip(flat, read, strict=True):
            if not all(leaf.isfinite().all() for leaf in tree_leaves(example) if leaf.is_floating_point()):
                raise InputError(f"example {self.index[row]} of train has a value that is not a finite number")
        k = len(owners)
        try:
            x, y = tree_map(lambda *values: torch.stack(values).view(k, -1, *values[0].shape), *read)
        except (RuntimeError, ValueError):                  # of different shapes, or of different structures
            kinds = dict.fromkeys(str(tree_map(lambda leaf: list(leaf.shape), example)) for example in read)
            raise InputError(f"train has examples of different shapes, {' and '.join(list(kinds)[:2])}") from None
        return x, y

    def example(self, row: int, key: Key) -> tuple[Any, Any]:
        """One example; overwrites the state of the global generators."""
        seed_all(int(generator(*key).integers(2**63)))
        return self.read(row)
