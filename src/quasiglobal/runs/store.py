"""Runs on disk: one folder per run, resumed after a stop, never repeated.

runs/<name>-<hash>/{experiment.json, metrics.jsonl, summary.json, checkpoint/}, one per seed. `RunFolder` writes. `Run`
is a snapshot of a run folder, and `RunStore` a snapshot of all run folders: a command reads it once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import cast

from quasiglobal.common import own_code
from quasiglobal.common.files import Json, alone, append_line, read_epochs, read_json, write_json, write_lines
from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.objects import Named, facts_of, imported, is_path
from quasiglobal.data.sources import DataName
from quasiglobal.errors import InputError
from quasiglobal.runs import checkpoints
from quasiglobal.runs.best import kept_in
from quasiglobal.runs.checkpoints import newest_of_parts, parts_of, records_of
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment, from_mapping, grouped, setting, stored
from quasiglobal.training.metrics import Ranking, Record, facts_of_metric, last_and_best, ranking
from quasiglobal.training.rows import Checkpoint, NamedRows


@dataclass(frozen=True)
class Summary:
    """Contents of summary.json: the final status and scores of a run."""

    status: str
    """finished or diverged."""
    last: Record | None = None
    """The last test."""
    best: Record | None = None
    """The test with the best score."""
    parameters: int | None = None
    partition: str | None = None
    """Fingerprint of the partition of the examples."""
    terms: dict[str, list[object]] | None = None
    """The classes, shape, mean and std of the data, as fields of `Experiment`."""
    features: list[str] | None = None
    """Names of the columns of numbers that are the input."""
    device: str | None = None
    torch: str | None = None
    topology: str | None = None
    """Fingerprint of the topology, if a file or Python code defines it."""
    weights: list[float] | None = None
    """Weight of each node, if they are not equal."""
    fetched: dict[str, object] | None = None
    """For a site that missed the end: the source of its model (node, site, step), and its own epochs before."""
    data: list[dict[str, object]] | None = None
    """For a site: the fingerprints of its data, and the epoch from which each was used."""
    kept: list[dict[str, object]] | None = None
    """The best model of each node in best/: its node, epoch, metric and value."""

    @classmethod
    def from_json(cls, values: Json) -> Summary:
        """From summary.json of this or an earlier version."""
        if not all(isinstance(values.get(test), dict | None) for test in ("last", "best")):
            raise TypeError("a test is not a JSON object")
        known = cls.__dataclass_fields__
        return cls(**{name: value for name, value in values.items() if name in known})


@dataclass(frozen=True, eq=False)
class Run:
    """Snapshot of the folder of one experiment with one seed."""

    folder: Path
    experiment: Experiment
    summary: Summary | None
    begun: bool = True
    """Whether the run folder exists."""
    _records: list[list[Record]] = field(default_factory=list, repr=False)

    @property
    def status(self) -> str:
        """finished, diverged or unfinished."""
        return self.summary.status if self.summary else "unfinished"

    def rows(self) -> tuple[NamedRows, list[int]]:
        """The rows of the newest checkpoint and their nodes; raise InputError if there is none."""
        found = checkpoints.newest(self.folder / "checkpoint")
        if found is not None:
            return found.rows, list(range(len(found.rows["x"])))
        of_parts, nodes = newest_of_parts(self.folder)
        if of_parts is not None:
            return of_parts.rows, nodes
        if checkpoints.epochs(self.folder / "checkpoint"):
            raise checkpoints.nothing_intact(self.folder / "checkpoint")
        if self.status == "diverged":
            raise InputError(f"{self.folder} diverged and has no model; try a smaller learning rate")
        raise InputError(f"{self.folder} has no checkpoint yet; train it first")

    def ranking(self) -> Ranking:
        """The metric that ranks the run's tests, found in its records until it has ended."""
        found = [self.summary.last or {}] if self.summary else self.records()
        return ranking(self.experiment.metric, found)

    def records(self) -> list[Record]:
        """One record per epoch, read from disk at the first call."""
        if not self._records:
            self._records.append(RunFolder(self.folder, self.experiment).read_records())
        return self._records[0]


