"""Callbacks that write a run to disk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from quasiglobal.data.partition import digest_of_parts
from quasiglobal.errors import InputError
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import Record
from quasiglobal.training.program import Program

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class WriteRecords(Callback):
    """Writes the record of every epoch."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = runs

    def on_epoch(self, loop: Loop) -> None:
        for k, record in loop.latest.items():
            self.runs[k].write(record)


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


class Watch(Callback):
    """Calls a watcher after every epoch."""

    def __init__(self, runs: Sequence[RunFolder], watch: Watcher) -> None:
        self.runs, self.watch = runs, watch

    def on_epoch(self, loop: Loop) -> None:
        self.watch([self.runs[k] for k in loop.latest], list(loop.latest.values()))


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
