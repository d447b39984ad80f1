"""Runs that survive: a folder each, resumed where it stopped, never run twice.

runs/<name>-<hash>/{experiment.json, metrics.jsonl, summary.json, checkpoint/}, one a seed.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from quasiglobal.common.files import alone, append_line, read_json, read_lines, write_json, write_lines
from quasiglobal.common.imports import imported, is_path
from quasiglobal.data.batches import step_sizes
from quasiglobal.data.corpus import LENGTH, cache_folder, check_vocabulary, tokenised
from quasiglobal.data.sources import Corpus, Dataset, agreed, corpus, is_text, load
from quasiglobal.errors import InputError
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.stack import StackedModel
from quasiglobal.models import build
from quasiglobal.models.language.loading import PREFIX, language_model, tokenizer_of, vocabulary_of
from quasiglobal.runs import checkpoints
from quasiglobal.runs.memory import give_back, runs_that_fit
from quasiglobal.runs.parts import newest as newest_parts
from quasiglobal.runs.parts import parts_of, records_of
from quasiglobal.runs.tensorboard import Board
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.metrics import Record, combined
from quasiglobal.training.program import Task, Training, average, diverged, in_common, partition_of
from quasiglobal.training.program import epochs as every_epoch

Saved = tuple[dict[str, torch.Tensor], checkpoints.Progress] | None
"""A run's rows as they were saved last, and how far it was; None where nothing was."""


@dataclass(frozen=True)
class Run:
    """One experiment with one seed, on disk."""

    folder: Path
    experiment: Experiment

    @classmethod
    def of(cls, experiment: Experiment, root: Path) -> Run:
        """The run of an experiment, begun or not."""
        return cls(root / experiment.name, experiment)

    @classmethod
    def at(cls, folder: Path) -> Run:
        """The run in a folder."""
        try:
            values = read_json(folder / "experiment.json")
        except (OSError, ValueError):
            raise InputError(f"{folder} is not a run: it has no readable experiment.json") from None
        return cls(folder, from_mapping(values, str(folder / "experiment.json")))

    @property
    def summary(self) -> Record | None:
        """The outcome, once there is one; a damaged one is none, and the run goes on from its last checkpoint."""
        path = self.folder / "summary.json"
        try:
            return read_json(path)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            warnings.warn(f"{path} is damaged and passed over", stacklevel=2)
            return None

    @property
    def records(self) -> list[Record]:
        """What was measured, an entry an epoch."""
        path = self.folder / "metrics.jsonl"
        return read_lines(path) if path.exists() else records_of(parts_of(self.folder))

    @property
    def status(self) -> str:
        """finished, diverged or unfinished."""
        return self.summary["status"] if self.summary else "unfinished"

    @property
    def begun(self) -> bool:
        """Whether there is anything of it."""
        return (self.folder / "experiment.json").exists()

    def describe(self) -> None:
        """Make the folder, and say in it what is run."""
        write_json(self.folder / "experiment.json", asdict(self.experiment))

    def rewrite(self, records: Sequence[Record]) -> None:
        """Start the records anew."""
        write_lines(self.folder / "metrics.jsonl", records)

    def newest(self) -> Saved:
        """What to go on from: the newest checkpoint of the whole, or what processes have left if that is newer."""
        whole = checkpoints.newest(self.folder / "checkpoint")
        rows, epoch, nodes = newest_parts(self.folder)
        older = whole is not None and whole[1].epochs >= epoch
        if older or epoch == 0 or nodes != list(range(parse(self.experiment.topology).n)):
            return whole
        self.rewrite([record for record in records_of(parts_of(self.folder)) if record["epoch"] <= epoch])
        return rows, checkpoints.Progress(epoch, (self.folder / "metrics.jsonl").stat().st_size)

    def begin(self, progress: checkpoints.Progress | None) -> None:
        """Make the folder, or cut the metrics back to the checkpoint that the run goes on from."""
        self.describe()
        path, kept = self.folder / "metrics.jsonl", progress.metrics if progress else 0
        if progress and (not path.exists() or path.stat().st_size < kept):
            warnings.warn(f"{path} has lost records; the run goes on without them", stacklevel=2)
            self.rewrite([record for record in read_lines(path) if record["epoch"] <= progress.epochs])
            return
        try:
            with open(path, "ab") as metrics:
                metrics.truncate(kept)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    def write(self, record: Record) -> None:
        """Add an epoch's record."""
        append_line(self.folder / "metrics.jsonl", record)

    def checkpoint(self, rows: dict[str, torch.Tensor], epochs_done: int) -> None:
        """Save all that the run needs to go on."""
        size = (self.folder / "metrics.jsonl").stat().st_size
        checkpoints.save(self.folder / "checkpoint", rows, checkpoints.Progress(epochs_done, size))

    def finish(self, status: str, facts: Record) -> None:
        """Say how it ended: the last and the best test."""
        last, best = last_and_best(self.records)
        write_json(self.folder / "summary.json", {"status": status, "last": last, "best": best} | facts)


