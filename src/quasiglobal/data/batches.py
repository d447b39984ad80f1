"""Batches of each node at each step, with their augmentation: a function of (seed, node, epoch)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.common.randomness import generator
from quasiglobal.data.dataset import Indices


@dataclass(frozen=True)
class Owner:
    """A row of x: node `node` of the run with this seed, and the indices of its examples."""

    seed: int
    node: int
    examples: Indices


@dataclass(frozen=True)
class Epoch:
    """Random draws of an epoch, for all steps, on the device.

    `index` [steps, k, batch] are indices into the data. If images are augmented, `moves` [steps, k, batch, …] are
    their flips and crops. The last step may have fewer examples than `batch`: see `Plan.sizes`. `shapes` are known
    on the host: each step's batch size and, for texts, its length in tokens.
    """

    index: Tensor
    moves: tuple[Tensor, ...]
    shapes: Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Plan:
    """Order of the batches: every node shuffles its own examples each epoch.

    If all nodes have the same number of examples, the last batch of an epoch may be shorter. If the numbers differ,
    an epoch is ⌈mean number / batch⌉ steps of full batches, and each node cycles through its own shuffled stream.
    If `steps` is given, an epoch is that many steps of full batches, drawn in the same way.
    """

    owners: Sequence[Owner]
    batch: int
    draw: Callable[[np.random.Generator, int], tuple[NDArray[np.generic], ...]] = lambda rng, count: ()
    """Draw the augmentation of a number of examples."""
    lengths: Sequence[int] | None = None
    """Number of examples of each node of a run, if some nodes are in other processes."""
    steps: int = 0
    """Steps of full batches in an epoch; 0: derived from the number of examples."""
    need: Callable[[Indices], tuple[int, ...]] = lambda index: ()
    """Shape of a batch of these examples besides the batch size, such as the length in tokens."""

    @cached_property
    def sizes(self) -> list[int]:
        """The batch size of each step of an epoch."""
        return step_sizes(self.lengths or [len(owner.examples) for owner in self.owners], self.batch, self.steps)

    def epoch(self, number: int | Sequence[int], device: torch.device) -> Epoch:
        """The draws of epoch 0, 1, …, the same for all owners or one for each.

        Indices beyond the last step's size are padding.
        """
        numbers = [number] * len(self.owners) if isinstance(number, int) else number
        steps, need = len(self.sizes), sum(self.sizes)
        index = np.zeros((len(self.owners), steps * self.batch), dtype=np.int64)
        moves = []
        for row, (owner, of_owner) in enumerate(zip(self.owners, numbers, strict=True)):
            rng = generator(owner.seed, owner.node, of_owner)
            m = len(owner.examples)                         # a shuffled stream, reshuffled at its end
            stream = np.concatenate([rng.permutation(m) for _ in range(math.ceil(need / m))])
            index[row, :need] = owner.examples[stream[:need]]
            moves.append(self.draw(rng, index.shape[1]))

        def steps_first(values: NDArray[np.generic]) -> Tensor:
            stacked = values.reshape(len(self.owners), steps, self.batch, *values.shape[2:])
            return torch.from_numpy(np.ascontiguousarray(stacked.swapaxes(0, 1))).to(device)

        shapes = [
            (size, *self.need(index[:, first : first + size]))
            for first, size in zip(range(0, index.shape[1], self.batch), self.sizes, strict=True)
        ]
        moved = tuple(steps_first(np.stack(move)) for move in zip(*moves, strict=True))
        return Epoch(steps_first(index), moved, shapes)


def step_sizes(lengths: Sequence[int], batch: int, steps: int = 0) -> list[int]:
    """The batch size of each step of an epoch, given the number of examples of each node; see `Plan`.

    >>> step_sizes([70, 70], batch=32), step_sizes([30, 110], batch=32), step_sizes([70, 70], batch=32, steps=2)
    ([32, 32, 6], [32, 32, 32], [32, 32])
    """
    if steps:
        return [batch] * steps
    if len(set(lengths)) > 1:
        return [batch] * math.ceil(sum(lengths) / len(lengths) / batch)
    full, rest = divmod(lengths[0], batch)
    return [batch] * full + ([rest] if rest else [])
