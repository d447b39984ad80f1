"""The only training loop: used by the simulator, distributed processes, `qg node` and `qg.train`.

Callbacks do the logging, saving, display and stopping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from quasiglobal.errors import InputError, unknown
from quasiglobal.metrics import is_lower
from quasiglobal.training.metrics import LOSS, Measures, Ranking, Record, RecordList, combined, diverged, ranking
from quasiglobal.training.program import Program
from quasiglobal.training.rows import module_of


class Callback:
    """Base class: override the methods that you need. Each receives the loop and may call `loop.stop()`.

    A callback of yours needs no base class: the loop calls those of the four methods that it has.
    """

    def on_start(self, loop: Loop) -> None:
        """Called before the first epoch."""

    def on_step(self, loop: Loop) -> None:
        """Called after each step; `loop.step` counts from the start of the run."""

    def on_epoch(self, loop: Loop) -> None:
        """Called after each epoch; `loop.latest` holds its records."""

    def on_end(self, loop: Loop) -> None:
        """Called after the last epoch, also if the loop was stopped early."""


EVENTS = ("on_start", "on_step", "on_epoch", "on_end")


def checked_callbacks(callbacks: Any) -> list[Any]:
    """A user's callbacks; a class is instantiated. Raise InputError for an object without any of the methods."""
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    made = [one() if isinstance(one, type) else one for one in several]
    for one in made:
        if not any(hasattr(one, event) for event in EVENTS):
            raise InputError(f"callback {one!r} has none of the methods {', '.join(EVENTS)}")
    return made


class Loop:
    """Trains a program to its end and calls the callbacks in order. It is the `run` that a callback receives."""

    def __init__(
        self,
        program: Program,
        callbacks: Sequence[Any] = (),
        *,
        folders: Sequence[Path] = (),
        history: Sequence[Sequence[Record]] = (),
    ) -> None:
        """`folders` are the run folders, if any; `history` has the records of each experiment before a resume."""
        self.program, self.callbacks, self.folders = program, callbacks, list(folders)
        self.runs = [RecordList(of) for of in history] or [RecordList() for _ in program.experiments]
        """The records of each experiment so far."""
        self.going = list(range(len(program.experiments)))
        """Indices of the experiments that have not diverged."""
        self.measures: list[Measures] = []
        """Per-node values of the hosted nodes in the last epoch, for every experiment."""
        self.latest: dict[int, Record] = {}
        """Combined record of the hosted nodes in the last epoch, for each experiment that trained in it."""
        self.diverged: list[int] = []
        """Indices of the experiments that diverged in the last epoch."""
        self.step = program.state.epochs * program.feed.steps_per_epoch
        self.stopping = self.interrupted = False
        self.end_together: Callable[[], None] | None = None
        """Asks all processes of a run to end after one epoch; None if this process decides alone."""

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

    @property
    def records(self) -> list[Record]:
        """The records of the first experiment so far."""
        return self.runs[0]

    @property
    def score(self) -> Ranking:
        """The metric that ranks tests."""
        return ranking(self.program.experiment.metric, self.records)

    def ranking(self, metric: str | None = None, lower: bool = False) -> Ranking:
        """The score, or a metric of the test by its name; raise InputError if there is none of that name."""
        if metric is None:
            return self.score
        known = {name: is_lower(one) for name, one in self.program.evaluation.metrics.items()} | {LOSS: True}
        if metric not in known:
            raise unknown("metric", metric, known)
        return Ranking(metric, lower or known[metric])

    def model(self, node: int, run: int = 0) -> nn.Module:
        """A copy of the model of a node that is hosted here, of one experiment."""
        nodes = self.program.engine.nodes
        if node not in nodes:
            raise InputError(f"node {node} is not here; this process has the nodes {nodes[0]} to {nodes[-1]}")
        return module_of(self.program.task.module(0), self.program.rows_of(run), self.program.layout, nodes.index(node))

    def average(self, run: int = 0) -> nn.Module:
        """The average of all models that are hosted here, of one experiment."""
        return module_of(self.program.task.module(0), self.program.rows_of(run), self.program.layout, None)

    @property
    def ended(self) -> bool:
        """Whether the run ended: after its last epoch, or because a callback stopped it; not by Ctrl-C."""
        return self.program.finished or (self.stopping and not self.interrupted)

    def stop(self) -> None:
        """End the run after the current epoch; over processes, after an epoch that all can agree on."""
        if self.end_together is not None:
            self.end_together()
        else:
            self.end()

    def end(self) -> None:
        """End the run after the current epoch, here."""
        self.stopping = True

    def interrupt(self) -> None:
        """Stop after the current epoch; the run can be resumed."""
        self.stopping = self.interrupted = True

    def run(self) -> None:
        """Train from the program's current epoch to the end."""
        self._call("on_start")
        watched = self._methods("on_step")
        while not self.over:
            self.measures = self.program.train_epoch(self._after_step if watched else None)
            self.step = self.measures[0]["step"]
            if self.tested:
                for measures, test in zip(self.measures, self.program.evaluate(), strict=True):
                    measures |= test
            self.latest = {k: combined([self.measures[k]]) for k in self.going}
            for k, record in self.latest.items():
                self.runs[k].append(record)
            self.diverged = [k for k, record in self.latest.items() if diverged(record, self.program.task.large_loss)]
            self.going = [k for k in self.going if k not in self.diverged]
            self._call("on_epoch")
        self._call("on_end")

    def _after_step(self, step: int) -> None:
        self.step = step
        self._call("on_step")

    def _call(self, event: str) -> None:
        for method in self._methods(event):
            method(self)

    def _methods(self, event: str) -> list[Callable[[Loop], None]]:
        """The callbacks' own methods for an event."""
        own = (one for one in self.callbacks if getattr(type(one), event, None) is not getattr(Callback, event))
        return [getattr(one, event) for one in own if hasattr(one, event)]