def last_and_best(records: Sequence[Record]) -> tuple[Record | None, Record | None]:
    """The last test among a run's records, and the one with the best accuracy."""
    tests = [record for record in records if "accuracy" in record]
    return (tests[-1], max(tests, key=lambda record: record["accuracy"])) if tests else (None, None)


@dataclass(frozen=True)
class Options:
    """Where and how to run: nothing here changes the result."""

    seeds: int = 1
    """How many seeds, from the experiment's on; they are rows of one program."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    data_dir: Path | None = None
    """Where the data sets lie; by default $QG_DATA or ./data."""
    device: str = "auto"
    """auto, cpu or cuda."""
    checkpoint_seconds: float = 60.0
    """Save at the end of an epoch when the last checkpoint is this old."""
    tensorboard: bool = False
    """Write the measures for TensorBoard too, into each run's folder."""
    engine: Literal["simulator", "distributed"] = "simulator"
    """All nodes in this process, or spread over processes: those that torchrun started, or `--processes`."""
    processes: int | None = None
    """With --engine distributed and without torchrun: how many processes to start here."""
    peer_timeout: float = 60.0
    """Seconds after which a process goes on without a neighbour that does not answer."""
    host: str = "127.0.0.1"
    """The address of this machine that other processes reach it at."""
    log: Literal["plain", "json"] = "plain"
    """What is said to a log rather than a terminal: sentences, or a JSON object a line."""
    recompute: bool = False
    """Of hf: models, keep the layers' inputs alone and compute the rest again for the gradient: less memory, slower."""
    on: Literal["here", "ray"] = "here"
    """This machine, or the Ray cluster it belongs to, one GPU or CPU a cell; --runs is then a folder all share."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError(f"seeds must be >= 1, got {self.seeds}")
        if self.on == "ray" and self.engine == "distributed":
            raise InputError("--on ray runs whole experiments; use it without --engine distributed")


Watcher = Callable[[Sequence[Run], list[Record]], None]


def train(
    experiment: Experiment | Sequence[Experiment],
    options: Options,
    watch: Watcher = lambda runs, records: None,
    task: Task | None = None,
) -> list[Run]:
    """Run what is not finished of the experiments' seeds, and return all their runs.

    Those that can be are rows of one program, as many at a time as fit the memory: they may differ in the seed, the
    partition, the learning rate and its schedule, the algorithm and the topology (of as many nodes).
    """
    experiments = [experiment] if isinstance(experiment, Experiment) else list(experiment)
    runs = [run for one in experiments for run in runs_of(one, options)]
    open_runs = dict.fromkeys(run for run in runs if run.summary is None)
    for run in runs:
        if run not in open_runs and not run.begun:
            run.describe()                                  # without it nobody finds the run
    board = Board() if options.tensorboard else None
    device = choose_device(options.device)
    saved = {run: run.newest() for run in open_runs}
    for alike in _alike(saved):
        chosen = task or make_task(alike[0].experiment, data_of(alike[0].experiment, options.data_dir))
        for same in _of_equal_epochs(alike, chosen):
            fit, model = runs_that_fit(chosen, [run.experiment for run in same], device), None
            for group in (same[first : first + fit] for first in range(0, len(same), fit)):
                start = {run: saved.pop(run) for run in group}
                model = _train_together(chosen, start, device, model, options, watch, board)
                give_back(device)
    if board:
        board.close()
    return runs


def runs_of(experiment: Experiment, options: Options) -> list[Run]:
    """The run of each seed, begun or not."""
    return [Run.of(experiment.with_seed(experiment.seed + k), options.runs) for k in range(options.seeds)]


def prepare(experiment: Experiment, options: Options) -> Training:
    """An experiment's training from its start, as `train` would begin it."""
    task = make_task(experiment, data_of(experiment, options.data_dir))
    experiments = [run.experiment for run in runs_of(experiment, options)]
    return Training(task, experiments, choose_device(options.device), recomputing=options.recompute)


def _alike(saved: Mapping[Run, Saved]) -> list[list[Run]]:
    """Runs that can be rows of one program: they have enough in common, and are after the same epoch."""
    groups: dict[str, list[Run]] = {}
    for run, found in saved.items():
        key = json.dumps([found[1].epochs if found else 0, in_common(run.experiment)], sort_keys=True)
        groups.setdefault(key, []).append(run)
    return [sorted(group, key=_steps_alike) for group in groups.values()]


