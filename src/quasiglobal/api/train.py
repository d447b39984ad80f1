"""Train a task of your own, in memory, in run folders or over processes: `qg.train`."""

from __future__ import annotations

import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

from quasiglobal.api.naming import OF_TASK, AlgorithmLike, experiment_of
from quasiglobal.api.progress import progress
from quasiglobal.api.trained import Trained, TrainedRun
from quasiglobal.data.partition import Split
from quasiglobal.errors import InputError, unknown, whole
from quasiglobal.runs.distributed import train_over_processes, wait_for_all
from quasiglobal.runs.local import Stopped, simulate, simulate_in_memory
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.topology.parsing import Graph
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Call, checked_callbacks
from quasiglobal.training.metrics import Record
from quasiglobal.training.task import Task


def train(
    task: Task,
    algorithm: AlgorithmLike = "qg-dsgdm-n",
    topology: Graph = "ring:16",
    epochs: int = 30,
    *,
    lr: float | Callable[[int], float] | None = None,
    batch: int = 32,
    partition: str | Split | None = None,
    seeds: int = 1,
    runs: str | os.PathLike[str] | None = None,
    callbacks: Sequence[object] = (),
    device: str = "auto",
    engine: str = "simulator",
    precision: str = "fp32",
    schedule: str | Callable[[float], float] = "constant",
    clip: float | None = None,
    weight_decay: float = 0.0,
    watch: Callable[[Record], None] | None = None,
    **experiment: Any,
) -> Trained:
    """Train a task of your own. Ctrl-C stops after the current epoch and returns what is trained so far.

    Args:
        task: the model, its loss, its data and its metrics.
        algorithm: a name with options, as `qg algorithms` lists them, or an `Algorithm`.
        topology: a name, as `qg topology` accepts it, a `Topology`, a networkx graph, a dict of neighbours, or the path
            of a CSV or edge-list file.
        epochs: number of epochs; each node passes through its own data.
        lr: learning rate, by default 0.1 per 64 examples of the global batch; or a function of the step t = 1, 2, ….
        batch: batch size per node.
        partition: how the data are split among the nodes: a name such as "iid" (default), "dirichlet" (default if
            `alpha` is given) or "shards:2"; or a function (targets, n, rng) → one index array per node. If the task's
            `train` is a list, it is split already.
        seeds: number of seeds, counting up from `seed`; they train together.
        runs: folder for run folders, which `qg runs`, `compare`, `plot` and `report` read. The same call resumes a
            stopped run, and does not repeat a finished one. By default nothing is written.
        callbacks: objects with any of the methods on_start, on_step, on_epoch and on_end; see `qg.callbacks`.
        device: auto, cpu or cuda.
        engine: simulator, or distributed in processes that torchrun starts.
        precision: fp32, bf16 (autocast inside the model) or fp64.
        schedule: of the learning rate: constant, cosine, linear, steps (the paper's, also selected by `warmup` or
            `milestones`), or a function of the fraction of the run that is done, which returns a factor of `lr`.
        clip: largest norm of a node's gradient.
        weight_decay: L2 factor, added to the gradient.
        watch: called with the record of each epoch of the first seed.
        experiment: further fields of `Experiment` (alpha, seed, eval_every, drop, …) and of `Options`
            (checkpoint_seconds, peer_timeout, …). `steps` counts the steps of one epoch.

    >>> import quasiglobal as qg, torch
    >>> net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    >>> task = qg.Task(net, torch.nn.functional.cross_entropy, qg.data.load("digits"))
    >>> run = qg.train(task, "qg-dsgdm-n", "ring:4", epochs=3, lr=0.05, alpha=1.0, device="cpu")
    >>> [record["lr"] for record in run.records], run.records[-1]["accuracy"] > 0.8
    ([0.05, 0.05, 0.05], True)
    """
    if not isinstance(task, Task):
        raise InputError(f"task must be a qg.Task(model, loss, train), got {type(task).__name__}")
    if engine not in ("simulator", "distributed"):
        raise InputError(f"engine must be simulator or distributed, got {engine!r}")
    if whole(seeds) is None:
        raise InputError(f"seeds must be the number of seeds, got {seeds!r}; the first one is seed=…")
    if runs is not None and not isinstance(runs, str | os.PathLike):
        raise InputError(f"runs must be a folder, got {runs!r}")
    if watch is not None and not callable(watch):
        raise InputError(f"watch must be a function of a record, got {watch!r}")
    around = {field.name for field in fields(Options)} & experiment.keys()
    options = Options(
        seeds=seeds, runs=Path(runs or "runs"), device=device, engine=engine,        # type: ignore[arg-type]
        **{name: experiment.pop(name) for name in around},
    )
    known = {field.name for field in fields(Experiment)} - OF_TASK | {"recipe"}
    for name in experiment.keys() - known - OF_TASK:
        named = [one for one in signature(train).parameters if one not in ("task", "experiment")]
        raise unknown("argument of qg.train", name, [*named, *sorted(known - set(named))])
    values = {
        "epochs": epochs, "lr": lr, "batch": batch, "partition": partition, "precision": precision,
        "schedule": schedule, "clip": clip, "weight_decay": weight_decay,
    }
    if "recipe" in experiment:                              # its values replace the defaults of this function
        usual = {"epochs": 30, "batch": 32, "weight_decay": 0.0}
        values = {name: value for name, value in values.items() if name not in usual or value != usual[name]}
    task.trial                                              # noqa: B018  (raises if the parts do not fit)
    one = experiment_of(task, algorithm, topology, values | experiment)
    called = checked_callbacks(callbacks)
    if watch is not None:
        called.append(Call(lambda loop: watch(loop.latest[0]) if 0 in loop.latest else None))
    found = Trained(_trained(task, one, options, called, keep=runs is not None))
    for run in found.runs:
        if run.status == "diverged":
            what = f"{run.experiment.algorithm} with seed {run.experiment.seed}"
            warnings.warn(
                f"{what} diverged in epoch {len(run)} of {run.experiment.epochs}; try a smaller lr", stacklevel=2
            )
    return found


