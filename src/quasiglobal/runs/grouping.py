"""Groups of runs that train together as rows of one program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from quasiglobal.common.objects import is_own
from quasiglobal.data.batches import step_sizes
from quasiglobal.runs.memory import release, runs_that_fit
from quasiglobal.runs.store import RunFolder, Saved
from quasiglobal.training.experiment import Experiment, program_key
from quasiglobal.training.partitions import partition_of
from quasiglobal.training.task import Task


def programs(
    saved: Mapping[RunFolder, Saved], task_of: Callable[[Experiment], Task], device: torch.device
) -> Iterator[tuple[Task, list[RunFolder]]]:
    """Yield groups of runs that can be rows of one program and fit the memory, each with its task.

    The memory of a group is released before the next group.
    """
    for alike in _alike(saved):
        task = task_of(alike[0].experiment)
        for same in _of_equal_epochs(alike, task):
            fit = runs_that_fit(task, [run.experiment for run in same], device)
            for first in range(0, len(same), fit):
                yield task, same[first : first + fit]
                release(device)


def _alike(saved: Mapping[RunFolder, Saved]) -> list[list[RunFolder]]:
    """Group runs by program key and completed epochs; sort each group by algorithm and topology."""
    groups: dict[tuple[int, str], list[RunFolder]] = {}
    for run, found in saved.items():
        key = (found[1].epochs if found else 0, program_key(run.experiment))
        groups.setdefault(key, []).append(run)
    return [sorted(group, key=_by_step) for group in groups.values()]


def _by_step(run: RunFolder) -> tuple[str, str]:
    return run.experiment.algorithm, run.experiment.topology


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