def _of_equal_epochs(runs: Sequence[Run], task: Task) -> list[list[Run]]:
    """Runs whose epochs have the same steps, together; those of one partition have, whatever their α and seed."""
    if len({run.experiment.partition for run in runs}) == 1:
        return [list(runs)]
    sizes: dict[str, tuple[int, ...]] = {}
    groups: dict[tuple[int, ...], list[Run]] = {}
    for run in runs:
        one = run.experiment
        if one.partition not in sizes:
            lengths = [len(part) for part in partition_of(task.data, one)]
            sizes[one.partition] = tuple(step_sizes(lengths, one.batch, one.steps))
        groups.setdefault(sizes[one.partition], []).append(run)
    return list(groups.values())


def _train_together(
    task: Task,
    saved: Mapping[Run, Saved],
    device: torch.device,
    model: StackedModel | None,
    options: Options,
    watch: Watcher,
    board: Board | None,
) -> StackedModel:
    """Train runs that are at the same epoch as rows of one program; what is returned need not be compiled again."""
    settings = [run.experiment for run in saved]
    training = Training(task, settings, device, recomputing=options.recompute, model=model)
    with ExitStack() as locks:
        for run in saved:
            locks.enter_context(alone(run.folder))
        _begin(training, saved)
        _train_to_the_end(training, list(saved), options, watch, board)
    return training.model


def _begin(training: Training, saved: Mapping[Run, Saved]) -> None:
    """Go on from the epoch that the runs are at."""
    if found := [checkpoint for checkpoint in saved.values() if checkpoint]:
        training.restore([rows for rows, _ in found], found[0][1].epochs)
    for run, checkpoint in saved.items():
        run.begin(checkpoint and checkpoint[1])


def _steps_alike(run: Run) -> tuple[str, str]:
    """Equal for runs that step by the same algorithm on the same topology."""
    return run.experiment.algorithm, run.experiment.topology


def data_of(
    experiment: Experiment, data_dir: Path | None, name: str | None = None, testing: bool = False
) -> Dataset:
    """The experiment's data, or other data in its terms; texts as its model's tokenizer reads them.

    `testing` is for a model that is trained already: all of a file of texts is then to test with, in its order.
    """
    name = name or experiment.data
    if is_text(name):
        data = as_tokens(experiment, corpus(name, data_dir, testing), cache_folder())
    else:
        data = load(name, data_dir)
    return agreed(data, experiment.classes, experiment.shape, experiment.mean, experiment.std)


def as_tokens(experiment: Experiment, texts: Corpus, cache: Path | None) -> Dataset:
    """Texts as the experiment's model reads them, `shape` tokens of each."""
    if not experiment.model.startswith(PREFIX):
        raise InputError(f"{texts.name} is text, which {experiment.model} does not read; use --model hf:FOLDER")
    if len(experiment.shape) > 1:
        raise InputError(f"of a text, shape is its length in tokens, one number, got {list(experiment.shape)}")
    (length,) = experiment.shape or (LENGTH,)
    data = tokenised(texts, tokenizer_of(experiment.model), length, cache)
    check_vocabulary(data, vocabulary_of(experiment.model), experiment.model)
    return data


def model_of(experiment: Experiment, classes: int, shape: Sequence[int], pad: int | None = None) -> nn.Module:
    """A new model, for so many classes and inputs of this shape; of texts, `pad` is what fills them up."""
    if experiment.model.startswith(PREFIX):
        if len(shape) != 1:
            raise InputError(f"{experiment.model} reads texts, not examples of shape {list(shape)}; use other --data")
        return language_model(
            experiment.model, classes=classes, pretrained=experiment.pretrained, train=experiment.train, pad=pad,
            length=shape[0],
        )
    if is_path(experiment.model):
        own = imported(experiment.model, "model")
        return copy.deepcopy(own) if isinstance(own, nn.Module) else own()
    return build(experiment.model, norm=experiment.norm, width=experiment.width, classes=classes, shape=tuple(shape))


def make_task(experiment: Experiment, data: Dataset) -> Task:
    """The experiment's model, with cross-entropy, on the data."""
    return Task(
        partial(model_of, experiment, len(data.classes), data.shape, data.pad), nn.functional.cross_entropy, data
    )


def _train_to_the_end(
    training: Training, runs: Sequence[Run], options: Options, watch: Watcher, board: Board | None
) -> None:
    """Epoch by epoch, with records and checkpoints of every run."""
    saved = time.monotonic()
    going = dict(enumerate(runs))
    with _patient_interrupts() as interrupted:
        for measures in every_epoch(training):
            records = {k: combined([measures[k]]) for k in going}
            for k, record in records.items():
                runs[k].write(record)
                if board:
                    board.write(runs[k].folder, record)
                if diverged(record):
                    runs[k].finish("diverged", facts(training, k))
                    del going[k]
            watch([runs[k] for k in records], list(records.values()))
            if not going:
                break
            last = training.epochs_done == training.experiment.epochs
            if last or interrupted or time.monotonic() - saved >= options.checkpoint_seconds:
                for k, run in going.items():
                    run.checkpoint(training.rows_of(k), training.epochs_done)
                saved = time.monotonic()
            if interrupted and not last:
                raise KeyboardInterrupt
    for k, run in going.items():
        run.finish("finished", facts(training, k))
    if interrupted:                                         # in the last epoch: nothing is lost, nothing else begins
        raise KeyboardInterrupt


