"""Train experiments in this process, all nodes as rows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from quasiglobal.runs.building import task_of
from quasiglobal.runs.callbacks import (
    KeepBest,
    SaveCheckpoints,
    Watch,
    WriteRecords,
    WriteSummaries,
    WriteTensorBoard,
    WriteUtilisation,
    facts,
)
from quasiglobal.runs.grouping import Entering, Newest, Waiting, queues
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.own_objects import check_objects, identified
from quasiglobal.runs.store import Run, RunFolder, Watcher, folders_of, unwatched
from quasiglobal.runs.tensorboard import EventFiles
from quasiglobal.training.callbacks import patient_interrupts
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program
from quasiglobal.training.task import Task


class Stopped(KeyboardInterrupt):
    """Ctrl-C stopped the training after an epoch, and everything is saved."""


def train(
    experiment: Experiment | Sequence[Experiment],
    options: Options,
    watch: Watcher = unwatched,
    task: Task | None = None,
    callbacks: Sequence[Any] = (),
) -> list[Run]:
    """Train the unfinished runs of all experiments and seeds; return all runs.

    `task` replaces the task that the experiments name. `callbacks` are the user's.

    Compatible runs train together as rows of one program, as many as fit the memory; the others wait for the rows of
    runs that end. They may differ in the seed, the partition, the learning rate and its schedule, the algorithm, the
    topology (with the same number of nodes) and the number of completed epochs.
    """
    experiments = [experiment] if isinstance(experiment, Experiment) else list(experiment)
    folders = [folder for one in map(identified, experiments) for folder in folders_of(one, options)]
    for folder in dict.fromkeys(folders):
        folder.check_topology()
        check_objects(folder)
    unfinished = []
    for folder in dict.fromkeys(folders):
        run = folder.read()
        if run.summary is None:
            unfinished.append(folder)
        elif not run.begun:
            folder.describe()                               # `find_runs` needs experiment.json
    board = EventFiles() if options.tensorboard else None
    device = choose_device(options.device)
    saved = _newest(unfinished)

    def task_for(one: Experiment) -> Task:
        return task or task_of(one, options)

    for folder, found in list(saved.items()):
        if found and found.epochs >= folder.experiment.epochs:          # its summary is missing or damaged
            program = Program(task_for(folder.experiment), [folder.experiment], device, **options.of_program)
            with folder.locked():
                folder.begin(found)
                folder.finish("finished", facts(program, 0))
            del saved[folder]
    before, model = None, None                              # a model keeps its compiled programs

    def train_group(waiting: Waiting, group: list[RunFolder], entered: list[RunFolder]) -> None:
        nonlocal before, model
        model, before = model if waiting.task is before else None, waiting.task
        experiments = [run.experiment for run in group]
        program = Program(waiting.task, experiments, device, model=model, **options.of_program)
        _train_together(program, group, waiting, entered, options, watch, board, callbacks)
        model = program.model

    for waiting in queues(saved, task_for, device, **options.of_program):
        waiting.train(train_group, _newest)
    if board:
        board.close()
    return [folder.read() for folder in folders]


def _newest(runs: Sequence[RunFolder]) -> Newest:
    """The runs that have not ended, with their newest checkpoints."""
    return {run: run.newest_locked() for run in runs if run.read_summary() is None}


def _train_together(
    program: Program,
    group: Sequence[RunFolder],
    waiting: Waiting,
    entered: list[RunFolder],
    options: Options,
    watch: Watcher,
    board: EventFiles | None,
    callbacks: Sequence[Any],
) -> None:
    """Train runs as rows of one program, and waiting runs in the rows of those that end; `entered` gets all of them.

    A user's callbacks see the same runs from start to end, so with callbacks no run enters later.
    """
    with ExitStack() as locks, patient_interrupts() as noted:
        queue = Entering(waiting, locks, entered)
        first = [queue.enter(run) for run in group]
        if any(one.saved for one in first):
            program.regroup(program.experiments, [one.saved for one in first])
        further: list[Any] = [WriteTensorBoard(queue.runs, board)] if board else []
        if options.keep_best:
            further.append(KeepBest())
        if options.utilisation:
            further.append(WriteUtilisation(options.utilisation))
        Loop(
            program,
            [
                WriteRecords(queue.runs), *further, Watch(queue.runs, watch), *callbacks,
                SaveCheckpoints(queue.runs, options.checkpoint_seconds, noted), WriteSummaries(queue.runs),
            ],
            folders=[one.folder for one in first],
            history=[one.history for one in first],
            queue=None if callbacks else queue,
        ).run()
    if noted:                                               # also in the last epoch: start nothing else
        raise Stopped
