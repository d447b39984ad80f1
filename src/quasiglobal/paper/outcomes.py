"""What a store of runs has of the paper's cells. The store is the only truth.

The learning rate of a cell is the best of its trials: the ended runs of seed 0 that are the cell's experiment but for
the learning rate. `runs/tuning.py` says what best means: by the score of the last test, a diverged run worse than any,
of equals the smaller rate. Where too few rates were tried at the paper's scale, that of runs at the short scale counts
if the cell was run at it, and is marked.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quasiglobal.paper.cells import PaperCell, PaperTable, Scale
from quasiglobal.paper.published import Score
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.runs.tuning import best_point, score
from quasiglobal.training.experiment import Experiment, setting
from quasiglobal.training.metrics import AVERAGED, SCORE, number

Which = Literal["last", "best", "averaged"]
"""The score of the last test, of the best one, or of the nodes' averaged model in the last one."""

FEWEST_RATES = 3
"""Learning rates that must have been tried for the best of them to count as tuned."""


@dataclass(frozen=True)
class Outcome:
    """What the store has of a cell."""

    cell: PaperCell
    experiment: Experiment
    """At the scale asked for, with the best learning rate that was tried; the cell's own where none was."""
    runs: tuple[Run, ...]
    """The runs of this experiment that have ended, a seed each."""
    trials: Mapping[float, Run]
    """Seed 0 by learning rate, smallest first."""
    tuned_short: bool = False
    """Whether the trials have a tenth of the epochs."""

    @property
    def fixed(self) -> bool:
        """Whether the paper does not tune the learning rate here."""
        return self.cell.experiment.lr is not None

    @property
    def tuned(self) -> bool:
        """Whether at least three learning rates were tried and the best is neither the smallest nor the largest."""
        rates = list(self.trials)
        return len(rates) >= FEWEST_RATES and self.experiment.peak_lr in rates[1:-1]

    @property
    def how(self) -> str:
        """How its learning rate was found, in a few words."""
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
        """Whether a seed did not converge, the paper's ⋆."""
        return any(run.status == "diverged" for run in self.runs)

    def ours(self, which: Which = "last") -> Score | None:
        """Our number, in per cent; None where nothing has ended, a seed diverged, or it was not measured."""
        found = [_reached(run, which) for run in self.runs]
        values = [100 * reached for reached in found if reached is not None]
        if not values or len(values) < len(self.runs) or self.diverged:
            return None
        return Score(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, where both have a number."""
        ours = self.ours()
        return None if ours is None or self.cell.score is None else ours.mean - self.cell.score.mean


def _reached(run: Run, which: Which) -> float | None:
    """The score of a run as its summary has it."""
    if run.summary is None:
        return None
    test = run.summary.best if which == "best" else run.summary.last
    return number(test, AVERAGED if which == "averaged" else SCORE)


def outcomes(table: PaperTable, store: RunStore, scale: Scale = "paper", short: bool = True) -> list[Outcome]:
    """What the store has of each cell of a table.

    `short`: whether a rate from short runs counts where too few were tried at the paper's scale.
    """
    found = [_outcome(cell, scale, store) for cell in table.cells]
    return [_or_at_short_rate(one, store) for one in found] if short and scale == "paper" else found


def chosen_short(cell: PaperCell, store: RunStore) -> Outcome | None:
    """The cell at the paper's scale and the rate that is best at the short one; None where too few were tried."""
    short = _outcome(cell, "short", store)
    if len(short.trials) < FEWEST_RATES:
        return None
    alike = (one for one in cell.experiments("paper") if one.algorithm == short.experiment.algorithm)
    chosen = replace(next(alike), lr=short.experiment.peak_lr)
    return replace(_tried(cell, chosen, store), trials=short.trials, tuned_short=True)


def _outcome(cell: PaperCell, scale: Scale, store: RunStore) -> Outcome:
    """The best of the cell's algorithms."""
    found = [_tried(cell, experiment, store) for experiment in cell.experiments(scale)]
    return max(found, key=lambda one: max(map(score, one.trials.values()), default=float("-inf")))


def _or_at_short_rate(one: Outcome, store: RunStore) -> Outcome:
    """The cell at the rate from short runs, if it was run at it and too few were tried at the paper's scale."""
    if one.fixed or len(one.trials) >= FEWEST_RATES:
        return one
    short = chosen_short(one.cell, store)
    return short if short and short.runs else one


def _tried(cell: PaperCell, experiment: Experiment, store: RunStore) -> Outcome:
    runs: Sequence[Run] = store.ended.get(setting(experiment), ())
    if experiment.lr is not None:
        runs = [run for run in runs if run.experiment.peak_lr == experiment.lr]
    trials = {run.experiment.peak_lr: run for run in runs if run.experiment.seed == experiment.seed}
    if not trials:
        return Outcome(cell, experiment, (), {})
    (best,) = best_point({(rate,): score(run) for rate, run in trials.items()})
    seeds = {run.experiment.seed: run for run in runs if run.experiment.peak_lr == best}
    chosen = tuple(seeds[seed] for seed in sorted(seeds))
    return Outcome(cell, replace(experiment, lr=best), chosen, dict(sorted(trials.items())))
