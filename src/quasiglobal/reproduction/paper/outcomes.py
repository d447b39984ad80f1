"""Outcomes of the paper's cells, read from the run store alone, and how they compare with the paper's numbers.

The learning rate of a cell is the best of its trials: the ended runs of `trial_of` its experiment, which are tested on
held-out training examples, with a seed that is not reported. `runs/tuning.py` defines best: the highest score in the
last test; a diverged run is worse than any other; ties go to the smaller rate. Cells without such trials were tuned on
the test set: their trials are the runs with seed 0. If too few rates were tried at the paper's scale, the best rate of
short runs counts, provided that the cell was run at that rate; `tuned_short` marks it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from quasiglobal.reproduction.paper.readings import ended_runs
from quasiglobal.reproduction.paper.tables import ColumnLabel, PaperCell, PaperTable, Scale
from quasiglobal.reproduction.report.noise import Gap, Sample, gap
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.runs.tuning import best_point, score
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.metrics import AVERAGED, SCORE, number

Which = Literal["last", "best", "averaged"]
"""Score of the last test, of the best test, or of the nodes' averaged model in the last test."""

FEWEST_RATES = 3
"""Minimum number of learning rates tried for the best to count as tuned."""


HELD_OUT = 0.1
"""Share of the training examples on which the trials are tested."""

TRIAL_SEED = 1000
"""Seed of the trials, which no table reports."""


@dataclass(frozen=True)
class Outcome:
    """A cell with its runs and trials in the store."""

    cell: PaperCell
    experiment: Experiment
    """The experiment at the requested scale, with the best learning rate tried; the cell's own if none was."""
    runs: tuple[Run, ...]
    """Ended runs of this experiment, one per seed."""
    trials: Mapping[float, Run]
    """Trials by learning rate, smallest first."""
    held_out: bool = False
    """Whether the trials were tested on held-out examples, not on the test set."""
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
        if len(self.trials) < FEWEST_RATES and not self.held_out:
            return "not tuned"
        found = f"{'best' if self.tuned else 'at an end'} of {len(self.trials)}"
        return found + " short runs" * self.tuned_short + " held out" * self.held_out

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged (⋆ in the paper)."""
        return any(run.status == "diverged" for run in self.runs)

    def by_seed(self, which: Which = "last") -> dict[int, float]:
        """Our score of each seed in per cent; empty if a seed diverged or a run lacks the metric."""
        metric = AVERAGED if which == "averaged" else SCORE
        tests = {
            run.experiment.seed: run.summary.best if which == "best" else run.summary.last
            for run in self.runs if run.summary
        }
        values = {seed: 100 * reached for seed, test in tests.items() if (reached := number(test, metric)) is not None}
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


def outcomes(table: PaperTable, store: RunStore, scale: Scale = "paper", short: bool = True) -> list[Outcome]:
    """The outcome of each cell of a table.

    `short`: whether the best rate of short runs counts, if too few rates were tried at the paper's scale and the cell
    was run at it.
    """
    found = [_outcome(cell, scale, store) for cell in table.cells]
    for k, one in enumerate(found if short and scale == "paper" else ()):
        if not one.fixed and not one.held_out and len(one.trials) < FEWEST_RATES:
            at_short = chosen_short(one.cell, store)
            found[k] = at_short if at_short and at_short.runs else one
    return found


def chosen_short(cell: PaperCell, store: RunStore) -> Outcome | None:
    """The cell at the paper's scale, at the best rate of its short runs; None if too few rates were tried."""
    short = _outcome(cell, "short", store)
    if len(short.trials) < FEWEST_RATES:
        return None
    alike = (one for one in cell.experiments("paper") if one.algorithm == short.experiment.algorithm)
    chosen = replace(next(alike), lr=short.experiment.peak_lr)
    found = _tried(cell, chosen, store)
    return replace(found, trials=short.trials, tuned_short=True, held_out=short.held_out)


def _outcome(cell: PaperCell, scale: Scale, store: RunStore) -> Outcome:
    """The outcome of the best of the cell's algorithms."""
    found = [_tried(cell, experiment, store) for experiment in cell.experiments(scale)]
    return max(found, key=lambda one: max(map(score, one.trials.values()), default=float("-inf")))


