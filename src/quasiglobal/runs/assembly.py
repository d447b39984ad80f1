"""Process 0 combines the parts that all processes of a distributed run write into the run folder."""

from __future__ import annotations

import math
import shutil
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from torch import nn

from quasiglobal.common.files import alone
from quasiglobal.errors import InputError
from quasiglobal.peers.rendezvous import until
from quasiglobal.runs.callbacks import TensorBoard, facts
from quasiglobal.runs.parts import Part, joined_checkpoint, parts_of, records_of, stacked
from quasiglobal.runs.saving import plan_path
from quasiglobal.runs.store import RunFolder
from quasiglobal.training.loop import Callback, Loop
from quasiglobal.training.metrics import Record, RecordList
from quasiglobal.training.program import Program

STOPPING = 10.0
"""Maximum number of seconds that process 0 waits for the others to reach the epoch at which all stop."""


class WholeRun:
    """The `run` that a callback receives in process 0: the records of all nodes, and the models hosted there."""

    def __init__(self, loop: Loop, runs: Sequence[Sequence[Record]]) -> None:
        self.loop, self.runs = loop, [RecordList(records) for records in runs]

    @property
    def records(self) -> list[Record]:
        """The records of the first experiment so far."""
        return self.runs[0]

    @property
    def latest(self) -> dict[int, Record]:
        """The last record of each experiment."""
        return {k: records[-1] for k, records in enumerate(self.runs) if records}

    @property
    def epoch(self) -> int:
        """Number of epochs that all processes have completed."""
        return self.records[-1]["epoch"] if self.records else 0

    def average(self) -> nn.Module:
        """The average of all models; raise InputError if other processes have some of them."""
        engine = self.loop.program.engine
        if len(engine.nodes) == engine.topology.n:
            return self.loop.average()
        raise InputError("a callback over processes has the models of its own process; use average() of the result")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loop, name)


class Assembly(Callback):
    """Tests the averaged model of each tested epoch once all processes have written their models; finishes the runs.

    It uses only files: during training no process waits for it, and it sends no messages.
    """

    def __init__(
        self,
        runs: Sequence[RunFolder],
        parts: Sequence[Sequence[Part]],
        board: TensorBoard | None,
        patience: float,
        callbacks: Sequence[object] = (),
    ) -> None:
        """`parts` has the parts of all processes for each run; `wait` takes at most `patience` seconds.

        The user's `callbacks` are called with the records of all nodes, once all processes have completed an epoch.
        """
        self.runs, self.parts, self.board, self.patience = runs, parts, board, patience
        self.callbacks = callbacks
        self._pending: list[int] = []
        self._shown = [0] * len(runs)

    def on_start(self, loop: Loop) -> None:
        """Continue where an earlier start was stopped or killed: before its averages were tested or shown."""
        left = set.intersection(*(part.tested_epochs() for parts in self.parts for part in parts))
        self._pending = sorted(epoch for epoch in left if epoch <= loop.epoch)
        last_test = loop.epoch - loop.epoch % loop.program.experiment.eval_every
        self._shown = [max(0, last_test - 1)] * len(self.runs)
        self._view = WholeRun(loop, [[record for record in records_of(of) if record["epoch"] <= loop.epoch]
                                     for of in self.parts])
        self._call("on_start")

    def on_step(self, loop: Loop) -> None:
        self._call("on_step")

    def on_epoch(self, loop: Loop) -> None:
        if loop.tested:
            self._pending.append(loop.epoch)
        self._test_averages(loop.program)
        if loop.tested:
            self._show()
        self._tell()

    def on_end(self, loop: Loop) -> None:
        if not loop.program.finished:                       # stopped, as all others are, after the same epoch
            everything = [part for parts in self.parts for part in parts]
            with suppress(TimeoutError):
                until(lambda: all(part.last_epoch() >= loop.epoch for part in everything), STOPPING)
            self._test_averages(loop.program)
            self._end()

    def wait(self) -> None:
        """Wait until all processes have ended, at most `patience` seconds."""
        with suppress(TimeoutError):
            until(lambda: not self._missing(), self.patience)

    def finish(self, program: Program) -> None:
        """Write the runs in the simulator's format; raise InputError if a process has not ended."""
        missing = self._missing()
        if missing:
            folders = ", ".join(str(part.folder) for part in missing)
            raise InputError(f"{folders} did not finish; run the same command again to resume")
        self._test_averages(program)
        self._pending = []
        for k, (run, parts) in enumerate(zip(self.runs, self.parts, strict=True)):
            for part in parts:
                part.drop_tested(program.experiment.epochs)
            saved = joined_checkpoint(parts)
            diverged = any(part.read_status() == "diverged" for part in parts)
            run.take_over(records_of(parts))
            if saved and not diverged:
                run.save(saved)
            run.finish("diverged" if diverged else "finished", facts(program, k))
        self._end()

    def _end(self) -> None:
        self._show()
        self._tell()
        self._call("on_end")

    def _test_averages(self, program: Program) -> None:
        """Test the pending epochs for which all processes have written their models."""
        for epoch in list(self._pending):
            for parts in self.parts:
                if not all(part.has_tested(epoch) for part in parts):
                    break
            else:
                for run, parts in enumerate(self.parts):
                    rows = [part.read_tested(epoch) for part in parts]
                    whole = [found for found in rows if found is not None]
                    if len(whole) == len(rows):
                        parts[0].write_of_all(epoch, program.evaluate_average(stacked(whole), run))
                    for part in parts:
                        part.drop_tested(epoch)
                self._pending = [later for later in self._pending if later > epoch]

    def _show(self) -> None:
        """Write to TensorBoard the epochs that all processes have completed and whose averages are tested."""
        if self.board is None:
            return
        end = min(self._pending, default=math.inf)
        for k, (run, parts) in enumerate(zip(self.runs, self.parts, strict=True)):
            for record in records_of(parts):
                if self._shown[k] < record["epoch"] < end:
                    self.board.write(run.folder, record)
                    self._shown[k] = record["epoch"]

    def _tell(self) -> None:
        """Call the user's callbacks for the epochs that all processes have completed since the last time."""
        if not self.callbacks:
            return
        end = min(self._pending, default=math.inf)
        whole = [[record for record in records_of(parts) if record["epoch"] < end] for parts in self.parts]
        for count in range(len(self._view.records) + 1, min(map(len, whole)) + 1):
            self._view.runs = [RecordList(records[:count]) for records in whole]
            self._call("on_epoch")

    def _call(self, event: str) -> None:
        for callback in self.callbacks:
            if hasattr(callback, event):
                getattr(callback, event)(self._view)

    def _missing(self) -> list[Part]:
        """The parts that have not ended."""
        return [part for parts in self.parts for part in parts if part.read_status() is None]


def tidied(runs: Sequence[RunFolder], hosted: Sequence[tuple[int, ...]]) -> str:
    """Prepare run folders for these processes: delete old save plans, and merge parts if nodes have moved.

    Return the error if another command trains in one of them.
    """
    try:
        for run in runs:
            with alone(run.folder):
                plan_path(run.folder).unlink(missing_ok=True)
                moved = zip(parts_of(run.folder), hosted, strict=False)
                if any(part.nodes != list(nodes) for part, nodes in moved):
                    if newest := run.newest():
                        run.save(newest)                    # the old parts, merged
                    shutil.rmtree(run.folder / "parts")
    except InputError as error:
        return str(error)
    return ""
