"""Examples that are read anew each epoch, as random transforms need: a function of (seed, node, epoch, index)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.randomness import generator
from quasiglobal.data.randomness import restored_generators, seed_all
from quasiglobal.errors import InputError

Key = tuple[int, int, int, int]
"""(seed, node, epoch, index)"""

Keyed = tuple[int, Key]
"""A row of the training examples, and the key of its random numbers."""


@dataclass(frozen=True)
class Fresh:
    """Reads an example by calling the user's data set, with all random generators seeded by its key."""

    read: Callable[[int], tuple[Any, Any]]
    """(row of the training examples) → (input, target), as tensors."""
    index: Sequence[int]
    """For each row, its index in the data set that it comes from."""
    sources: tuple[Any, ...] = ()
    """The user's data sets."""

    def keyed(self, rows: Sequence[Sequence[int]], owners: Sequence[tuple[int, int, int]]) -> list[Keyed]:
        """The rows [k, size] of each owner (seed, node, epoch), each with its key."""
        return [
            (row, (*owner, self.index[row]))
            for of, owner in zip(rows, owners, strict=True)
            for row in of
        ]

    def batch(self, keyed: Sequence[Keyed]) -> list[tuple[Any, Any]]:
        """The examples of these rows."""
        with restored_generators():
            return [self.example(*one) for one in keyed]

    def stacked(self, keyed: Sequence[Keyed], examples: Sequence[tuple[Any, Any]], k: int) -> tuple[Any, Any]:
        """Inputs and targets [k, size, …] of examples that were read for these rows; raise InputError if one is bad."""
        for (row, _), example in zip(keyed, examples, strict=True):
            if not all(leaf.isfinite().all() for leaf in tree_leaves(example) if leaf.is_floating_point()):
                raise InputError(f"example {self.index[row]} of train has a value that is not a finite number")
        try:
            x, y = tree_map(lambda *values: torch.stack(values).view(k, -1, *values[0].shape), *examples)
        except (RuntimeError, ValueError):                  # of different shapes, or of different structures
            kinds = dict.fromkeys(str(tree_map(lambda leaf: list(leaf.shape), example)) for example in examples)
            raise InputError(f"train has examples of different shapes, {' and '.join(list(kinds)[:2])}") from None
        return x, y

    def example(self, row: int, key: Key) -> tuple[Any, Any]:
        """One example; overwrites the state of the global generators."""
        seed_all(int(generator(*key).integers(2**63)))
        return self.read(row)
