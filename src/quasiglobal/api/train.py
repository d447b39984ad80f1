"""Train a task of your own, in memory, in run folders or over processes: `qg.train` and its result."""

from __future__ import annotations

import io
import os
import shutil
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import partial
from html import escape
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import nn

from quasiglobal.api.naming import OF_TASK, AlgorithmLike, experiment_of
from quasiglobal.data.partition import Split
from quasiglobal.errors import InputError, unknown, whole
from quasiglobal.runs import plots
from quasiglobal.runs.distributed import train_over_processes, wait_for_all
from quasiglobal.runs.local import Stopped, simulate, simulate_in_memory
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, folders_of
from quasiglobal.stacked.layout import Layout
from quasiglobal.topology.parsing import Graph
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Call, Loop, checked_callbacks
from quasiglobal.training.metrics import Ranking, Record, RecordList, number, ranking, tests
from quasiglobal.training.rows import NamedRows, models_of, module_of
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


class Trained:
    """Result of `qg.train`. `records`, `model` and `average` are of the first seed, `runs[k]` has those of seed k."""

    def __init__(self, runs: Sequence[TrainedRun]) -> None:
        self.runs = list(runs)

    @property
    def records(self) -> list[Record]:
        """The record of every epoch of the first seed."""
        return self.runs[0]

    @property
    def status(self) -> str:
        """finished, diverged, or unfinished (stopped by Ctrl-C), of the first seed."""
        return self.runs[0].status

    @property
    def folder(self) -> Path | None:
        """The run folder of the first seed; None if there is none."""
        return self.runs[0].folder

    @property
    def score(self) -> Ranking:
        """The metric that ranks tests."""
        return ranking(self.runs[0].experiment.metric, self.records)

    def model(self, node: int | None = None) -> nn.Module:
        """The model of a node, or the average over all nodes."""
        return self.runs[0].model(node)

    def average(self) -> nn.Module:
        """The average of all nodes' models."""
        return self.runs[0].average()

    def __repr__(self) -> str:
        one, score = self.runs[0].experiment, self.score
        ends = [number(test, score.name) for run in self.runs for test in tests(run)[-1:]]
        last = [value for value in ends if value is not None]
        seeds = f"{len(self.runs)} seed{'s' if len(self.runs) > 1 else ''}"
        unit = "%" if score.percent else ""
        name = score.title.removesuffix(", %")
        reached = f", {name} {score.shown(statistics.fmean(last))}{unit}" if last else ""
        return f"<Trained: {one.algorithm} on {one.topology}, {len(self.records)} epochs, {seeds}{reached}>"

    def _repr_html_(self) -> str:
        """The curves of the score and of the training loss, for notebooks."""
        drawn = io.StringIO()
        algorithm = self.runs[0].experiment.algorithm
        figure = plots.draw_curves({algorithm: self.runs}, [algorithm], self.score)
        figure.savefig(drawn, format="svg")
        return f"<p>{escape(repr(self))}</p>{drawn.getvalue()[drawn.getvalue().index('<svg'):]}"


class TrainedRun(RecordList):
    """The records of one seed, a list with one entry per epoch, and its models."""

    def __init__(
        self, records: Sequence[Record], experiment: Experiment, task: Task, rows: Callable[[], NamedRows],
        status: str, folder: Path | None = None,
    ) -> None:
        """`rows` returns the models of all nodes; `folder` is the run folder, if there is one."""
        super().__init__(records)
        self.experiment, self.status, self.folder = experiment, status, folder
        self._task, self._rows = task, rows

    def model(self, node: int | None = None) -> nn.Module:
        """A copy of the module with the parameters and buffers of a node, or with the average over all nodes."""
        module, rows = self._task.module(0), self._rows()
        if node is not None and not 0 <= node < len(rows["x"]):
            raise InputError(f"node must be from 0 to {len(rows['x']) - 1}, got {node}")
        weights = self.experiment.resolved.weights_on(self._task.data)
        counted = None if weights is None else torch.from_numpy(weights)
        return module_of(module, rows, Layout.of_experiment(module, self.experiment.bn), node, counted)

    def average(self) -> nn.Module:
        """A copy of the module with the average of all nodes' parameters and buffers, by the experiment's weights."""
        return self.model(None)

    def in_memory(self) -> TrainedRun:
        """The same run, independent of its folder."""
        rows = models_of(self._rows())
        return TrainedRun(self, self.experiment, self._task, lambda: rows, self.status)


def _trained(
    task: Task, one: Experiment, options: Options, callbacks: Sequence[object], keep: bool
) -> list[TrainedRun]:
    """Train all seeds; `keep` writes run folders."""
    if options.engine == "distributed":
        if not keep:
            return _over_processes_without_folder(task, one, options, callbacks)
        runs = train_over_processes(one, options, task=task, callbacks=callbacks, wait=True)
        return [_of_run(run, task) for run in runs]
    with _progress(one) as bars:
        if not keep:
            found = simulate_in_memory(task, one, options, [*callbacks, *bars])
            return [TrainedRun(records, of, task, partial(dict, rows), status) for of, records, rows, status in found]
        for folder in folders_of(one, options):
            run, epochs = folder.read(), len(folder.read_records())
            if run.status == "finished" and epochs < one.epochs:
                warnings.warn(
                    f"a callback ended {run.folder} after epoch {epochs} of {one.epochs}; delete the folder to train "
                    "it again", stacklevel=3,
                )
        try:
            runs = simulate(one, options, task=task, callbacks=[*callbacks, *bars])
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


Show = Callable[[int, str], object]
"""Shows the number of completed epochs and a string."""


@contextmanager
def _progress(experiment: Experiment) -> Iterator[list[Call]]:
    """Show a progress bar in a notebook or on a terminal; yield its callback, if there is one."""
    console = Console(stderr=True, highlight=False, markup=False)
    if _in_notebook():
        yield [_progress_callback(_notebook_bar(experiment.epochs))]
    elif console.is_terminal:
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(experiment.algorithm, total=experiment.epochs)
            yield [_progress_callback(lambda epoch, text: bar.update(task, completed=epoch, description=text))]
    else:
        yield []


def _progress_callback(show: Show) -> Call:
    """Show the epoch, the training loss and the score of the last test of the first seed."""
    def on_epoch(run: Loop) -> None:
        if 0 in run.latest:
            scores = [value for test in tests(run.records) if (value := number(test, run.score.name)) is not None]
            score = f"  {run.score.title} {run.score.shown(scores[-1])}" if scores else ""
            show(run.epoch, f"loss {run.latest[0]['loss']:.3g}{score}")

    return Call(on_epoch)


def _in_notebook() -> bool:
    """Whether a Jupyter kernel runs this process."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def _notebook_bar(epochs: int) -> Show:
    """A bar in the output of the notebook's cell, without further packages."""
    ipython = import_module("IPython.display")

    def drawn(epoch: int, text: str) -> object:
        return ipython.HTML(f"<progress value='{epoch}' max='{epochs}'></progress> {epoch}/{epochs} {escape(text)}")

    handle = ipython.display(drawn(0, ""), display_id=True)
    return lambda epoch, text: handle.update(drawn(epoch, text))