@dataclass(frozen=True)
class RunFolder:
    """The folder of one experiment with one seed; it may not exist yet."""

    folder: Path
    experiment: Experiment

    @classmethod
    def of(cls, experiment: Experiment, root: Path) -> RunFolder:
        """The folder of an experiment under `root`."""
        return cls(root / experiment.name, experiment)

    # -------------------------------------------------------------------------------------------- reading

    def read(self) -> Run:
        """Read a snapshot of the folder."""
        return Run(self.folder, self.experiment, self.read_summary(), (self.folder / "experiment.json").exists())

    def read_summary(self) -> Summary | None:
        """The summary, or None if the run has not ended; a damaged summary counts as None, so that the run resumes."""
        path = self.folder / "summary.json"
        try:
            return Summary.from_json(read_json(path))
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError, TypeError):
            warnings.warn(f"{path} is damaged and ignored", stacklevel=2)
            return None

    def read_records(self) -> list[Record]:
        """One record per epoch; for a run that has not ended, including the records of its processes."""
        ended = (self.folder / "summary.json").exists()
        return self._followed_by([] if ended else records_of(parts_of(self.folder)))

    def newest(self) -> Checkpoint | None:
        """The newest intact checkpoint, of the whole run or of its processes, whichever is newer."""
        place = self.folder / "checkpoint"
        whole = checkpoints.newest(place)
        joined, nodes = newest_of_parts(self.folder)
        if whole is None and joined is None and checkpoints.epochs(place):
            raise checkpoints.nothing_intact(place)
        older = joined is None or (whole is not None and whole.epochs >= joined.epochs)
        if joined is None or older or nodes != list(range(self.experiment.resolved.nodes)):
            return whole
        self.take_over([record for record in records_of(parts_of(self.folder)) if record["epoch"] <= joined.epochs])
        return replace(joined, metrics=(self.folder / "metrics.jsonl").stat().st_size)

    def newest_locked(self) -> Checkpoint | None:
        """The newest checkpoint; raise InputError if processes still train in the folder."""
        if not (self.folder / "parts").exists():
            return self.newest()
        with alone(self.folder):
            return self.newest()

    def check_unchanged(self) -> None:
        """Raise InputError if the graph of a file, or an object named by its path, has changed since the training."""
        mine = self.experiment.resolved.external
        if mine:
            places = [self.folder / "checkpoint", *self.folder.glob("parts/*/checkpoint")]
            summary = self.read_summary()
            theirs = set().union(*map(checkpoints.topologies, places), {summary.topology or ""} if summary else ())
            if theirs - {mine, ""}:
                raise InputError(
                    f"{self.experiment.topology} is another graph than {self.folder} was trained on; restore that "
                    "graph, or train into another --runs folder"
                )
        for what, text in _paths(self.experiment):
            digest = facts_of(text).get("digest")
            try:
                before = read_json(self.folder / "experiment.json")["objects"][text]["digest"]
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if digest is not None and before != digest:
                raise InputError(
                    f"{text} is another {what} than {self.folder} was trained with; restore it, or train into another "
                    "--runs folder"
                )

    # -------------------------------------------------------------------------------------------- writing

    def describe(self) -> None:
        """Create the folder and write experiment.json."""
        write_json(self.folder / "experiment.json", stored(self.experiment))

    def begin(self, saved: Checkpoint | None) -> None:
        """Create the folder, or truncate the records to the checkpoint that the run resumes from."""
        self.describe()
        checkpoints.set_aside(self.folder / "checkpoint", saved.epochs if saved else 0)
        path, kept = self.folder / "metrics.jsonl", saved.metrics if saved else 0
        if saved and (not path.exists() or path.stat().st_size < kept):
            warnings.warn(f"{path} has lost records; the run continues without them", stacklevel=2)
            self.rewrite([record for record in self._followed_by([]) if record["epoch"] <= saved.epochs])
            return
        try:
            with open(path, "ab") as metrics:
                metrics.truncate(kept)
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from None

    def rewrite(self, records: Sequence[Record]) -> None:
        """Replace all records."""
        write_lines(self.folder / "metrics.jsonl", records)

    def take_over(self, records: Sequence[Record]) -> None:
        """Replace the records by the records of processes; keep earlier epochs."""
        self.rewrite(self._followed_by(records))

    def _followed_by(self, later: Sequence[Record]) -> list[Record]:
        """The records before the first epoch of `later`, then `later`."""
        own = cast(list[Record], read_epochs(self.folder / "metrics.jsonl"))
        first = min((record["epoch"] for record in later), default=math.inf)
        return [*(record for record in own if record["epoch"] < first), *later]

    def write(self, record: Record) -> None:
        """Add an epoch's record."""
        append_line(self.folder / "metrics.jsonl", record)

    def save(self, checkpoint: Checkpoint) -> None:
        """Save a checkpoint to resume from."""
        size = (self.folder / "metrics.jsonl").stat().st_size
        checkpoints.save(self.folder / "checkpoint", replace(checkpoint, metrics=size))

    def finish(self, status: str, facts: Mapping[str, object]) -> None:
        """Write the summary: the status, the last and the best test, and further facts."""
        last, best = last_and_best(self.read_records(), self.experiment.metric)
        values = {"status": status, "last": last, "best": best, **facts}
        if topology := self.experiment.resolved.external:
            values["topology"] = topology
        if kept := kept_in(self.folder):
            values["kept"] = [asdict(one) for one in kept]
        write_json(self.folder / "summary.json", values)


