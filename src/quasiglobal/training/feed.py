"""Training batches and learning rates of all rows at each step, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from quasiglobal.common.trees import Tree, on_device
from quasiglobal.data.batches import Epoch, Owner, Plan, step_sizes
from quasiglobal.data.dataset import Dataset, Indices
from quasiglobal.data.fresh import Keyed, Workers
from quasiglobal.data.inputs import Streamed, inputs_of
from quasiglobal.data.shards import Blank, ExampleShards
from quasiglobal.errors import InputError
from quasiglobal.training.experiment import Experiment

FULL_GRADIENT_BATCH = 256
"""Batch size per node of a full gradient."""


class Feed:
    """The training examples of every row, and each epoch's random draws.

    An epoch's draws overwrite the previous epoch's, so that a captured step reads them from the same storage. Each run
    has its own epoch.
    """

    def __init__(
        self,
        data: Dataset,
        device: torch.device,
        dtype: torch.dtype,
        *,
        augment: bool,
        workers: int = 0,
    ) -> None:
        """Load the data; `assign` defines the rows.

        `workers` processes read the examples that are read anew in each epoch; with 0, this process does.
        """
        self.device, self.dtype = device, dtype
        self.inputs = inputs_of(data, data.train, device=device, dtype=dtype, moving=augment)
        self.show: Callable[..., Tree] = self.inputs.show
        """Called for each batch; may be replaced by a compiled function."""
        self.streamed = self.inputs if isinstance(self.inputs, Streamed) else None
        in_shards = isinstance(data.train.shards, ExampleShards)
        self.targets = None if in_shards else on_device(data.train.y, device, dtype)
        self.fresh = data.fresh
        self._workers = Workers(data.fresh, workers) if data.fresh is not None and workers else None
        self._keyed: list[list[Keyed]] = []

    def assign(
        self,
        experiments: Sequence[Experiment],
        parts: Sequence[Sequence[Indices]],
        nodes: Sequence[int],
        epochs: Sequence[int],
    ) -> None:
        """Feed these experiments from now on.

        `parts` has the examples of each node of each experiment; `nodes` are the nodes hosted here. Experiments with
        the same number of completed `epochs` share a clock.
        """
        first, self.nodes = experiments[0], len(nodes)
        self._read: dict[int, tuple[Tree, Tree]] = {}
        """Inputs and targets of the current step, by batch size, if they are read anew each epoch."""
        lengths = [[len(part) for part in of] for of in parts]
        if len({tuple(step_sizes(of, first.batch, first.steps)) for of in lengths}) > 1:
            raise InputError("runs that train together need the same steps per epoch; use partitions of equal sizes")
        owners = [
            Owner(one.seed, 0 if one.draws == "shared" else i, of[i])
            for one, of in zip(experiments, parts, strict=True)
            for i in nodes
        ]
        self.plan = Plan(owners, first.batch, self.inputs.draw, lengths[0], first.steps, self.inputs.need)
        self.schedules = [one.resolved.rate(self.steps_per_epoch) for one in experiments]
        self.steps = self.steps_per_epoch * first.epochs
        """Number of steps of the whole training."""
        self.shapes: Sequence[tuple[int, ...]] = ()
        self.counter = torch.zeros(1, dtype=torch.int64, device=self.device)
        clocks = {epoch: torch.zeros((), dtype=self.dtype, device=self.device) for epoch in epochs}
        self.clocks = list(clocks.values())
        self.times = [clocks[epoch] for epoch in epochs]
        """The current step t of each experiment, as a tensor."""
        self._drawn: tuple[list[int], Epoch] | None = None
        self._index: Tensor | None = None
        self._moves: tuple[Tensor, ...] = ()
        self._rates = torch.zeros(self.steps_per_epoch, len(experiments), dtype=self.dtype, device=self.device)
        self._one_rate = len(clocks) == 1 and all(schedule == self.schedules[0] for schedule in self.schedules)
        self.__dict__.pop("everything", None)

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps in one epoch."""
        return len(self.plan.sizes)

    @property
    def examples(self) -> int:
        """Number of examples per row in one epoch."""
        return sum(self.plan.sizes)

    def draw(self, epochs: Sequence[int]) -> None:
        """Draw the batches of epoch 0, 1, … of each experiment on the host, ahead of `load`."""
        numbers = [epoch for epoch in epochs for _ in range(self.nodes)]
        self._drawn = numbers, self.plan.epoch(numbers, torch.device("cpu"))

    def load(self, epochs: Sequence[int]) -> None:
        """Load the batches of epoch 0, 1, … of each experiment, drawn now or before, and move to its first step."""
        numbers = [epoch for epoch in epochs for _ in range(self.nodes)]
        if self._drawn is None or self._drawn[0] != numbers:
            self.draw(epochs)
        assert self._drawn is not None
        drawn, self._drawn = self._drawn[1], None
        self.shapes = drawn.shapes
        if self.streamed is not None:
            self.streamed.begin(drawn.index, self.plan.sizes)
        if self.fresh is not None:
            owners = [(one.seed, one.node, number) for one, number in zip(self.plan.owners, numbers, strict=True)]
            batches = zip(drawn.index.tolist(), self.plan.sizes, strict=True)
            self._keyed = [self.fresh.keyed([of[:size] for of in rows], owners) for rows, size in batches]
            if self._workers is not None:
                self._workers.begin(self._keyed)
        firsts = [epoch * self.steps_per_epoch + 1 for epoch in epochs]
        rates = [
            [schedule(min(first + step, self.steps)) for first, schedule in zip(firsts, self.schedules, strict=True)]
            for step in range(self.steps_per_epoch)
        ]                                                   # a run that has ended may stay, with its last rate
        self._rates.copy_(torch.tensor(rates, dtype=self.dtype))
        self.counter.zero_()
        for time, first in zip(self.times, firsts, strict=True):
            time.fill_(first)
        if self._index is None:
            self._index = drawn.index.to(self.device)
            self._moves = tuple(values.to(self.device) for values in drawn.moves)
        else:
            self._index.copy_(drawn.index)
            for old, new in zip(self._moves, drawn.moves, strict=True):
                old.copy_(new)

    def end(self) -> None:
        """End the processes that read examples; the next epoch starts others."""
        if self._workers is not None:
            self._workers.end()

    def read(self, step: int) -> None:
        """Read the examples of step 0, 1, … of the epoch, unless they are on the device, into the same tensors."""
        if self.streamed is not None:
            self.streamed.place(step)
        if self.fresh is None:
            return
        size, keyed = self.plan.sizes[step], self._keyed[step]
        examples = self.fresh.batch(keyed) if self._workers is None else self._workers.batch(step)
        found = on_device(self.fresh.stacked(keyed, examples, len(self.plan.owners)), self.device, self.dtype)
        if size not in self._read:
            self._read[size] = found
        else:
            tree_map(lambda old, new: old.copy_(new), self._read[size], found)

    def batch(self, size: int, *need: int) -> tuple[Tree, Tree]:
        """The inputs and targets of every row at the current step."""
        assert self._index is not None
        if self.fresh is not None:
            inputs, targets = self._read[size]
            return inputs, targets
        index, *moves = (self._at_counter(values)[:, :size] for values in (self._index, *self._moves))
        if self.streamed is not None and self.targets is None:
            return self.streamed.show_placed(size, *moves), self.streamed.placed_targets(size)
        shown = self.show(index, *moves, *need) if self.streamed is None else self.streamed.show_placed(size, *moves)
        return shown, self.targets_at(index)

    def targets_at(self, index: Tensor) -> Tree:
        """The targets of the examples `index` [k, size] of data in memory."""
        return tree_map(lambda values: values[index], self.targets)

    def rate(self) -> Tensor:
        """The learning rate of the current step: a scalar if all runs share one schedule, else [rows, 1]."""
        rates = self._at_counter(self._rates)
        return rates[0] if self._one_rate else rates.repeat_interleave(self.nodes)[:, None]

    def advance(self, steps: int = 1) -> None:
        """Advance by one or more steps."""
        self.counter.add_(steps)
        for clock in self.clocks:
            clock.add_(steps)

    @cached_property
    def everything(self) -> list[tuple[Tensor, tuple[int, ...]]]:
        """All examples of every row in batches: indices [k, size], each with the `Inputs.need` of its examples."""
        if self.fresh is not None:
            raise InputError("algorithms with full gradients need examples that are kept; use cache=True")
        if self.streamed is not None and not isinstance(self.streamed.shards, Blank):
            raise InputError("algorithms with full gradients need data in memory; leave out --stream")
        if len({len(owner.examples) for owner in self.plan.owners}) > 1:
            raise InputError("algorithms with full gradients need nodes of equal size; use another partition")
        positions = np.stack([owner.examples for owner in self.plan.owners])
        starts = range(0, positions.shape[1], FULL_GRADIENT_BATCH)
        pieces = [positions[:, first : first + FULL_GRADIENT_BATCH] for first in starts]
        return [(torch.from_numpy(piece).to(self.device), self.inputs.need(piece)) for piece in pieces]

    def _at_counter(self, values: Tensor) -> Tensor:
        return values.index_select(0, self.counter)[0]
