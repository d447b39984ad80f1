"""Examples that are read anew each epoch, as random transforms need: a function of (seed, node, epoch, index).

`Workers` read them ahead of the training, in several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, Dataset

from quasiglobal.common.randomness import generator, restored_generators, seed_all
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError

Key = tuple[int, int, int, int]
"""(seed, node, epoch, index)"""

Keyed = tuple[int, Key]
"""A row of the training examples, and the key of its random numbers."""

Example: TypeAlias = tuple[Tree, Tree]
"""Input and target, as tensors."""


@dataclass(frozen=True)
class Fresh:
    """Reads an example by calling the user's data set, with all random generators seeded by its key."""

    read: Callable[[int], Example]
    """Reads a row of the training examples."""
    index: Sequence[int]
    """For each row, its index in the data set that it comes from."""
    sources: tuple[object, ...] = ()
    """The user's data sets."""

    def keyed(self, rows: Sequence[Sequence[int]], owners: Sequence[tuple[int, int, int]]) -> list[Keyed]:
        """The rows [k, size] of each owner (seed, node, epoch), each with its key."""
        return [
            (row, (*owner, self.index[row]))
            for of, owner in zip(rows, owners, strict=True)
            for row in of
        ]

    def batch(self, keyed: Sequence[Keyed]) -> list[Example]:
        """The examples of these rows."""
        with restored_generators():
            return [self.example(*one) for one in keyed]

    def stacked(self, keyed: Sequence[Keyed], examples: Sequence[Example], k: int) -> Example:
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

    def example(self, row: int, key: Key) -> Example:
        """One example; overwrites the state of the global generators."""
        seed_all(int(generator(*key).integers(2**63)))
        return self.read(row)


class Workers:
    """Reads the batches of an epoch in several processes, a few steps ahead. Examples depend on their keys alone."""

    def __init__(self, fresh: Fresh, count: int) -> None:
        self._fresh, self._count = fresh, count
        self._steps: list[list[Keyed]] = []
        self._next = 0
        self._loader: DataLoader[Example | InputError] | None = None
        self._batches: Iterator[list[Example | InputError]] = iter(())

    def begin(self, steps: list[list[Keyed]]) -> None:
        """Begin an epoch with the examples of each step."""
        if self._loader is None:
            self._loader = DataLoader(
                _Examples(self._fresh), batch_sampler=self._steps, num_workers=self._count, collate_fn=list,
                persistent_workers=True,
            )
        self._steps[:], self._next = steps, 0               # the loader's workers live longer than an epoch
        self._batches = iter(self._loader)

    def end(self) -> None:
        """End the processes; the next epoch starts others. A loader that is collected as garbage waits 5 s for them."""
        self._loader, self._batches = None, iter(())

    def batch(self, step: int) -> list[Example]:
        """The examples of a step; steps are requested in order, and may be skipped."""
        found, self._next = next(islice(self._batches, step - self._next, None)), step + 1
        examples = []
        for example in found:
            if isinstance(example, InputError):
                raise example
            examples.append(example)
        return examples


class _Examples(Dataset[Example | InputError]):
    """Reads one example in a worker; an error is returned, since a worker would wrap it in a stack trace."""

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh

    def __getitem__(self, keyed: Keyed) -> Example | InputError:
        try:
            return self.fresh.example(*keyed)
        except InputError as error:
            return error
