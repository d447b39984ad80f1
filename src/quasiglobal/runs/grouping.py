"""Runs that train together as rows of one program, and those that wait for free rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch

from quasiglobal.common.objects import is_own
from quasiglobal.data.batches import step_sizes
from quasiglobal.engines.capture import release
from quasiglobal.runs.memory import runs_that_fit
from quasiglobal.runs.store import RunFolder, Saved
from quasiglobal.training.experiment import Experiment, program_key, step_order
from quasiglobal.training.loop import Entrant
from quasiglobal.training.partitions import partition_of
from quasiglobal.training.task import Task


@dataclass
class Waiting:
    """Runs that can be rows of one program, in the order in which they get rows."""

    task: Task
    runs: list[RunFolder]
    most: int
    """Number of runs that fit the memory."""
    saved: Mapping[RunFolder, Saved]
    device: torch.device

    def __len__(self) -> int:
        return len(self.runs)

    def groups(self) -> Iterator[list[RunFolder]]:
        """Yield the runs of a program until none waits; the memory of a program is released before the next."""
        while self.runs:
            yield self.take(self.most)
            release(self.device)

    def take(self, count: int) -> list[RunFolder]:
        """Remove and return at most `count` runs, sorted by algorithm, topology and epochs."""
        taken, self.runs = self.runs[:count], self.runs[count:]
        return sorted(taken, key=lambda run: (step_order(run.experiment), _epochs(self.saved[run])))


class Entering:
    """Lets waiting runs enter a loop: locks their folders, and cuts their records back to their checkpoints."""

    def __init__(self, waiting: Waiting, saved: dict[RunFolder, Saved], locks: ExitStack) -> None:
        self.waiting, self.saved, self.locks = waiting, saved, locks
        self.runs: list[RunFolder] = []
        """The runs that have entered, in the order of the loop."""

    def __len__(self) -> int:
        return len(self.waiting)

    def take(self, count: int) -> list[Entrant]:
        """Let at most `count` runs enter."""
        return [self.enter(run) for run in self.waiting.take(count)]

    def enter(self, run: RunFolder) -> Entrant:
        """Let a run enter."""
        self.locks.enter_context(run.locked())
        rows, progress = self.saved.pop(run) or (None, None)
        run.begin(progress)
        self.runs.append(run)
        return Entrant(run.experiment, run.folder, rows, progress.epochs if progress else 0, run.read_records())


def queues(
    saved: Mapping[RunFolder, Saved], task_of: Callable[[Experiment], Task], device: torch.device
) -> Iterator[Waiting]:
    """Yield the runs that can be rows of one program, those with a checkpoint first."""
    groups: dict[str, list[RunFolder]] = {}
    for run in sorted(saved, key=lambda run: saved[run] is None):
        groups.setdefault(program_key(run.experiment), []).append(run)
    for alike in groups.values():
        task = task_of(alike[0].experiment)
        for same in _of_equal_epochs(alike, task):
            yield Waiting(task, same, runs_that_fit(task, [run.experiment for run in same], device), saved, device)


def _epochs(saved: Saved) -> int:
    return saved[1].epochs if saved else 0


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
            lengths = [len(part) for part in partition_of(task.data, one)]
            sizes[kind] = tuple(step_sizes(lengths, one.batch, one.steps))
        groups.setdefault(sizes[kind], []).append(run)
    return list(groups.values())
