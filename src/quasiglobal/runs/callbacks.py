"""Callbacks that write a run to disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quasiglobal.data.partition import digest_of_parts
from quasiglobal.runs.best import KeepBest
from quasiglobal.runs.saving import Saving
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.runs.tensorboard import EventFiles
from quasiglobal.runs.utilisation import WriteUtilisation
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.program import Program

__all__ = [
    "KeepBest", "SaveCheckpoints", "Watch", "WriteRecords", "WriteSummaries", "WriteTensorBoard", "WriteUtilisation",
    "facts",
]


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

    def on_start(self, loop: Loop) -> None:
        self._write(loop)

    def on_epoch(self, loop: Loop) -> None:
        self._write(loop)

    def on_end(self, loop: Loop) -> None:
        self._write(loop)

    def _write(self, loop: Loop) -> None:
        for k in loop.ends.keys() - self.written:
            self.runs[k].finish(loop.ends[k], facts(loop.program, loop.place(k)))
            self.written.add(k)


class SaveCheckpoints(Callback):
    """Saves the runs before their last checkpoints are `seconds` old, and at their end; stops after Ctrl-C."""

    def __init__(self, runs: Sequence[RunFolder], seconds: float, noted: list[int]) -> None:
        """`noted` is the list that `patient_interrupts` yields."""
        self.runs, self.saving = runs, Saving(seconds, noted)

    def on_epoch(self, loop: Loop) -> None:
        saved = [k for k in loop.latest if loop.ends.get(k) == "finished"]
        if self.saving.now(loop):
            saved += loop.going
        if saved:
            with self.saving.timed():
                for k in saved:
                    self.runs[k].checkpoint(loop.rows_of(k), loop.epochs_of(k))


class Watch(Callback):
    """Calls a watcher after every epoch."""

    def __init__(self, runs: Sequence[RunFolder], watch: Watcher) -> None:
        self.runs, self.watch = runs, watch

    def on_epoch(self, loop: Loop) -> None:
        self.watch([self.runs[k] for k in loop.latest], list(loop.latest.values()))


class WriteTensorBoard(Callback):
    """Writes the record of every epoch to TensorBoard."""

    def __init__(self, runs: Sequence[RunFolder], board: EventFiles) -> None:
        self.runs, self.board = runs, board

    def on_epoch(self, loop: Loop) -> None:
        for k, record in loop.latest.items():
            self.board.write(self.runs[k].folder, record)


def facts(program: Program, run: int) -> dict[str, Any]:
    """Entries of a run's summary besides its scores."""
    features, weights = program.task.data.train.features, program.weights[run]
    further = ({"features": list(features)} if features else {})
    return further | ({} if weights is None else {"weights": weights.tolist()}) | {
        "parameters": program.layout.size,
        "partition": digest_of_parts(program.partitions[run]),
        "terms": program.task.data.terms(),
        "device": str(program.device),
        "torch": torch.__version__,
    }
