"""Callbacks that write a run to disk, and the utilisation of the device.

With the option `utilisation`, a training appends a line to that file when a program ends.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quasiglobal.common.files import append_line, read_lines
from quasiglobal.data.partition import digest_of_parts
from quasiglobal.errors import InputError
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.loop import Call, Callback, Loop
from quasiglobal.training.metrics import Record
from quasiglobal.training.program import Program

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class WriteSummaries(Callback):
    """Writes the summary of a run when it ends; called after its last checkpoint."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = runs
        self.written: set[int] = set()

    def on_epoch(self, loop: Loop) -> None:
        for k in loop.ends.keys() - self.written:
            self.runs[k].finish(loop.ends[k], facts(loop.program, loop.place(k)))
            self.written.add(k)

    on_start = on_end = on_epoch


def watching(runs: Sequence[RunFolder], watch: Watcher) -> Callback:
    """A callback that calls a watcher after every epoch."""
    return Call(lambda loop: watch([runs[k] for k in loop.latest], list(loop.latest.values())))


class TensorBoard:
    """Writes every number of the records for TensorBoard: into each run folder, or into `folder`.

    NAME_nodes/i has the values of node i.
    """

    def __init__(self, folder: str | os.PathLike[str] = "tensorboard") -> None:
        """`folder` is used if the training has no run folders."""
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional dependency
        except ImportError:
            raise InputError("TensorBoard is not installed: pip install 'quasiglobal[tensorboard]'") from None
        self.folder, self._make = Path(folder), SummaryWriter
        self._writers: dict[Path, SummaryWriter] = {}

    def on_epoch(self, run: Loop) -> None:
        """Write the epoch's records."""
        for k, record in run.latest.items():
            self.write(run.folders[k] if run.folders else self.folder / run.experiments[k].name, record)

    def on_end(self, run: Loop) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()

    def write(self, folder: Path, record: Record) -> None:
        """Add an epoch's record; the epochs of a resumed run replace earlier entries."""
        epoch = record["epoch"]
        if folder not in self._writers:
            self._writers[folder] = self._make(str(folder / "tensorboard"), purge_step=epoch)
        for name, value in record.items():
            if isinstance(value, list):
                for node, own in enumerate(value if name.endswith("_nodes") else ()):
                    if own is not None:
                        self._writers[folder].add_scalar(f"{name}/{node}", own, epoch)
            elif name not in ("epoch", "step") and value is not None:
                self._writers[folder].add_scalar(name, value, epoch)
        self._writers[folder].flush()


def facts(program: Program, run: int) -> dict[str, object]:
    """Entries of a run's summary besides its scores."""
    features, weights = program.task.data.train.features, program.weights[run]
    further: dict[str, object] = {"features": list(features)} if features else {}
    return further | ({} if weights is None else {"weights": weights.tolist()}) | {
        "parameters": program.layout.size,
        "partition": digest_of_parts(program.partitions[run]),
        "terms": program.task.data.terms(),
        "device": str(program.device),
        "torch": torch.__version__,
    }


# ---------------------------------------------------------------------------------------- utilisation


@dataclass
class Utilisation:
    """Work of one program, or of several one after the other."""

    began: float = 0.0
    """Seconds since 1970."""
    wall: float = 0.0
    """Seconds from the beginning to the end."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Seconds of training, compiling, loading, testing and saving."""
    examples: float = 0.0
    """Training examples of all rows in use."""
    row_seconds: float = 0.0
    """Rows in use, times the seconds in which they trained."""
    computed: float = 0.0
    """`row_seconds`, including the rows of runs that have ended and were not replaced yet."""

    def __str__(self) -> str:
        """The utilisation in words.

        >>> one = Utilisation(wall=200, seconds={"training": 150, "testing": 30}, examples=3e6, row_seconds=14400,
        ...                   computed=15000)
        >>> print(one)
        the device trained for 75% of 200 s (testing 15%, else 10%): 20,000 examples/s, 96 rows, 4% of them in vain
        """
        if not self.wall or not self.seconds.get("training"):
            return "the device did not train"
        training = self.seconds["training"]
        parts = {name: value for name, value in self.seconds.items() if name != "training"}
        parts["else"] = self.wall - sum(self.seconds.values())
        shares = {name: value / self.wall for name, value in parts.items()}
        said = ", ".join(f"{name} {share:.0%}" for name, share in shares.items() if share >= 0.005)
        vain = 1 - self.row_seconds / self.computed
        return (
            f"the device trained for {training / self.wall:.0%} of {self.wall:,.0f} s ({said}): "
            f"{self.examples / training:,.0f} examples/s, {self.row_seconds / training:.0f} rows"
            + (f", {vain:.0%} of them in vain" if vain >= 0.005 else "")
        )


class WriteUtilisation(Callback):
    """Measures the utilisation in a training, and appends it to a file."""

    def __init__(self, path: Path) -> None:
        self.path, self.found = path, Utilisation(began=time.time())
        self._before = 0.0

    def on_epoch(self, loop: Loop) -> None:
        program, found = loop.program, self.found
        nodes, training = len(program.engine.nodes), program.seconds["training"]
        spent, self._before = training - self._before, training
        rows = nodes * len(loop.latest)
        found.examples += rows * program.feed.examples
        found.row_seconds += rows * spent
        found.computed += nodes * len(loop.members) * spent

    def on_end(self, loop: Loop) -> None:
        self.found.wall, self.found.seconds = time.time() - self.found.began, dict(loop.program.seconds)
        append_line(self.path, asdict(self.found))


def utilisation(path: Path, since: float) -> Utilisation:
    """The utilisation since a time, by the programs in the file that began after it."""
    total = Utilisation(began=since, wall=time.time() - since)
    for line in read_lines(path):
        one = Utilisation(**line)
        if one.began < since:
            continue
        total.examples += one.examples
        total.row_seconds += one.row_seconds
        total.computed += one.computed
        for name, value in one.seconds.items():
            total.seconds[name] = total.seconds.get(name, 0.0) + value
    return total
