"""The paper's tuning: a grid whose best lies inside of it, or else it grows.

"The tuning procedure ensures that the best hyper-parameter lies in the middle of our search grids; otherwise we
extend our search grid." Every trial is an ordinary run in the store, so that none is ever run twice.
"""

from __future__ import annotations

import itertools
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import NoneType

from quasiglobal.algorithms import algorithm, numeric_options, with_option
from quasiglobal.errors import InputError, unknown
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, RunFolder, Watcher, folders_of, unwatched
from quasiglobal.runs.sweep import sweep
from quasiglobal.training.experiment import Experiment, spellings
from quasiglobal.training.metrics import SCORE, number

Point = tuple[float, ...]
"""A value for each name that is tuned, in their order."""

Trainer = Callable[[Sequence[Experiment], Options, Watcher], object]
"""Trains experiments, with all seeds that the options ask for, into the store."""

CAP = 16
"""A grid does not grow beyond this many trials unless told otherwise."""

FACTOR = 2.0
"""Between the learning rates of a grid that nobody gave."""


@dataclass(frozen=True)
class Tuned:
    """A grid as it ended, and its best."""

    experiment: Experiment
    """At the best."""
    grid: dict[str, tuple[float, ...]]
    """The values of each name, in rising order."""
    trials: dict[Point, Run]
    """The run at every point of the grid."""
    best: Point
    inside: bool
    """Whether the best has neighbours on both sides, or nothing lies beyond it; False where the cap ended it."""
    runs: list[Run]
    """All seeds at the best."""

    @property
    def scores(self) -> dict[Point, float]:
        """What the trials reached."""
        return {point: score(run) for point, run in self.trials.items()}


def tune(
    experiments: Sequence[Experiment],
    over: Mapping[str, Sequence[float]],
    options: Options,
    cap: int = CAP,
    watch: Watcher = unwatched,
    train: Trainer = sweep,
) -> list[Tuned]:
    """Tune each experiment over the full product of the values, then run all seeds at its best.

    A name is a numeric field of `Experiment` or an option of its algorithm. The trials have the experiment's own
    seed; all of all experiments are trained together. Where the best lies at an end of the grid, the grid grows
    there, as long as it has no more than `cap` trials; a name with a single value stays as it is. The best has the
    highest accuracy in its last test; one that diverged is worst; of equals the smaller is taken, by the first name
    first. `over={"lr": ()}` takes three rates around each experiment's own, `FACTOR` apart.
    """
    if cap < 0:
        raise InputError(f"cap must be >= 0, got {cap}")
    searches = [_Search.of(experiment, over) for experiment in experiments]
    once = replace(options, seeds=1)
    while wanted := [(search, point) for search in searches for point in search.untried()]:
        trials = [as_stored(search.at(point), options.runs) for search, point in wanted]
        train(list(dict.fromkeys(trials)), once, watch)
        for (search, point), trial in zip(wanted, trials, strict=True):
            search.trials[point] = RunFolder.of(trial, options.runs).read()
        for search in searches:
            search.grow(cap)
    chosen = [search.trials[search.best].experiment for search in searches]
    train(list(dict.fromkeys(chosen)), options, watch)
    return [
        Tuned(
            search.at(search.best), search.values(), search.trials, search.best, search.inside,
            [folder.read() for folder in folders_of(experiment, options)],
        )
        for search, experiment in zip(searches, chosen, strict=True)
    ]


def as_stored(experiment: Experiment, root: Path) -> Experiment:
    """The same experiment as the store spells it."""
    runs = [RunFolder.of(one, root).read() for one in spellings(experiment)]
    return max(runs, key=lambda run: (run.summary is not None, run.begun)).experiment


def score(run: Run) -> float:
    """The score in the last test, the mean over the nodes; minus infinity where the run diverged."""
    reached = number(run.summary.last, SCORE) if run.summary and run.status == "finished" else None
    return -math.inf if reached is None else reached


def best_point(scores: Mapping[Point, float]) -> Point:
    """Where the score is highest; of equals the smaller.

    >>> best_point({(0.1,): 0.5, (0.2,): 0.7, (0.4,): 0.7, (0.8,): -math.inf})
    (0.2,)
    """
    return min(scores, key=lambda point: (-scores[point], point))


def rates_around(peak: float) -> tuple[float, ...]:
    """Three learning rates in geometric progression.

    >>> rates_around(0.8)
    (0.4, 0.8, 1.6)
    """
    return tuple(_rounded(peak * FACTOR**k) for k in (-1, 0, 1))


def parse_over(text: str) -> dict[str, tuple[float, ...]]:
    """What to tune over, as the command line says it; a bare lr takes rates around the experiment's own.

    >>> parse_over("lr=0.1,0.2,0.4,beta=0.8,0.9")
    {'lr': (0.1, 0.2, 0.4), 'beta': (0.8, 0.9)}
    >>> parse_over("lr,mu=0.3,0.5")
    {'lr': (), 'mu': (0.3, 0.5)}
    """
    over: dict[str, tuple[float, ...]] = {}
    name = ""
    for word in text.split(","):
        before, equals, value = (part.strip() for part in word.rpartition("="))
        if equals or value == "lr":
            name = before if equals else value
            if name in over:
                raise InputError(f"--over names {name} twice; give all its values once, {name}=…,…")
            over[name] = ()
        if not name:
            raise InputError(f"cannot read --over {text}; write it as lr=0.1,0.2,0.4 or lr=0.1,0.2,beta=0.8,0.9")
        if equals or value != "lr":
            over[name] = (*over[name], _number(value, name))
    return over


