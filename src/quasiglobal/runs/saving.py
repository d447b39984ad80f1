"""When a process of a distributed run saves its part, and when it stops: at an epoch that all agree on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from quasiglobal.common.files import read_json, write_json
from quasiglobal.training.loop import Loop


@dataclass(frozen=True)
class SavePlan:
    """The epochs after which all processes of a run save, as far as they matter now, and after which they stop."""

    epochs: tuple[int, ...] = ()
    stop: int = 0
    """0: they do not stop."""


def plan_path(run: Path) -> Path:
    """Where a run's folder holds the plan."""
    return run / "parts" / "plan.json"


class Saving:
    """Decides for one process alone, as a node with its own data does: by its own clock and its own Ctrl-C."""

    def __init__(self, seconds: float, noted: list[int]) -> None:
        """Save when the last checkpoint is `seconds` old; `noted` is what `patient_interrupts` gives."""
        self.seconds, self.noted = seconds, noted
        self._saved = time.monotonic()

    def now(self, loop: Loop) -> bool:
        """Whether to save after this epoch; also stops the loop when it is time to."""
        if self.noted:
            loop.stop()
        if loop.over or self._due():
            self._saved = time.monotonic()
            return True
        return False

    def _due(self) -> bool:
        return time.monotonic() - self._saved >= self.seconds


class AgreedSaving(Saving):
    """Decides with all processes that share the run's folder, through a file in it.

    Whoever finds that it is time adds an epoch to the file that nobody has reached yet; all read the file after every
    epoch, and save after those that it names. Neighbours are at most a step apart, since each waits for the other's
    message, so that p processes are at most p steps apart: less than `lead` epochs.
    """

    def __init__(self, seconds: float, noted: list[int], run: Path, processes: int, steps_per_epoch: int) -> None:
        super().__init__(seconds, noted)
        self.path = plan_path(run)
        self.lead = 1 + math.ceil(processes / steps_per_epoch)
        """How many epochs ahead lies one that nobody has reached yet."""

    def now(self, loop: Loop) -> bool:
        plan = self._read()
        coming = [epoch for epoch in plan.epochs if epoch > loop.epoch]
        ahead = max(coming, default=loop.epoch + self.lead)
        if plan.stop == loop.epoch:
            loop.stop()
        elif self.noted and plan.stop < loop.epoch:
            self._write(plan, ahead, stop=ahead)
        elif not coming and self._due():
            self._write(plan, ahead, plan.stop)
        if loop.epoch in plan.epochs or loop.over or self.seconds == 0:
            self._saved = time.monotonic()
            return True
        return False

    def _read(self) -> SavePlan:
        try:
            values = read_json(self.path)
            return SavePlan(tuple(values["epochs"]), int(values["stop"]))
        except (OSError, ValueError, KeyError, TypeError):
            return SavePlan()

    def _write(self, plan: SavePlan, epoch: int, stop: int) -> None:
        """Add an epoch; those that everybody has passed are left out."""
        recent = {passed for passed in plan.epochs if passed > epoch - 2 * self.lead}
        write_json(self.path, {"epochs": sorted({*recent, epoch}), "stop": stop})
