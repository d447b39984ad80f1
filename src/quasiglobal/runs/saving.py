"""Decides when a process of a distributed run saves its part and stops: at an epoch that all processes agree on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path

from quasiglobal.common.files import read_json, write_json
from quasiglobal.training.loop import Loop


@dataclass(frozen=True)
class SavePlan:
    """Recent and coming epochs after which all processes of a run save, and the epoch after which they stop."""

    epochs: tuple[int, ...] = ()
    stop: int = 0
    """0: no stop."""


def plan_path(run: Path) -> Path:
    """Path of the plan in a run folder."""
    return run / "parts" / "plan.json"


class Saving:
    """Decides for a single process, such as a node with its own data, by its own clock and its own Ctrl-C."""

    def __init__(self, seconds: float, noted: list[int]) -> None:
        """Save when the last checkpoint is `seconds` old; `noted` is the list that `patient_interrupts` yields."""
        self.seconds, self.noted = seconds, noted
        self._saved = time.monotonic()

    def now(self, loop: Loop) -> bool:
        """Whether to save after this epoch; also stops the loop after Ctrl-C."""
        if self.noted:
            loop.stop()
        if loop.over or self._due():
            self._saved = time.monotonic()
            return True
        return False

    def _due(self) -> bool:
        return time.monotonic() - self._saved >= self.seconds


class AgreedSaving(Saving):
    """Decides jointly for all processes that share the run folder, through a file in it.

    A process that is due to save or stop writes into the file an epoch that no process has reached yet. All processes
    read the file after every epoch, and save after the epochs in it. Neighbours are at most one step apart, since each
    waits for the other's message. So p processes are at most p steps apart: less than `lead` epochs.
    """

    def __init__(self, seconds: float, noted: list[int], run: Path, processes: int, steps_per_epoch: int) -> None:
        super().__init__(seconds, noted)
        self.path = plan_path(run)
        self.lead = 1 + math.ceil(processes / steps_per_epoch)
        """Number of epochs ahead that no process can have reached yet."""

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
        """Add an epoch, and remove epochs that all processes have passed."""
        recent = {passed for passed in plan.epochs if passed > epoch - 2 * self.lead}
        write_json(self.path, {"epochs": sorted({*recent, epoch}), "stop": stop})
