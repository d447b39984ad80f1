"""The only training loop: used by the simulator, distributed processes, `qg node` and `qg.train`.

Callbacks do the logging, saving, display and stopping.
"""

from __future__ import annotations

from collections.abc import Sequence

from quasiglobal.training.metrics import Measures, Record, combined, diverged
from quasiglobal.training.program import Program


class Callback:
    """Base class: override the methods that you need. Each receives the loop and may call `loop.stop()`."""

    def on_start(self, loop: Loop) -> None:
        """Called before the first epoch."""

    def on_step(self, loop: Loop) -> None:
        """Called after each step; `loop.step` counts from the start of the run."""

    def on_epoch(self, loop: Loop) -> None:
        """Called after each epoch; `loop.records` holds its records."""

    def on_end(self, loop: Loop) -> None:
        """Called after the last epoch, also if the loop was stopped early."""


class Loop:
    """Trains a program to its end and calls the callbacks in order."""

    def __init__(self, program: Program, callbacks: Sequence[Callback] = ()) -> None:
        self.program, self.callbacks = program, callbacks
        self.going = list(range(len(program.experiments)))
        """Indices of the experiments that have not diverged."""
        self.measures: list[Measures] = []
        """Per-node values of the hosted nodes in the last epoch, for every experiment."""
        self.records: dict[int, Record] = {}
        """Combined record of the hosted nodes in the last epoch, for each experiment that trained in it."""
        self.diverged: list[int] = []
        """Indices of the experiments that diverged in the last epoch."""
        self.step = program.state.epochs * program.feed.steps_per_epoch
        self.stopping = False

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self.program.state.epochs

    @property
    def tested(self) -> bool:
        """Whether the last epoch ended with a test: every `eval_every`-th epoch and the final epoch do."""
        return self.epoch % self.program.experiment.eval_every == 0 or self.program.finished

    @property
    def over(self) -> bool:
        """Whether no epoch follows."""
        return self.program.finished or self.stopping or not self.going

    def stop(self) -> None:
        """Stop after the current epoch."""
        self.stopping = True

    def run(self) -> None:
        """Train from the program's current epoch to the end."""
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
