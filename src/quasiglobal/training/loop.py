"""The only training loop: used by the simulator, distributed processes, `qg node` and `qg.train`.

Callbacks do the logging, saving, display and stopping.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from torch import nn

from quasiglobal.errors import InputError, unknown
from quasiglobal.metrics import is_lower
from quasiglobal.training.experiment import Experiment, step_order
from quasiglobal.training.metrics import LOSS, Measures, Ranking, Record, RecordList, combined, diverged, ranking
from quasiglobal.training.program import Program
from quasiglobal.training.rows import Checkpoint, NamedRows, module_of
from quasiglobal.training.trial import Constants

EPOCHS = 2**41
"""Offset of the random keys of epochs; larger than any step or test number."""


class Callback:
    """Base class: override the methods that you need. Each receives the loop and may call `loop.stop()`.

    Your own callback needs no base class: the loop calls whichever of the four methods it has.
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


def checked_callbacks(callbacks: object) -> list[object]:
    """A user's callbacks; a class is instantiated. Raise InputError for an object without any of the methods."""
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    made = [one() if isinstance(one, type) else one for one in several]
    for one in made:
        if not any(hasattr(one, event) for event in EVENTS):
            raise InputError(f"callback {one!r} has none of the methods {', '.join(EVENTS)}")
    return made


@dataclass(frozen=True)
class Entrant:
    """A run that enters a loop while others train."""

    experiment: Experiment
    folder: Path
    saved: Checkpoint | None = None
    """None: the run starts from the beginning."""
    history: Sequence[Record] = ()
    """The records of its completed epochs."""


class Queue(Protocol):
    """Runs that wait for free rows."""

    def __len__(self) -> int:
        """Number of waiting runs."""

    def take(self, count: int) -> list[Entrant]:
        """Remove and return at most `count` runs."""


