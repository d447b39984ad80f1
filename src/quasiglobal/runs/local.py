"""Train experiments in this process, all nodes as rows of one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from quasiglobal.runs.callbacks import SaveCheckpoints, Watch, WriteRecords, WriteTensorBoard
from quasiglobal.runs.grouping import programs
from quasiglobal.runs.loading import task_of
from quasiglobal.runs.options import Options, choose_device
from quasiglobal.runs.own_objects import check_objects
from quasiglobal.runs.store import Run, RunFolder, Saved, Watcher, folders_of, unwatched
from quasiglobal.runs.tensorboard import EventFiles
from quasiglobal.training.callbacks import patient_interrupts
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Callback, Loop
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

    Compatible runs train together as rows of one program, if they fit the memory. They may differ in the seed, the
    partition, the learning rate and its schedule, the algorithm and the topology (with the same number of nodes).
    """
    experiments = [experiment] if isinstance(experiment, Experiment) else list(experiment)
    folders = [folder for one in experiments for folder in folders_of(one, options)]
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
    saved = {folder: folder.newest_locked() for folder in unfinished}

    def task_for(one: Experiment) -> Task:
        return task or task_of(one, options)

    before, model = None, None                              # a model keeps its compiled programs
    for chosen, group in programs(saved, task_for, device):
        model = model if chosen is before else None
        program = Program(
            chosen, [run.experiment for run in group], device, model=model, **options.of_program
        )
        _train_together(program, {run: saved.pop(run) for run in group}, options, watch, board, callbacks)
        before, model = chosen, program.model
        del program                                         # so that its memory can be released
    if board:
        board.close()
    return [folder.read() for folder in folders]


def _train_together(
    program: Program,
    saved: dict[RunFolder, Saved],
    options: Options,
    watch: Watcher,
    board: EventFiles | None,
    callbacks: Sequence[Any],
) -> None:
    """Train runs with the same number of completed epochs as rows of one program."""
    runs = list(saved)
    with ExitStack() as locks, patient_interrupts() as noted:
        for run in runs:
            locks.enter_context(run.locked())
        if found := [checkpoint for checkpoint in saved.values() if checkpoint]:
            program.restore([rows for rows, _ in found], found[0][1].epochs)
        for run, checkpoint in saved.items():
            run.begin(checkpoint and checkpoint[1])
        boards: list[Callback] = [WriteTensorBoard(runs, board)] if board else []
        Loop(
            program,
            [
                WriteRecords(runs), *boards, Watch(runs, watch), *callbacks,
                SaveCheckpoints(runs, options.checkpoint_seconds, noted),
            ],
            folders=[run.folder for run in runs],
            history=[run.read_records() for run in runs],
        ).run()
    if noted:                                               # also in the last epoch: start nothing else
        raise Stopped
