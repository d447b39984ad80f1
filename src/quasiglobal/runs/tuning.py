"""The paper's tuning: a grid search that extends the grid until the best point lies inside it.

"The tuning procedure ensures that the best hyper-parameter lies in the middle of our search grids; otherwise we
extend our search grid." Every trial is an ordinary run in the store, so that no trial is repeated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from quasiglobal.algorithms import numeric_options, with_option
from quasiglobal.errors import InputError, unknown
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import Run, RunFolder, Watcher, folders_of, unwatched
from quasiglobal.runs.sweep import sweep
from quasiglobal.training.experiment import Experiment, spellings
from quasiglobal.training.metrics import number

Point = tuple[float, ...]
"""One value per tuned name, in order."""

Trainer = Callable[[Sequence[Experiment], Options, Watcher], object]
"""Trains experiments with all seeds of the options, and writes the runs to the store."""

CAP = 16
"""Default maximum number of trials in a grid that grows."""

FACTOR = 2.0
"""Ratio between the learning rates of the default grid."""


@dataclass(frozen=True)
class Tuned:
    """Result of a grid search."""

    experiment: Experiment
    """The experiment at the best point."""
    grid: dict[str, tuple[float, ...]]
    """The values of each name, in ascending order."""
    trials: dict[Point, Run]
    """The run at every point of the grid."""
    best: Point
    inside: bool
    """Whether the best has neighbours on both sides, or no valid value lies beyond it; False if the cap stopped it."""
    runs: list[Run]
    """The runs of all seeds at the best point."""

    @property
    def scores(self) -> dict[Point, float]:
        """Score of every trial."""
        return {point: score(run) for point, run in self.trials.items()}


def tune(
    experiments: Sequence[Experiment],
    over: Mapping[str, Sequence[float]] | Sequence[Mapping[str, Sequence[float]]],
    options: Options,
    cap: int = CAP,
    watch: Watcher = unwatched,
    train: Trainer = sweep,
) -> list[Tuned]:
    """Tune each experiment over the full product of the values, then run all seeds at its best.

    `over` has the values of all experiments, or a mapping for each. A name is a numeric field of `Experiment` or an
    option of its algorithm. The trials use the experiment's seed, and train together. If the best point lies at an end
    of the grid, the grid grows at that end, up to `cap` trials; a name with a single value stays fixed. The best point
    has the best score in the last test; a diverged trial ranks last. Ties go to the smaller values, compared in the
    order of the names. `over={"lr": ()}` uses three rates around each experiment's own, a factor `FACTOR` apart.
    """
    if cap < 0:
        raise InputError(f"cap must be >= 0, got {cap}")
    overs = [over] * len(experiments) if isinstance(over, Mapping) else over
    searches = [_Search(experiment, own) for experiment, own in zip(experiments, overs, strict=True)]
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
            search.at(search.best), {name: tuple(values) for name, values in search.axes.items()}, search.trials,
            search.best, not search.stuck, [folder.read() for folder in folders_of(experiment, options)],
        )
        for search, experiment in zip(searches, chosen, strict=True)
    ]


def as_stored(experiment: Experiment, root: Path) -> Experiment:
    """The equivalent experiment (`spellings`) that the store already has, if any."""
    runs = [RunFolder.of(one, root).read() for one in spellings(experiment)]
    return max(runs, key=lambda run: (run.summary is not None, run.begun)).experiment


def score(run: Run) -> float:
    """The score in the last test, mean over the nodes, negative if lower is better; minus infinity if it diverged."""
    if run.summary is None or run.status != "finished":
        return -math.inf
    return run.ranking().worth(number(run.summary.last, run.ranking().name))


def best_point(scores: Mapping[Point, float]) -> Point:
    """The point with the highest score; ties go to the smaller point.

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
    """Parse `--over`; a bare lr stands for rates around the experiment's own.

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
                raise InputError(f"--over names {name} twice; give all its values together, {name}=…,…")
            over[name] = ()
        if not name:
            raise InputError(f"cannot read --over {text}; write it as lr=0.1,0.2,0.4 or lr=0.1,0.2,beta=0.8,0.9")
        if equals or value != "lr":
            over[name] = (*over[name], _number(value, name))
    return over


def beyond(values: Sequence[float], upwards: bool, share: bool = False) -> float | None:
    """Extrapolate the grid beyond one end by the ratio of the last two values; None if there is no ratio.

    If the inner value is 0, the ratio is `FACTOR`.
    With `share`, for values in [0, 1] such as momentum factors, use the distances to 1, and do not go below 0.

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


class _Search:
    """The growing grid of one experiment."""

    def __init__(self, experiment: Experiment, over: Mapping[str, Sequence[float]]) -> None:
        self.experiment, self.kinds = experiment, numeric_options(experiment.resolved.algorithm) | NUMBERS
        self.axes: dict[str, list[float]] = {}
        self.trials: dict[Point, Run] = {}
        self.stuck: set[str] = set()
        """Names with their best value at an end of the grid that the cap keeps from growing."""
        if not over:
            raise InputError("nothing to tune over; give names and values, such as lr=0.1,0.2,0.4")
        for name, values in over.items():
            if name not in self.kinds:
                raise unknown(f"name to tune with {experiment.algorithm}", name, sorted(self.kinds))
            given = values or (rates_around(experiment.peak_lr) if name == "lr" else ())
            if not given:
                raise InputError(f"{name} needs values to tune over: {name}=…,…")
            if len(set(given)) < len(given):
                raise InputError(f"{name} has a value twice; give each once")
            self.axes[name] = sorted(given)
        for point in self.untried():
            self.at(point)                                  # raises InputError for invalid values before training

    def untried(self) -> list[Point]:
        return [point for point in itertools.product(*self.axes.values()) if point not in self.trials]

    def at(self, point: Point) -> Experiment:
        """The experiment at a point."""
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

    def grow(self, cap: int) -> None:
        """Add a value at each end of the grid where the best point lies."""
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
        """The next value beyond an end; None if there is no new valid value."""
        values = self.axes[name]
        share = name not in NUMBERS and self.experiment.resolved.algorithm.limits.get(name) == "[0, 1]"
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


NUMBERS: dict[str, type[int] | type[float]] = {
    one.name: int if kind == "int" else float for one in fields(Experiment)
    if (kind := str(one.type).removesuffix(" | None")) in ("int", "float") and one.name != "seed"
}
"""Tunable fields of an experiment; they hide an algorithm's options of the same name."""


def _number(text: str, name: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{name} must be a number, got {text!r}; write --over {name}=0.1,0.2") from None
    if not math.isfinite(value):
        raise InputError(f"{name} must be finite, got {text}")
    return value


def _rounded(value: float) -> float:
    """Round to six digits, so that a run's name does not depend on how a rate was computed."""
    return float(f"{value:.6g}")
