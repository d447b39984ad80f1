"""Runs that train together as rows of one program, and those that wait for free rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from quasiglobal.common.objects import is_own
from quasiglobal.data.batches import step_sizes
from quasiglobal.runs.memory import enough_memory, fewer, runs_that_fit
from quasiglobal.runs.store import RunFolder
from quasiglobal.stacked.capture import release
from quasiglobal.training.experiment import Experiment, program_key, step_order
from quasiglobal.training.loop import Entrant
from quasiglobal.training.rows import Checkpoint
from quasiglobal.training.task import Task

Newest = dict[RunFolder, Checkpoint | None]
"""Runs with their newest checkpoints."""


@dataclass
class Waiting:
    """Runs that can be rows of one program, in the order in which they get rows."""

    task: Task
    runs: list[RunFolder]
    most: int
    """Number of runs that fit the memory."""
    saved: Newest
    device: torch.device

    def __len__(self) -> int:
        return len(self.runs)

    def train(self, train_group: TrainGroup, again: Callable[[list[RunFolder]], Newest]) -> None:
        """Train groups of runs until none waits; the memory of a group is released before the next.

        If the memory does not suffice, half as many runs continue at a time. `again` returns those of the given runs
        that have not ended, with their newest checkpoints.
        """
        while self.runs:
            group = self.take(self.most)
            entered: list[RunFolder] = []
            fits = enough_memory(train_group, self, group, entered)
            release(self.device)
            if not fits:
                self.most = fewer([run.experiment for run in group], self.device)
                left = again(list(dict.fromkeys([*group, *entered])))
                self.saved.update(left)
                self.runs = [*left, *self.runs]

    def take(self, count: int) -> list[RunFolder]:
        """Remove and return at most `count` runs, sorted by algorithm, topology and epochs."""
        taken, self.runs = self.runs[:count], self.runs[count:]
        return sorted(taken, key=lambda run: (step_order(run.experiment), _epochs(self.saved[run])))


TrainGroup = Callable[[Waiting, list[RunFolder], list[RunFolder]], None]
"""Trains a group of runs; adds those that enter the program, also later, to the last argument."""


class Entering:
    """Lets waiting runs enter a loop: locks their folders, and cuts their records back to their checkpoints."""

    def __init__(self, waiting: Waiting, locks: ExitStack, runs: list[RunFolder]) -> None:
        self.waiting, self.locks = waiting, locks
        self.runs = runs
        """The runs that have entered, in the order of the loop."""

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self, count: int) -> list[Entrant]:
        """Let at most `count` runs enter."""
        return [self.enter(run) for run in self.waiting.take(count)]

    def enter(self, run: RunFolder) -> Entrant:
        """Let a run enter."""
        self.locks.enter_context(run.locked())
        saved = self.waiting.saved.pop(run)
        run.begin(saved)
        self.runs.append(run)
        return Entrant(run.experiment, run.folder, saved, run.read_records())


def queues(
    saved: Newest, task_of: Callable[[Experiment], Task], device: torch.device, **how: Any
) -> Iterator[Waiting]:
    """Yield the runs that can be rows of one program, those with a checkpoint first.

    `how` are the options of a `Program`.
    """
    groups: dict[str, list[RunFolder]] = {}
    for run in sorted(saved, key=lambda run: saved[run] is None):
        groups.setdefault(program_key(run.experiment), []).append(run)
    for alike in groups.values():
        task = task_of(alike[0].experiment)
        for same in _of_equal_epochs(alike, task):
            most = runs_that_fit(task, [run.experiment for run in same], device, **how)
            yield Waiting(task, same, most, saved, device)


def _epochs(saved: Checkpoint | None) -> int:
    return saved.epochs if saved else 0


def _of_equal_epochs(runs: Sequence[RunFolder], task: Task) -> list[list[RunFolder]]:
    """Group runs with the same batch sizes per epoch.

    These depend on the kind of partition, not on α or the seed, unless the partition is a user's function.
    """
    kinds = {run.experiment.partition for run in runs}
    if len(kinds) == 1 and not any(map(is_own, kinds)):
        return [list(runs)]
    sizes: dict[tuple[str, int], tuple[int, ...]] = {}
    groups: dict[tuple[int, ...], list[RunFolder]] = {}
    for run in runs:
        one = run.experiment
        kind = (one.partition, one.seed if is_own(one.partition) else 0)
        if kind not in sizes:
            lengths = [len(part) for part in one.resolved.partition(task.data)]
            sizes[kind] = tuple(step_sizes(lengths, one.batch, one.steps))
        groups.setdefault(sizes[kind], []).append(run)
    return list(groups.values())
