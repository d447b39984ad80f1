"""Train a task's experiment in memory, in run folders or over processes, and return the result of `qg.train`."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from quasiglobal.api.progress import progress
from quasiglobal.api.trained import Trained, TrainedRun
from quasiglobal.errors import InputError
from quasiglobal.runs import distributed, local
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import folders_of
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.task import Task


def trained(task: Task, experiment: Experiment, options: Options, callbacks: Sequence[Any], keep: bool) -> Trained:
    """Train all seeds; `keep` writes run folders."""
    if options.engine == "distributed":
        if not keep:
            return _told(_over_processes_without_folder(task, experiment, options, callbacks))
        distributed.train_over_processes(experiment, options, task=task, callbacks=callbacks, wait=True)
        return _told(_from_folders(task, experiment, options))
    with progress(experiment) as bar:
        if not keep:
            found = local.simulate_in_memory(task, experiment, options, [*callbacks, bar])
            return _told(Trained([
                TrainedRun(records, one, task, partial(dict, rows), status) for one, records, rows, status in found
            ]))
        _tell_of_early_ends(experiment, options)
        try:
            local.simulate(experiment, options, task=task, callbacks=[*callbacks, bar])
        except local.Stopped:
            warnings.warn("stopped by Ctrl-C; the same call resumes", stacklevel=3)
    return _told(_from_folders(task, experiment, options))


def _over_processes_without_folder(
    task: Task, experiment: Experiment, options: Options, callbacks: Sequence[Any]
) -> Trained:
    """Train over the processes of one machine, which share a temporary folder, and keep the result in memory."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) != os.environ.get("WORLD_SIZE"):
        raise InputError("processes on several machines need runs=…, a folder that all of them share")
    name = f"quasiglobal-{os.environ.get('MASTER_PORT', '')}-{experiment.hash}"
    there = replace(options, runs=Path(tempfile.gettempdir()) / name)
    distributed.train_over_processes(experiment, there, task=task, callbacks=callbacks, wait=True, temporary=True)
    found = Trained([run.in_memory() for run in _from_folders(task, experiment, there).runs])
    distributed.wait_for_all(experiment, options)           # all have read the folder
    shutil.rmtree(there.runs, ignore_errors=True)
    return found


def _from_folders(task: Task, experiment: Experiment, options: Options) -> Trained:
    runs = [folder.read() for folder in folders_of(experiment, options)]
    return Trained([
        TrainedRun(
            run.records(), run.experiment, task, lambda run=run: run.rows()[0], run.status, run.folder  # type: ignore[misc]
        )
        for run in runs
    ])


def _told(result: Trained) -> Trained:
    """Warn of runs that diverged."""
    for run in result.runs:
        if run.status == "diverged":
            what = f"{run.experiment.algorithm} with seed {run.experiment.seed}"
            epochs = f"{len(run)} of {run.experiment.epochs}"
            warnings.warn(f"{what} diverged in epoch {epochs}; try a smaller lr", stacklevel=5)
    return result


def _tell_of_early_ends(experiment: Experiment, options: Options) -> None:
    """Warn of finished runs that a callback ended before their last epoch: they are not continued."""
    for folder in folders_of(experiment, options):
        run = folder.read()
        if run.status == "finished" and len(run.records()) < experiment.epochs:
            warnings.warn(
                f"a callback ended {run.folder} after epoch {len(run.records())} of {experiment.epochs}; delete the "
                "folder to train it again", stacklevel=5,
            )
