"""The epochs after which a run is saved, or stopped by Ctrl-C; distributed processes agree on them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from quasiglobal.common.files import read_json, write_json
from quasiglobal.runs.checkpoints import Part, parts_of
from quasiglobal.training.loop import Callback, Loop

if TYPE_CHECKING:
    from quasiglobal.runs.store import RunFolder

USUAL_LEAD = 10
"""Maximum lead in epochs; a longer one is shortened by the epochs measured so far and the time per epoch."""

NOTICE = 2.0
"""Seconds in which every process reads the plan at least once, or is still behind the planned epoch."""

WORTH = 20
"""Minimum interval of checkpoints, as a multiple of the time to save one: they cost at most 5 % of the time."""

KEPT = 8
"""Number of past epochs that the plan keeps."""


@dataclass(frozen=True)
class SavePlan:
    """Recent and coming epochs after which all processes of a run save, and the epoch after which they stop."""

    epochs: tuple[int, ...] = ()
    stop: int = 0
    """0: no stop."""
    ends: bool = False
    """Whether the run ends at the stop; otherwise it can be resumed."""


def plan_path(run: Path) -> Path:
    """Path of the plan in a run folder."""
    return run / "parts" / "plan.json"


class Saving:
    """Decides for a single process, such as the simulator's, by its own clock and its own Ctrl-C."""

    def __init__(self, seconds: float, noted: list[int]) -> None:
        """Save before the last checkpoint is `seconds` old; `noted` is the list that `patient_interrupts` yields."""
        self.seconds, self.noted = seconds, noted
        self._saved = self._called = time.monotonic()
        self._epoch = self._cost = 0.0
        """Durations of the last epoch and of the last checkpoint."""
        self._ending = False
        self.at = 0
        """The epoch to save as, if it is not the current one."""

    def end(self) -> None:
        """End the run after this epoch, or after the next one that all processes agree on."""
        self._ending = True

    def now(self, loop: Loop) -> bool:
        """Whether to save after this epoch; also stops the loop after Ctrl-C."""
        now = time.monotonic()
        self._epoch, self._called = now - self._called, now
        if self._ending:
            loop.end()
        elif self.noted:
            loop.interrupt()
        if loop.over or self._due():
            self._saved = time.monotonic()
            return True
        return False

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Measure how long a checkpoint takes."""
        began = time.monotonic()
        yield
        self._cost = time.monotonic() - began

    def _due(self) -> bool:
        """Whether the checkpoint would be too old at the end of the next epoch."""
        age = time.monotonic() - self._saved + self._epoch
        return self.seconds == 0 or age >= max(self.seconds, WORTH * self._cost)


class AgreedSaving(Saving):
    """Decides jointly for all processes that share the run folder, through a file in it.

    A process that is due to save or stop writes into the file an epoch that no process has reached yet. All processes
    read the file after every epoch, and save after the epochs in it. Neighbours are at most `Topology.rounds` steps
    apart, since each waits for the other's message. So p processes are at most p times as far apart: less than `lead`
    epochs. If that is long, as with many local steps, the epochs that the others have measured are a tighter bound.
    """

    def __init__(
        self, seconds: float, noted: list[int], run: Path, steps_apart: int, steps_per_epoch: int,
        all_wait: bool = True,
    ) -> None:
        """`steps_apart`: the number of processes times the rounds of the topology.

        `all_wait`: neighbours wait for each other; otherwise (`round_deadline`) a slow process skips epochs. It then
        saves after the first epoch that is not before the planned one, under the planned number.
        """
        super().__init__(seconds, noted)
        self.run, self.path = run, plan_path(run)
        self.lead = 1 + math.ceil(steps_apart / steps_per_epoch)
        """Number of epochs ahead that no process can have reached yet."""
        self._began, self._first, self._all_wait = time.monotonic(), -1, all_wait
        self._before = 0

    def now(self, loop: Loop) -> bool:
        if self._first < 0:
            self._first = self._before = loop.epoch - 1
        plan = self._read()
        self.at = max((epoch for epoch in plan.epochs if self._before < epoch <= loop.epoch), default=0)
        self._before = loop.epoch
        coming = [epoch for epoch in plan.epochs if epoch > loop.epoch]
        ahead = max(coming) if coming else self._ahead(loop.epoch)
        if 0 < plan.stop <= loop.epoch:
            (loop.end if plan.ends else loop.interrupt)()
        elif (self.noted or self._ending) and not plan.stop:
            self._write(plan, ahead, stop=ahead, ends=self._ending)
        elif not coming and self._due():
            self._write(plan, ahead, plan.stop, plan.ends)
        if self.at or loop.over or self.seconds == 0:
            self._saved = time.monotonic()
            return True
        return False

    def _ahead(self, epoch: int) -> int:
        """An epoch that no process reaches before it has read the plan."""
        if self.lead <= USUAL_LEAD and self._all_wait:
            return epoch + self.lead
        per_epoch = (time.monotonic() - self._began) / (epoch - self._first)
        reached = max(epoch, *(part.last_epoch() for part in parts_of(self.run)))
        if not self._all_wait:
            return reached + self.lead
        return min(epoch + self.lead, reached + 1 + math.ceil(NOTICE / per_epoch))

    def _read(self) -> SavePlan:
        try:
            values = read_json(self.path)
            return SavePlan(tuple(values["epochs"]), int(values["stop"]), bool(values.get("ends", False)))
        except (OSError, ValueError, KeyError, TypeError):
            return SavePlan()

    def _write(self, plan: SavePlan, epoch: int, stop: int, ends: bool) -> None:
        """Add an epoch, and remove epochs that all processes have passed."""
        recent = sorted(plan.epochs)[-KEPT:]
        write_json(self.path, {"epochs": sorted({*recent, epoch}), "stop": stop, "ends": ends})


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
                    self.runs[k].save(loop.program.checkpoint(loop.place(k)))


class SaveParts(Callback):
    """Saves the rows of the nodes here when `saving` decides so."""

    def __init__(self, parts: Sequence[Part], saving: Saving) -> None:
        self.parts, self.saving = parts, saving

    def on_start(self, loop: Loop) -> None:
        if loop.program.finished:                           # resumed after the last epoch, before the assembly
            self._save(loop)

    def on_epoch(self, loop: Loop) -> None:
        if self.saving.now(loop):
            self._save(loop)

    def _save(self, loop: Loop) -> None:
        with self.saving.timed():
            for k, part in enumerate(self.parts):
                part.save(replace(loop.program.checkpoint(k), epochs=self.saving.at or loop.epoch))
