"""Callbacks that write a run to disk."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from quasiglobal.data.partition import fingerprint
from quasiglobal.runs.saving import Saving
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.runs.tensorboard import EventFiles
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.program import Program


class WriteRecords(Callback):
    """Writes the record of every epoch, and the summary when a run ends."""

    def __init__(self, runs: Sequence[RunFolder]) -> None:
        self.runs = runs

    def on_epoch(self, loop: Loop) -> None:
        for k, record in loop.latest.items():
            self.runs[k].write(record)
        for k in loop.diverged:
            self.runs[k].finish("diverged", facts(loop.program, k))

    def on_end(self, loop: Loop) -> None:
        if loop.ended:
            for k in loop.going:
                self.runs[k].finish("finished", facts(loop.program, k))


class SaveCheckpoints(Callback):
    """Saves the runs after an epoch if their last checkpoint is `seconds` old, and at the end; stops after Ctrl-C."""

    def __init__(self, runs: Sequence[RunFolder], seconds: float, noted: list[int]) -> None:
        """`noted` is the list that `patient_interrupts` yields."""
        self.runs, self.saving = runs, Saving(seconds, noted)

    def on_epoch(self, loop: Loop) -> None:
        if self.saving.now(loop):
            for k in loop.going:
                self.runs[k].checkpoint(loop.program.rows_of(k), loop.epoch)


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
    features = program.task.data.train.features
    return ({"features": list(features)} if features else {}) | {
        "parameters": program.layout.size,
        "partition": fingerprint(program.partitions[run]),
        "terms": program.task.data.terms(),
        "device": str(program.device),
        "torch": torch.__version__,
    }