def _tried(cell: PaperCell, experiment: Experiment, store: RunStore) -> Outcome:
    def ended(one: Experiment) -> list[Run]:
        return [run for run in ended_runs(store, one) if one.lr is None or run.experiment.peak_lr == one.lr]

    runs, held_out = ended(experiment), ended(trial_of(experiment))
    tried = held_out or [run for run in runs if run.experiment.seed == experiment.seed]
    trials = {run.experiment.peak_lr: run for run in tried}
    if not trials:
        return Outcome(cell, experiment, (), {})
    (best,) = best_point({(rate,): score(run) for rate, run in trials.items()})
    seeds = {run.experiment.seed: run for run in runs if run.experiment.peak_lr == best}
    chosen = tuple(seeds[seed] for seed in sorted(seeds))
    return Outcome(cell, replace(experiment, lr=best), chosen, dict(sorted(trials.items())), bool(held_out))


def trial_of(experiment: Experiment) -> Experiment:
    """The experiment with which a cell's learning rate is tuned."""
    return replace(experiment, seed=TRIAL_SEED, validation=HELD_OUT)


# ------------------------------------------------------------------------------------------------ versus the paper

PAPER_SEEDS = 3
"""Number of seeds behind each of the paper's means with a standard deviation."""

Verdict = Literal["holds", "within noise", "does not hold"]


@dataclass(frozen=True)
class Order:
    """Rank of a method against the others of its column that both the paper and our runs have."""

    methods: Mapping[Verdict, Sequence[str]]
    """Other methods: on the same side as in the paper, on the other side within the noise of our runs, or beyond it."""

    @property
    def verdict(self) -> Verdict | None:
        """The worst result of all comparisons; None if there are none."""
        return worst(self.methods)


def worst(verdicts: Collection[Verdict]) -> Verdict | None:
    """The worst verdict; None if there are none."""
    order: tuple[Verdict, ...] = ("does not hold", "within noise", "holds")
    return next((kind for kind in order if kind in verdicts), None)


def paper_sample(score: Score | None) -> Sample:
    """The paper's score; −∞ if the run did not converge."""
    if score is None:
        return Sample(-math.inf, None, 1)
    return Sample(score.mean, score.std, 1 if score.std is None else PAPER_SEEDS)


def our_sample(outcome: Outcome) -> Sample | None:
    """Our score after the last epoch; −∞ if a seed diverged, None if there is no score."""
    if outcome.diverged:
        return Sample(-math.inf, None, len(outcome.runs))
    score, one = outcome.ours(), outcome.experiment
    if score is None:
        return None
    partition = one.data, one.partition, one.resolved.nodes, one.alpha if one.uses_alpha else None
    return Sample(score.mean, score.std, len(outcome.runs), outcome.by_seed(), partition)


def to_paper(outcome: Outcome) -> Gap | None:
    """Our score minus the paper's; None unless both converged."""
    ours, paper = our_sample(outcome), paper_sample(outcome.cell.score)
    if ours is None or math.isinf(ours.mean) or math.isinf(paper.mean):
        return None
    return gap([(1, ours), (-1, paper)])


def by_model_and_column(outcomes: Iterable[Outcome]) -> dict[tuple[str, ColumnLabel], list[Outcome]]:
    """Group outcomes by model and column: methods are ranked within a group."""
    groups: dict[tuple[str, ColumnLabel], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.cell.row.model, outcome.cell.column), []).append(outcome)
    return groups


def order(outcome: Outcome, others: Iterable[Outcome]) -> Order:
    """Compare the rank of a method among others in our runs with its rank in the paper."""
    ours = our_sample(outcome)
    found: dict[Verdict, list[str]] = {}
    for other in others:
        theirs = our_sample(other)
        if other is outcome or ours is None or theirs is None:
            continue
        in_paper = gap([(1, paper_sample(outcome.cell.score)), (-1, paper_sample(other.cell.score))])
        in_ours = gap([(1, ours), (-1, theirs)])
        if math.isnan(in_paper.value) or in_paper.value == 0:
            continue
        beyond: Verdict = "does not hold" if in_ours.within is False else "within noise"
        kind: Verdict = "holds" if in_ours.value * in_paper.value > 0 else beyond
        found.setdefault(kind, []).append(other.cell.row.method)
    return Order(found)