@contextmanager
def _patient_interrupts() -> Iterator[list[int]]:
    """The first Ctrl-C is noted, for the epoch to end and be saved; the second stops at once."""
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = signal.getsignal(signal.SIGINT)

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, note)
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, before)


def facts(training: Training, run: int) -> Record:
    """What the summary of a training's run says besides the scores."""
    return {
        "parameters": training.layout.size,
        "partition": training.fingerprint(run),
        "terms": terms_of(training.task.data),
        "device": str(training.device),
        "torch": torch.__version__,
    }


def terms_of(data: Dataset) -> Record:
    """What a model has to know of its data to see others as it saw these: fields of `Experiment`."""
    return {name: list(getattr(data, name)) for name in ("classes", "shape", "mean", "std")}


def choose_device(name: str) -> torch.device:
    """auto, cpu or cuda, where that is; processes of one machine take its GPUs in turn."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError("there is no CUDA device here; use --device cpu")
    if name == "cpu" or not there:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda")


def find(root: Path) -> Iterator[Run]:
    """All runs under a folder, by name; one that cannot be read is named and passed over."""
    for path in sorted(root.glob("*/experiment.json")):
        try:
            yield Run.at(path.parent)
        except InputError as error:
            warnings.warn(f"{error}; passed over", stacklevel=2)


def group_by_setting(runs: Sequence[Run]) -> dict[str, list[Run]]:
    """Runs that differ in their seed alone, together, under what sets them apart from the others."""
    settings: dict[str, list[Run]] = {}
    for run in runs:
        settings.setdefault(run.experiment.with_seed(0).hash, []).append(run)
    fields: dict[str, dict[str, Any]] = {
        key: asdict(group[0].experiment.with_seed(0)) for key, group in settings.items()
    }
    varying = [
        name for name in next(iter(fields.values()), {}) if len({str(values[name]) for values in fields.values()}) > 1
    ]
    return {
        ", ".join(_label(name, fields[key][name]) for name in varying or ["algorithm"]): group
        for key, group in settings.items()
    }


def _label(name: str, value: object) -> str:
    """How a legend names a setting."""
    return str(value) if name in ("algorithm", "data", "model", "topology") else f"{name}={value}"


def model_state(rows: Mapping[str, torch.Tensor], layout: Layout, node: int | None) -> dict[str, torch.Tensor]:
    """The state_dict of a node's model, or of everybody's average, from a run's rows."""
    chosen = {
        name: average(value, dim=0) if node is None else value[node] for name, value in rows.items()
    }
    buffers = {name.removeprefix("buffer."): v for name, v in chosen.items() if name.startswith("buffer.")}
    return {name: value.contiguous() for name, value in (layout.views(chosen["x"]) | buffers).items()}


@dataclass(frozen=True)
class Trained:
    """What `train_task` leaves in memory: the records of every epoch, and the models."""

    training: Training
    records: list[Record]

    def model(self, node: int | None = None) -> nn.Module:
        """A copy of the module with a node's parameters and buffers, or with everybody's average."""
        module = copy.deepcopy(self.training.model.module).cpu()
        module.load_state_dict(model_state(self.training.rows_of(0), self.training.layout, node), strict=False)
        return module.eval()


def train_task(
    task: Task,
    algorithm: str,
    topology: str,
    epochs: int,
    device: str = "auto",
    watch: Callable[[Record], None] = lambda record: None,
    **settings: Any,
) -> Trained:
    """Train a task of your own, in memory: `qg.train(task, algorithm=…, topology=…, epochs=…)`.

    `settings` are further fields of `Experiment`: alpha, lr, batch, partition, seed, …. The learning rate is constant
    unless `warmup` or `milestones` are given; either selects the paper's schedule, with its defaults for the other.
    """
    constant = {} if {"warmup", "milestones"} & settings.keys() else {"warmup": 0.0, "milestones": ()}
    fields = {"algorithm": algorithm, "topology": topology, "epochs": epochs} | constant | settings
    experiment = from_mapping({"data": task.data.name, "model": "own"} | fields, "qg.train")
    training = Training(task, [experiment], choose_device(device))
    records = []
    for (part,) in every_epoch(training):
        record = combined([part])
        records.append(record)
        watch(record)
        if diverged(record):
            break
    return Trained(training, records)