class Loop:
    """Trains a program to its end and calls the callbacks in order. It is the `run` that a callback receives.

    A run has the same index in all lists here, from its start to its end. A run that diverged or finished leaves the
    program at the end of that epoch, and a waiting run takes its rows.
    """

    def __init__(
        self,
        program: Program,
        callbacks: Sequence[object] = (),
        *,
        folders: Sequence[Path] = (),
        history: Sequence[Sequence[Record]] = (),
        queue: Queue | None = None,
    ) -> None:
        """`folders` are the run folders, if any; `history` has the records of each experiment before a resume.

        `queue` has more runs, which take the rows of those that end.
        """
        self.program, self.callbacks, self.folders, self.queue = program, callbacks, list(folders), queue
        self.experiments = list(program.experiments)
        """The experiments, also those that have left the program."""
        self.runs = [RecordList(of) for of in history] or [RecordList() for _ in program.experiments]
        """The records of each experiment so far."""
        self.members = list(range(len(program.experiments)))
        """Index of the experiment at each place of the program."""
        self.ends: dict[int, str] = {}
        """The end of each experiment that has ended: diverged or finished."""
        self.going: list[int] = []
        """Indices of the experiments that still train."""
        self.tested = False
        """Whether the last epoch ended with a test of some run: every `eval_every`-th epoch and the final epoch do."""
        self._epoch_seconds = 0.0
        self.measures: list[Measures] = []
        """Per-node values of the hosted nodes in the last epoch, for every place of the program."""
        self.latest: dict[int, Record] = {}
        """Combined record of the hosted nodes in the last epoch, for each experiment that trained in it."""
        self.diverged: list[int] = []
        """Indices of the experiments that diverged in the last epoch."""
        self.step = program.state.epochs[0] * program.feed.steps_per_epoch
        self._begin(self.members)
        self.stopping = self.interrupted = False
        self.end_together: Callable[[], None] | None = None
        """Asks all processes of a run to end after one epoch; None if this process decides alone."""

    @property
    def epoch(self) -> int:
        """Number of completed epochs, of the first experiment that still trains."""
        return self.epochs_of(self.going[0]) if self.going else self.program.state.epochs[0]

    @property
    def over(self) -> bool:
        """Whether no epoch follows."""
        return self.stopping or not self.going

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
        """A copy of the model of a hosted node, of one experiment."""
        nodes = self.program.engine.nodes
        if node not in nodes:
            raise InputError(f"node {node} is not here; this process has the nodes {nodes[0]} to {nodes[-1]}")
        return module_of(self.program.task.module(0), self.rows_of(run), self.program.layout, nodes.index(node))

    def average(self, run: int = 0) -> nn.Module:
        """The average of all hosted models of one experiment."""
        program, weights = self.program, self.program.weights[self.place(run)]
        here = None if weights is None else weights[list(program.engine.nodes)]
        return module_of(program.task.module(0), self.rows_of(run), program.layout, None, here)

    def rows_of(self, run: int) -> NamedRows:
        """The rows of an experiment; raise InputError if it diverged or finished in an earlier epoch."""
        return self.program.rows_of(self.place(run))

    def epochs_of(self, run: int) -> int:
        """Number of completed epochs of an experiment in the program."""
        return self.program.state.epochs[self.place(run)]

    def place(self, run: int) -> int:
        """The place of an experiment in the program."""
        if run not in self.members:
            raise InputError(f"run {run} has {self.ends[run]}, and its rows have left the program; use them before")
        return self.members.index(run)

    @property
    def ended(self) -> bool:
        """Whether the runs ended: after their last epochs, or because a callback stopped them; not by Ctrl-C."""
        return not self.going or (self.stopping and not self.interrupted)

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
        """Train from the program's current epochs to the end."""
        self._call("on_start")
        watched = self._methods("on_step")
        try:
            while not self.over:
                self._train_epoch(self._after_step if watched else None)
                with self.program.timed("saving"):
                    self._call("on_epoch")
                if not self.stopping:
                    self._regroup()
        finally:
            self.program.feed.end()
        if self.ended:
            self.ends |= dict.fromkeys(self.going, "finished")
        self._call("on_end")

    def _train_epoch(self, after_step: Callable[[int], None] | None) -> None:
        """Train an epoch of every run, test those that are due, and note those that end."""
        program, before = self.program, self.program.seconds["training"]
        keys = [EPOCHS + done for done in program.state.epochs]
        repeats = True
        while repeats:
            with program.seeded(*keys, always=True):        # for a model that begins to draw in a later step
                constants = Constants(program.model.module) if program.task.is_own else None
                self.measures = program.train_epoch(after_step)
                if constants:
                    constants.check(program.model.called, program.layout.shapes)
                repeats = program.repeats_first_epoch()
                self._epoch_seconds = program.seconds["training"] - before
                self.step = self.measures[0]["step"]
                due = [place for place in range(len(self.members)) if program.due(place)] if not repeats else []
                self.tested = bool(due)
                if due:
                    with program.timed("testing"):
                        for place, test in zip(due, program.evaluate(due), strict=True):
                            self.measures[place] |= test
        for measures in self.measures:                      # rows of ended runs do not count
            measures["images_per_second"] *= len(self.going) / len(self.members)
        self.latest = {k: combined([self.measures[self.place(k)]]) for k in self.going}
        for k, record in self.latest.items():
            self.runs[k].append(record)
        self.diverged = [k for k, record in self.latest.items() if diverged(record, program.task.large_loss)]
        self.ends |= dict.fromkeys(self.diverged, "diverged")
        trained, self.going = self.going, []
        self._begin([k for k in trained if k not in self.ends])

    def _begin(self, runs: Sequence[int]) -> None:
        """Sort these runs into those that train and those that have finished."""
        for k in runs:
            if self.epochs_of(k) < self.experiments[k].epochs:
                self.going.append(k)
            else:
                self.ends[k] = "finished"

    # ---------------------------------------------------------------------------------------------- other runs

    def _regroup(self) -> None:
        """Let the runs that ended leave the program, and waiting runs enter; the last runs stay, with their models."""
        gone = len(self.members) - len(self.going)
        alone = self.program.engine.waits_for_nobody        # over processes, all would have to regroup
        if not gone or not alone or not (self.going or self.queue) or not self._pays_off(gone):
            return
        entering = self.queue.take(gone) if self.queue else []
        stay: list[tuple[int, Checkpoint | None]] = [(k, self.program.checkpoint(self.place(k))) for k in self.going]
        new = range(len(self.runs), len(self.runs) + len(entering))
        self.runs += [RecordList(one.history) for one in entering]
        self.folders += [one.folder for one in entering]
        self.experiments += [one.experiment for one in entering]
        stay += [(k, one.saved) for k, one in zip(new, entering, strict=True)]
        stay.sort(key=lambda run: (step_order(self.experiments[run[0]]), run[1].epochs if run[1] else 0))
        places = {k: at for at, k in enumerate(self.members)}
        self.members = [k for k, _ in stay]
        saved, before = [of for _, of in stay], [places.get(k) for k in self.members]
        self.program.regroup([self.experiments[k] for k in self.members], saved, before)
        self._begin(new)

    def _pays_off(self, gone: int) -> bool:
        """Whether regrouping saves more time than it takes to record the steps again.

        Until then, the rows of ended runs are still computed. If a model draws random numbers, such as dropout,
        these depend on the rows in the program, so the rows must not depend on the clock.
        """
        if not self.going or self.program.model.random:
            return True
        epochs = max(self.experiments[k].epochs - (0 if self.queue else self.epochs_of(k)) for k in self.going)
        return gone / len(self.members) * epochs * self._epoch_seconds >= self.program.compiling

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


# ---------------------------------------------------------------------------------------------- built-in callbacks


class Call(Callback):
    """Calls a function after each epoch."""

    def __init__(self, function: Callable[[Loop], None]) -> None:
        self.function = function

    def on_epoch(self, loop: Loop) -> None:
        self.function(loop)


class Interrupts(Callback):
    """Stops the loop after the epoch in which Ctrl-C was pressed or SIGTERM arrived."""

    def __init__(self, noted: list[int]) -> None:
        """`noted` is the list that `patient_interrupts` yields."""
        self.noted = noted

    def on_epoch(self, loop: Loop) -> None:
        if self.noted:
            loop.interrupt()


@contextmanager
def patient_interrupts() -> Iterator[list[int]]:
    """Add the first Ctrl-C, and the first SIGTERM, to the yielded list, so that the epoch can end and be saved.

    A second signal of the same kind stops at once. The two kinds are counted separately: after Ctrl-C, torchrun sends
    SIGTERM to its processes. Outside the main thread the list stays empty.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
