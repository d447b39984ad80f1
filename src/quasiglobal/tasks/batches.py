"""Which examples each node sees at each step, and how they are shown: a function of (seed, node, epoch)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.tasks.partition import Indices
from quasiglobal.tasks.randomness import generator

PAD = 4
"""Pixels of black around an image that random crops are taken from."""


@dataclass(frozen=True)
class Owner:
    """A row of x: node `node` of the run with this seed, and the examples it holds."""

    seed: int
    node: int
    examples: Indices


@dataclass(frozen=True)
class Epoch:
    """All that is random in an epoch, for all steps at once, on the device.

    `index` [steps, k, batch] are positions in the data; where images are augmented, `flip` and `shift`
    [steps, k, batch(, 2)] say how each is mirrored and moved. The last step may be shorter than the batch: see
    `Plan.sizes`.
    """

    index: Tensor
    flip: Tensor | None
    shift: Tensor | None


@dataclass(frozen=True)
class Plan:
    """Every node goes through its own examples in a new order each epoch.

    Nodes of equal size keep the last, shorter batch. Where sizes differ, an epoch is ⌈mean size / batch⌉ steps
    of full batches, and each node cycles through its own shuffled stream.
    """

    owners: Sequence[Owner]
    batch: int
    augment: bool = True

    @cached_property
    def sizes(self) -> list[int]:
        """The batch size of each step of an epoch."""
        lengths = {len(owner.examples) for owner in self.owners}
        if len(lengths) > 1:
            mean = sum(len(owner.examples) for owner in self.owners) / len(self.owners)
            return [self.batch] * math.ceil(mean / self.batch)
        full, rest = divmod(lengths.pop(), self.batch)
        return [self.batch] * full + ([rest] if rest else [])

    def epoch(self, number: int, device: torch.device) -> Epoch:
        """The draws of epoch 0, 1, …; what is beyond the last step's size is padding."""
        steps, need = len(self.sizes), sum(self.sizes)
        shape = len(self.owners), steps * self.batch
        index = np.zeros(shape, dtype=np.int64)
        flip, shift = np.zeros(shape, dtype=np.bool_), np.zeros((*shape, 2), dtype=np.int64)
        for row, owner in enumerate(self.owners):
            rng = generator(owner.seed, owner.node, number)
            index[row, :need] = owner.examples[_stream(rng, len(owner.examples), need)]
            if self.augment:
                flip[row] = rng.integers(2, size=shape[1])
                shift[row] = rng.integers(2 * PAD + 1, size=(shape[1], 2))

        def steps_first(values: NDArray[np.generic]) -> Tensor:
            stacked = values.reshape(len(self.owners), steps, self.batch, *values.shape[2:])
            return torch.from_numpy(np.ascontiguousarray(stacked.swapaxes(0, 1))).to(device)

        if not self.augment:
            return Epoch(steps_first(index), None, None)
        return Epoch(steps_first(index), steps_first(flip), steps_first(shift))


def _stream(rng: np.random.Generator, size: int, need: int) -> Indices:
    """The first `need` of a shuffled stream over `size` examples, shuffled anew when it runs out."""
    return np.concatenate([rng.permutation(size) for _ in range(math.ceil(need / size))])[:need]