def _trained(
    task: Task, one: Experiment, options: Options, callbacks: Sequence[object], keep: bool
) -> list[TrainedRun]:
    """Train all seeds; `keep` writes run folders."""
    if options.engine == "distributed":
        if not keep:
            return _over_processes_without_folder(task, one, options, callbacks)
        runs = train_over_processes(one, options, task=task, callbacks=callbacks, wait=True)
        return [_of_run(run, task) for run in runs]
    with progress(one) as bar:
        if not keep:
            found = simulate_in_memory(task, one, options, [*callbacks, bar])
            return [TrainedRun(records, of, task, partial(dict, rows), status) for of, records, rows, status in found]
        for folder in folders_of(one, options):
            run, epochs = folder.read(), len(folder.read_records())
            if run.status == "finished" and epochs < one.epochs:
                warnings.warn(
                    f"a callback ended {run.folder} after epoch {epochs} of {one.epochs}; delete the folder to train "
                    "it again", stacklevel=3,
                )
        try:
            runs = simulate(one, options, task=task, callbacks=[*callbacks, bar])
        except Stopped:
            warnings.warn("stopped by Ctrl-C; the same call resumes", stacklevel=3)
            runs = [folder.read() for folder in folders_of(one, options)]
    return [_of_run(run, task) for run in runs]


def _of_run(run: Run, task: Task) -> TrainedRun:
    return TrainedRun(run.records(), run.experiment, task, lambda: run.rows()[0], run.status, run.folder)


def _over_processes_without_folder(
    task: Task, one: Experiment, options: Options, callbacks: Sequence[object]
) -> list[TrainedRun]:
    """Train over the processes of one machine, which share a temporary folder, and keep the result in memory."""
    if os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE")) != os.environ.get("WORLD_SIZE"):
        raise InputError("processes on several machines need runs=…, a folder that all of them share")
    name = f"quasiglobal-{os.environ.get('MASTER_PORT', '')}-{one.hash}"
    there = replace(options, runs=Path(tempfile.gettempdir()) / name)
    runs = train_over_processes(one, there, task=task, callbacks=callbacks, wait=True, temporary=True)
    found = [_of_run(run, task).in_memory() for run in runs]
    wait_for_all(one, options)                              # all have read the folder
    shutil.rmtree(there.runs, ignore_errors=True)
    return found
