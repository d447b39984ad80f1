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
    """The next epoch after which all processes of a run save, and whether they stop then."""

    epoch: int
    stop: bool = False


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

    Whoever finds that it is time writes an epoch into the file that nobody has reached yet; all read the file after
    every epoch, and save after the one that it names. Neighbours are at most a step apart, since each waits for the
    other's message, so that p processes are at most p steps apart: `lead` epochs.
    """

    def __init__(self, seconds: float, noted: list[int], run: Path, processes: int, steps_per_epoch: int) -> None:
        super().__init__(seconds, noted)
        self.path = plan_path(run)
        self.lead = 1 + math.ceil(processes / steps_per_epoch)
        """How many epochs ahead lies one that nobody has reached yet."""

    def now(self, loop: Loop) -> bool:
        plan = self._read()
        agreed = plan.epoch == loop.epoch
        if agreed and plan.stop:
            loop.stop()
        elif self.noted and not (plan.stop and plan.epoch > loop.epoch):
            self._write(SavePlan(max(plan.epoch, loop.epoch + self.lead), stop=True))
        elif plan.epoch < loop.epoch and self._due():
            self._write(SavePlan(loop.epoch + self.lead))
        if agreed or loop.over or self.seconds == 0:
            self._saved = time.monotonic()
            return True
        return False

    def _read(self) -> SavePlan:
        try:
            values = read_json(self.path)
            return SavePlan(int(values["epoch"]), bool(values["stop"]))
        except (OSError, ValueError, KeyError):
            return SavePlan(0)

    def _write(self, plan: SavePlan) -> None:
        write_json(self.path, {"epoch": plan.epoch, "stop": plan.stop})