def beyond(values: Sequence[float], upwards: bool, share: bool = False) -> float | None:
    """The next value after an end of the grid, by the ratio of the last two; none where there is no ratio.

    After 0, which has a ratio to nothing, it is `FACTOR`.
    What lies between 0 and 1, as a momentum factor does, goes on by the ratio of the distances to 1, and not below 0.

    >>> beyond([0.1, 0.2, 0.4], upwards=True), beyond([0.1, 0.2, 0.4], upwards=False)
    (0.8, 0.05)
    >>> beyond([0.8, 0.9], upwards=True, share=True), beyond([0.2, 0.6], upwards=False, share=True)
    (0.95, 0.0)
    >>> beyond([0, 1e-4], upwards=True)
    0.0002
    """
    edge, inner = (values[-1], values[-2]) if upwards else (values[0], values[1])
    if share:
        edge, inner = 1 - edge, 1 - inner
    if edge <= 0 or inner < 0:
        return None
    value = edge * edge / inner if inner else FACTOR * edge
    return _rounded(max(0.0, 1 - value) if share else value)


@dataclass
class _Search:
    """One experiment's grid while it grows."""

    experiment: Experiment
    axes: dict[str, list[float]]
    kinds: dict[str, type[int] | type[float]]
    trials: dict[Point, Run] = field(default_factory=dict)
    stuck: set[str] = field(default_factory=set)
    """Names whose best lies at an end where the cap lets nothing be added."""

    @classmethod
    def of(cls, experiment: Experiment, over: Mapping[str, Sequence[float]]) -> _Search:
        options = numeric_options(algorithm(experiment.algorithm))
        known = NUMBERS | {name: kind for name, kind in options.items() if name not in NUMBERS}
        if not over:
            raise InputError("there is nothing to tune over; name it, as in lr=0.1,0.2,0.4")
        axes = {}
        for name, values in over.items():
            if name not in known:
                raise unknown(f"number of an experiment with {experiment.algorithm}", name, sorted(known))
            given = values or (rates_around(experiment.peak_lr) if name == "lr" else ())
            if not given:
                raise InputError(f"{name} needs values to tune over: {name}=…,…")
            if len(set(given)) < len(given):
                raise InputError(f"{name} has a value twice; give each once")
            axes[name] = sorted(given)
        search = cls(experiment, axes, known)
        for point in search.untried():
            search.at(point)                                # refuses what cannot be, before anything is run
        return search

    def values(self) -> dict[str, tuple[float, ...]]:
        return {name: tuple(values) for name, values in self.axes.items()}

    def untried(self) -> list[Point]:
        return [point for point in itertools.product(*self.axes.values()) if point not in self.trials]

    def at(self, point: Point) -> Experiment:
        """The experiment with the values of a point."""
        chosen = self.experiment
        for name, value in zip(self.axes, point, strict=True):
            if self.kinds[name] is int and value != round(value):
                raise InputError(f"{name} must be a whole number, got {value:g}")
            value = self.kinds[name](value)
            if name in NUMBERS:
                chosen = replace(chosen, **{name: value})   # type: ignore[arg-type]
            else:
                chosen = replace(chosen, algorithm=with_option(chosen.algorithm, name, value))
        if not 0 < chosen.peak_lr < math.inf:
            raise InputError(f"lr must be > 0 and finite, got {chosen.peak_lr:g}")
        return chosen

    @property
    def best(self) -> Point:
        return best_point({point: score(run) for point, run in self.trials.items()})

    @property
    def inside(self) -> bool:
        return not self.stuck

    def grow(self, cap: int) -> None:
        """Add a value at each end that the best lies at."""
        best, self.stuck = self.best, set()
        for k, (name, values) in enumerate(self.axes.items()):
            if len(values) == 1 or best[k] not in (values[0], values[-1]):
                continue
            value = self._next(k, name, upwards=best[k] == values[-1])
            if value is None:
                continue
            others = math.prod(len(axis) for axis in self.axes.values()) // len(values)
            if others * (len(values) + 1) > cap:
                self.stuck.add(name)
            else:
                self.axes[name] = sorted([*values, value])

    def _next(self, k: int, name: str, upwards: bool) -> float | None:
        """The value beyond an end, if there is one that the experiment can have."""
        values = self.axes[name]
        share = name not in NUMBERS and algorithm(self.experiment.algorithm).limits.get(name) == "[0, 1]"
        value = beyond(values, upwards, share)
        if value is not None and self.kinds[name] is int:
            value = float(round(value))
        if value is None or value in values:
            return None
        try:
            self.at((*self.best[:k], value, *self.best[k + 1 :]))
        except InputError:
            return None
        return value


def _numbers() -> dict[str, type[int] | type[float]]:
    """The fields of an experiment that are numbers and can be tuned, with their kind."""
    hints = typing.get_type_hints(Experiment)
    found = {}
    for one in fields(Experiment):
        kinds = [kind for kind in typing.get_args(hints[one.name]) or (hints[one.name],) if kind is not NoneType]
        if kinds[0] in (int, float) and typing.get_origin(hints[one.name]) is not tuple and one.name != "seed":
            found[one.name] = kinds[0]
    return found


NUMBERS = _numbers()
"""What can be tuned of an experiment whatever its algorithm; an algorithm's option of the same name cannot be."""


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name} must be a number, got {text!r}; write --over {name}=0.1,0.2") from None
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, got {text}")
    return value


def _rounded(value: float) -> float:
    """Six digits, so that a run's name does not depend on how a rate was computed."""
    return float(f"{value:.6g}")
