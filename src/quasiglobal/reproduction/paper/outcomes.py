"""Outcomes of the paper's cells, read from the run store alone.

The learning rate of a cell is the best of its trials. Trials are the ended runs with seed 0 that equal the cell's
experiment except for the learning rate. `runs/tuning.py` defines best: the highest score in the last test; a diverged
run is worse than any other; ties go to the smaller rate. If too few rates were tried at the paper's scale, the best
rate of short runs counts, provided that the cell was run at that rate; `tuned_short` marks it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from quasiglobal.reproduction.paper.cells import PaperCell, PaperTable, Scale
from quasiglobal.reproduction.paper.readings import ended_runs
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.runs.tuning import best_point, score
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import AVERAGED, SCORE, number

Which = Literal["last", "best", "averaged"]
"""Score of the last test, of the best test, or of the nodes' averaged model in the last test."""

FEWEST_RATES = 3
"""Minimum number of learning rates tried for the best to count as tuned."""


@dataclass(frozen=True)
class Outcome:
    """A cell with its runs and trials in the store."""

    cell: PaperCell
    experiment: Experiment
    """The experiment at the requested scale, with the best learning rate tried; the cell's own if none was."""
    runs: tuple[Run, ...]
    """Ended runs of this experiment, one per seed."""
    trials: Mapping[float, Run]
    """Runs of seed 0 by learning rate, smallest first."""
    tuned_short: bool = False
    """Whether the trials are short runs, with a tenth of the epochs."""

    @property
    def fixed(self) -> bool:
        """Whether the learning rate is fixed: the paper does not tune it here."""
        return self.cell.experiment.lr is not None

    @property
    def tuned(self) -> bool:
        """Whether at least three learning rates were tried and the best is neither the smallest nor the largest."""
        rates = list(self.trials)
        return len(rates) >= FEWEST_RATES and self.experiment.peak_lr in rates[1:-1]

    @property
    def how(self) -> str:
        """How the learning rate was found, as a short text."""
        if self.fixed:
            return "fixed"
        if not self.trials:
            return "not run"
        if len(self.trials) < FEWEST_RATES:
            return "not tuned"
        found = f"{'best' if self.tuned else 'at an end'} of {len(self.trials)}"
        return f"{found} short runs" if self.tuned_short else found

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged (⋆ in the paper)."""
        return any(run.status == "diverged" for run in self.runs)

    def by_seed(self, which: Which = "last") -> dict[int, float]:
        """Our score of each seed in per cent; empty if a seed diverged or a run lacks the metric."""
        found = {run.experiment.seed: _reached(run, which) for run in self.runs}
        values = {seed: 100 * reached for seed, reached in found.items() if reached is not None}
        return {} if self.diverged or len(values) < len(self.runs) else values

    def ours(self, which: Which = "last") -> Score | None:
        """Our score in per cent; None if no run has ended, a seed diverged, or a run lacks the metric."""
        values = self.by_seed(which)
        return Score.of(list(values.values())) if values else None

    @property
    def difference(self) -> float | None:
        """Our score minus the paper's; None unless both exist."""
        ours = self.ours()
        return None if ours is None or self.cell.score is None else ours.mean - self.cell.score.mean


def _reached(run: Run, which: Which) -> float | None:
    """The score of a run, from its summary."""
    if run.summary is None:
        return None
    test = run.summary.best if which == "best" else run.summary.last
    return number(test, AVERAGED if which == "averaged" else SCORE)


def outcomes(table: PaperTable, store: RunStore, scale: Scale = "paper", short: bool = True) -> list[Outcome]:
    """The outcome of each cell of a table.

    `short`: whether the best rate of short runs counts if too few rates were tried at the paper's scale.
    """
    found = [_outcome(cell, scale, store) for cell in table.cells]
    return [_or_at_short_rate(one, store) for one in found] if short and scale == "paper" else found


def chosen_short(cell: PaperCell, store: RunStore) -> Outcome | None:
    """The cell at the paper's scale, at the best rate of its short runs; None if too few rates were tried."""
    short = _outcome(cell, "short", store)
    if len(short.trials) < FEWEST_RATES:
        return None
    alike = (one for one in cell.experiments("paper") if one.algorithm == short.experiment.algorithm)
    chosen = replace(next(alike), lr=short.experiment.peak_lr)
    return replace(_tried(cell, chosen, store), trials=short.trials, tuned_short=True)


def _outcome(cell: PaperCell, scale: Scale, store: RunStore) -> Outcome:
    """The outcome of the best of the cell's algorithms."""
    found = [_tried(cell, experiment, store) for experiment in cell.experiments(scale)]
    return max(found, key=lambda one: max(map(score, one.trials.values()), default=float("-inf")))


def _or_at_short_rate(one: Outcome, store: RunStore) -> Outcome:
    """Fall back to the best rate of short runs if the paper's scale has too few rates and the cell was run at it."""
    if one.fixed or len(one.trials) >= FEWEST_RATES:
        return one
    short = chosen_short(one.cell, store)
    return short if short and short.runs else one


def _tried(cell: PaperCell, experiment: Experiment, store: RunStore) -> Outcome:
    runs = ended_runs(store, experiment)
    if experiment.lr is not None:
        runs = [run for run in runs if run.experiment.peak_lr == experiment.lr]
    trials = {run.experiment.peak_lr: run for run in runs if run.experiment.seed == experiment.seed}
    if not trials:
        return Outcome(cell, experiment, (), {})
    (best,) = best_point({(rate,): score(run) for rate, run in trials.items()})
    seeds = {run.experiment.seed: run for run in runs if run.experiment.peak_lr == best}
    chosen = tuple(seeds[seed] for seed in sorted(seeds))
    return Outcome(cell, replace(experiment, lr=best), chosen, dict(sorted(trials.items())))
