"""Train experiments in this process, all nodes as rows of one tensor: in run folders, or in memory.

Compatible runs are rows of one program, as many as fit the memory; the others wait for the rows of runs that end.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch

from quasiglobal.common.files import alone
from quasiglobal.common.objects import is_own
from quasiglobal.data.batches import step_sizes
from quasiglobal.runs.best import KeepBest
from quasiglobal.runs.building import task_of
from quasiglobal.runs.callbacks import TensorBoard, WriteSummaries, WriteUtilisation, facts, watching
from quasiglobal.runs.estimate import enough_memory, fewer, runs_that_fit
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.saving import SaveCheckpoints
from quasiglobal.runs.store import Run, RunFolder, Watcher, folders_of, unchanged_folders, unwatched
from quasiglobal.stacked.capture import release
from quasiglobal.training.experiment import Experiment, grouped, program_key, step_order
from quasiglobal.training.loop import Call, Entrant, Interrupts, Loop, patient_interrupts
from quasiglobal.training.metrics import Record
from quasiglobal.training.program import Program
from quasiglobal.training.rows import Checkpoint, NamedRows, models_of
from quasiglobal.training.task import Task


class Stopped(KeyboardInterrupt):
    """Ctrl-C stopped the training after an epoch, and everything is saved."""


def simulate(
    experiment: Experiment | Sequence[Experiment],
    options: Options,
    watch: Watcher = unwatched,
    task: Task | None = None,
    callbacks: Sequence[object] = (),
) -> list[Run]:
    """Train the unfinished runs of all experiments and seeds; return all runs.

    `task` replaces the task that the experiments name. `callbacks` are the user's.

    Runs that train together may differ in the seed, the partition, the learning rate and its schedule, the algorithm,
    the topology (with the same number of nodes) and the number of completed epochs.
    """
    experiments = [experiment] if isinstance(experiment, Experiment) else experiment
    folders = [folder for one in experiments for folder in unchanged_folders(one, options)]
    for folder in dict.fromkeys(folders):
        run = folder.read()
        if run.summary is not None and not run.begun:
            folder.describe()                               # `find_runs` needs experiment.json
    board = [TensorBoard()] if options.tensorboard else []
    device = choose_device(options.device)
    saved = _unfinished(dict.fromkeys(folders))

    def task_for(one: Experiment) -> Task:
        return task or task_of(one, options)

    for folder, found in list(saved.items()):
        if found and found.epochs >= folder.experiment.epochs:          # its summary is missing or damaged
            program = Program(task_for(folder.experiment), [folder.experiment], device, **options.of_program)
            with alone(folder.folder):
                folder.begin(found)
                folder.finish("finished", facts(program, 0))
            del saved[folder]
    before, model = None, None                              # a model keeps its compiled programs

    def train_group(waiting: Waiting, group: list[RunFolder]) -> None:
        nonlocal before, model
        model, before = model if waiting.task is before else None, waiting.task
        experiments = [run.experiment for run in group]
        program = Program(waiting.task, experiments, device, model=model, **options.of_program)
        _train_together(program, group, waiting, options, watch, board, callbacks)
        model = program.model

    for waiting in queues(saved, task_for, options):
        waiting.train_groups(train_group, _unfinished)
    return [folder.read() for folder in folders]


def simulate_in_memory(
    task: Task, experiment: Experiment, options: Options, callbacks: Sequence[object] = ()
) -> list[tuple[Experiment, list[Record], NamedRows, str]]:
    """Train all seeds of an experiment without files; return the records, the models and the status of each."""
    device = choose_device(options.device)
    found: dict[Experiment, tuple[list[Record], NamedRows, str]] = {}
    folders = folders_of(experiment, options)

    def train_group(waiting: Waiting, group: list[RunFolder]) -> None:
        if noted:
            return

        def keep(loop: Loop, runs: Iterable[int]) -> None:
            for k in runs:
                found[group[k].experiment] = loop.runs[k], models_of(loop.rows_of(k)), loop.ends.get(k, "unfinished")

        program = Program(task, [run.experiment for run in group], device, **options.of_program)
        leaving = Call(lambda loop: keep(loop, loop.diverged))          # runs that diverged leave their program
        loop = Loop(program, [*callbacks, leaving, Interrupts(noted)])
        loop.run()
        keep(loop, [k for k in range(len(group)) if loop.ends.get(k) != "diverged"])
        if loop.interrupted and not loop.ended:
            warnings.warn(f"stopped by Ctrl-C after epoch {loop.epoch} of {experiment.epochs}", stacklevel=7)

    with patient_interrupts() as noted:
        for waiting in queues(dict.fromkeys(folders), lambda one: task, options):
            waiting.train_groups(train_group, dict.fromkeys)
    return [(run.experiment, *found[run.experiment]) for run in folders if run.experiment in found]


# ------------------------------------------------------------------------------------------ rows of one program

Newest = dict[RunFolder, Checkpoint | None]
"""Runs with their newest checkpoints."""


def _unfinished(runs: Iterable[RunFolder]) -> Newest:
    """The runs that have not ended."""
    return {run: run.newest_locked() for run in runs if run.read_summary() is None}


def queues(saved: Newest, task_of: Callable[[Experiment], Task], options: Options) -> Iterator[Waiting]:
    """Yield the runs that can be rows of one program, those with a checkpoint first."""
    in_order = sorted(saved, key=lambda run: saved[run] is None)
    device = choose_device(options.device)
    for alike in grouped(in_order, lambda run: program_key(run.experiment)).values():
        task = task_of(alike[0].experiment)
        for same in _of_equal_epochs(alike, task):
            most = runs_that_fit(task, [run.experiment for run in same], options)
            yield Waiting(task, same, most, saved, device)


def _of_equal_epochs(runs: Sequence[RunFolder], task: Task) -> list[list[RunFolder]]:
    """Group runs with the same batch sizes per epoch.

    These depend on the kind of partition, not on α or the seed, unless the partition is a user's function.
    """
    def kind(run: RunFolder) -> tuple[str, int]:
        partition = run.experiment.partition
        return partition, run.experiment.seed if is_own(partition) else 0

    def sizes(one: Experiment) -> tuple[int, ...]:
        return tuple(step_sizes([len(part) for part in one.resolved.partition(task.data)], one.batch, one.steps))

    kinds = grouped(runs, kind)
    if len(kinds) == 1:
        return list(kinds.values())
    of_kind = {one: sizes(alike[0].experiment) for one, alike in kinds.items()}
    return list(grouped(runs, lambda run: of_kind[kind(run)]).values())


@dataclass
class Waiting:
    """Runs that can be rows of one program, in the order in which they get rows."""

    task: Task
    runs: list[RunFolder]
    most: int
    """Number of runs that fit the memory."""
    saved: Newest
    device: torch.device
    entered: list[RunFolder] = field(default_factory=list)
    """The runs that have entered the present program, in the order of its loop."""
    locks: ExitStack = field(default_factory=ExitStack)
    """The locks of their folders."""

    def __len__(self) -> int:
        return len(self.runs)

    def train_groups(self, train_group: TrainGroup, again: Callable[[list[RunFolder]], Newest]) -> None:
        """Train groups of runs until none waits; the memory of a group is released before the next.

        If the memory does not suffice, half as many runs continue at a time. `again` returns those of the given runs
        that have not ended, with their newest checkpoints.
        """
        while self.runs:
            group, self.entered = self._next(self.most), []
            fits = enough_memory(partial(train_group, self, group))
            release(self.device)
            if not fits:
                self.most = fewer([run.experiment for run in group], self.device)
                left = again(list(dict.fromkeys([*group, *self.entered])))
                self.saved.update(left)
                self.runs = [*left, *self.runs]

    def take(self, count: int) -> list[Entrant]:
        """Let at most `count` runs enter the loop."""
        return [self.enter(run) for run in self._next(count)]

    def enter(self, run: RunFolder) -> Entrant:
        """Let a run enter: lock its folder, and cut its records back to its checkpoint."""
        self.locks.enter_context(alone(run.folder))
        saved = self.saved.pop(run)
        run.begin(saved)
        self.entered.append(run)
        return Entrant(run.experiment, run.folder, saved, run.read_records())

    def _next(self, count: int) -> list[RunFolder]:
        """Remove and return at most `count` runs, sorted by algorithm, topology and epochs."""
        taken, self.runs = self.runs[:count], self.runs[count:]
        epochs = {run: saved.epochs if (saved := self.saved[run]) else 0 for run in taken}
        return sorted(taken, key=lambda run: (step_order(run.experiment), epochs[run]))


TrainGroup = Callable[[Waiting, list[RunFolder]], None]
"""Trains a group of runs, and waiting runs in the rows of those that end."""


def _train_together(
    program: Program,
    group: Sequence[RunFolder],
    waiting: Waiting,
    options: Options,
    watch: Watcher,
    board: Sequence[TensorBoard],
    callbacks: Sequence[object],
) -> None:
    """Train runs as rows of one program, and waiting runs in the rows of those that end.

    A user's callbacks see the same runs from start to end, so with callbacks no run enters later.
    """
    def write_records(loop: Loop) -> None:
        for k, record in loop.latest.items():
            runs[k].write(record)

    with waiting.locks, patient_interrupts() as noted:
        runs = waiting.entered
        first = [waiting.enter(run) for run in group]
        if any(one.saved for one in first):
            program.regroup(program.experiments, [one.saved for one in first])
        best = [KeepBest()] if options.keep_best else []
        used = [WriteUtilisation(options.utilisation)] if options.utilisation else []
        Loop(
            program,
            [
                Call(write_records), *board, *best, *used, watching(runs, watch), *callbacks,
                SaveCheckpoints(runs, options.checkpoint_seconds, noted), WriteSummaries(runs),
            ],
            folders=[one.folder for one in first],
            history=[one.history for one in first],
            queue=None if callbacks else waiting,
        ).run()
    if noted:                                               # also in the last epoch: start nothing else
        raise Stopped
