"""The one training loop: the simulator, processes, `qg node` and `qg.train` all drive it.

What is written, saved, shown or stopped is up to callbacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from quasiglobal.training.metrics import Measures, Record, combined, diverged
from quasiglobal.training.program import Program


class Callback:
    """Override what you need; each method is called with the loop, which can be stopped."""

    def on_start(self, loop: Loop) -> None:
        """Before the first epoch."""

    def on_step(self, loop: Loop) -> None:
        """After a step; `loop.step` counts from the very start."""

    def on_epoch(self, loop: Loop) -> None:
        """After an epoch, with its records in `loop.records`."""

    def on_end(self, loop: Loop) -> None:
        """After the last epoch, or after the one in which the loop was stopped."""


class Loop:
    """Trains a program to its end, and tells its callbacks, in their order."""

    def __init__(self, program: Program, callbacks: Sequence[Callback] = ()) -> None:
        self.program, self.callbacks = program, callbacks
        self.going = list(range(len(program.experiments)))
        """The experiments that have not diverged, by their position."""
        self.measures: list[Measures] = []
        """Of every experiment in the last epoch: the values of each node hosted here."""
        self.records: dict[int, Record] = {}
        """Of each experiment that was going in the last epoch: its nodes here combined."""
        self.diverged: list[int] = []
        """The experiments that diverged in the last epoch."""
        self.step = program.state.epochs * program.feed.steps_per_epoch
        self.stopping = False

    @property
    def epoch(self) -> int:
        """How many epochs are done."""
        return self.program.state.epochs

    @property
    def tested(self) -> bool:
        """Whether the last epoch ended with a test: each `eval_every`-th and the last one do."""
        return self.epoch % self.program.experiment.eval_every == 0 or self.program.finished

    @property
    def over(self) -> bool:
        """Whether no further epoch follows."""
        return self.program.finished or self.stopping or not self.going

    def stop(self) -> None:
        """End after this epoch."""
        self.stopping = True

    def run(self) -> None:
        """Train from the program's epoch on."""
        for callback in self.callbacks:
            callback.on_start(self)
        watched = any(type(callback).on_step is not Callback.on_step for callback in self.callbacks)
        while not self.over:
            self.measures = self.program.train_epoch(self._after_step if watched else None)
            self.step = self.measures[0]["step"]
            if self.tested:
                for measures, test in zip(self.measures, self.program.evaluate(), strict=True):
                    measures |= test
            self.records = {k: combined([self.measures[k]]) for k in self.going}
            self.diverged = [k for k, record in self.records.items() if diverged(record)]
            self.going = [k for k in self.going if k not in self.diverged]
            for callback in self.callbacks:
                callback.on_epoch(self)
        for callback in self.callbacks:
            callback.on_end(self)

    def _after_step(self, step: int) -> None:
        self.step = step
        for callback in self.callbacks:
            callback.on_step(self)