def read_run(folder: Path) -> Run:
    """Read the run in a folder, also given by its name in runs/."""
    if not folder.exists() and (Path("runs") / folder).is_dir():
        folder = Path("runs") / folder
    try:
        values = read_json(folder / "experiment.json")
    except (OSError, ValueError):
        raise InputError(f"{folder} is not a run: {_why_no_run(folder)}") from None
    own_code.read_from(folder / "experiment.json", values)
    return RunFolder(folder, from_mapping(values, str(folder / "experiment.json"))).read()


def _why_no_run(folder: Path) -> str:
    if not folder.exists():
        return "there is no such folder; `qg runs` lists the runs"
    if any(folder.glob("*/experiment.json")):
        return f"it is a folder of runs; name those in it, as in {folder}/*"
    return "it has no readable experiment.json"


def find_runs(root: Path) -> Iterator[Run]:
    """All runs under a folder, sorted by name; skip unreadable runs with a warning."""
    for path in sorted(root.glob("*/experiment.json")):
        try:
            yield read_run(path.parent)
        except InputError as error:
            warnings.warn(f"{error}; skipped", stacklevel=2)


def folders_of(experiment: Experiment, options: Options) -> list[RunFolder]:
    """The folder of each seed; it may not exist yet."""
    if options.runs.is_file():
        raise InputError(f"{options.runs} is a file; name a folder for the runs")
    return [RunFolder.of(experiment.with_seed(experiment.seed + k), options.runs) for k in range(options.seeds)]


def unchanged_folders(experiment: Experiment, options: Options) -> list[RunFolder]:
    """The folder of each seed, to train in; raise InputError if it was trained with other objects than named now."""
    found = folders_of(_identified(experiment), options)
    for folder in found:
        folder.check_unchanged()
    return found


def _identified(experiment: Experiment) -> Experiment:
    """The same experiment; strings that name objects by their paths carry a digest of the objects' content."""
    found = {}
    for what, text in _paths(experiment):
        with suppress(InputError):                          # a finished run is readable without its code
            further = facts_of_metric(text) if what == "metric" else {}
            found[text] = Named(text, None, {"digest": fingerprint(imported(text, what))} | further)

    def named(text: str) -> str:
        return found.get(text, text)

    return replace(
        experiment, data=named(experiment.data), model=named(experiment.model), loss=named(experiment.loss),
        metric=tuple(map(named, experiment.metric)),
    )


def _paths(one: Experiment) -> Iterator[tuple[str, str]]:
    """Kind and path of each object that an experiment names by its path."""
    data = [one.data] if DataName.parse(one.data).kind == "python" else []
    for what, texts in (("model", [one.model]), ("loss", [one.loss]), ("metric", one.metric), ("data set", data)):
        yield from ((what, text) for text in texts if is_path(text))


@dataclass(frozen=True)
class RunStore:
    """Snapshot of all runs under a folder."""

    root: Path
    runs: tuple[Run, ...]

    @classmethod
    def read(cls, root: Path) -> RunStore:
        """Read a snapshot of the folder."""
        return cls(root, tuple(find_runs(root)))

    @cached_property
    def ended(self) -> dict[str, list[Run]]:
        """Ended runs grouped by `experiment.setting`: runs of one group differ in seed and learning rate."""
        return grouped((run for run in self.runs if run.summary is not None), lambda run: setting(run.experiment))


Watcher = Callable[[Sequence[RunFolder], list[Record]], None]
"""Called after each epoch with the runs that train together and the record of each."""


def unwatched(runs: Sequence[RunFolder], records: list[Record]) -> None:
    """A watcher that does nothing."""
