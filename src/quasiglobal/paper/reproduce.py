"""The paper's tables from the run store: what is there, what it says, and what is still to be run.

The store is the only truth. The learning rate of a cell is the best of its trials: the ended runs of seed 0 that are
the cell's experiment but for the learning rate, by the last test's accuracy; a diverged run is worse than any, and of
equals the smaller rate wins.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from quasiglobal.algorithms import algorithm
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.experiment import Experiment
from quasiglobal.paper.published import Score
from quasiglobal.paper.tables import Cell, Scale, Table, at_scale
from quasiglobal.runs import Run, find
from quasiglobal.topology import parse

Which = Literal["last", "best", "averaged"]
MEASURES: Mapping[Which, tuple[str, str]] = {
    "last": ("last", "accuracy"), "best": ("best", "accuracy"), "averaged": ("last", "accuracy_averaged"),
}
"""Where a summary has a score: the last test, the best one, or the last one of the nodes' averaged model."""

FEWEST_RATES = 3
"""Learning rates that must have been tried for the best of them to count as tuned."""


@dataclass(frozen=True)
class Outcome:
    """What the store has of a cell."""

    cell: Cell
    experiment: Experiment
    """At the scale asked for, with the best learning rate that was tried; the cell's own where none was."""
    runs: tuple[Run, ...]
    """The runs of this experiment that have ended, a seed each."""
    trials: Mapping[float, Run]
    """Seed 0 by learning rate, smallest first."""

    @property
    def tuned(self) -> bool:
        """Whether at least three learning rates were tried and the best is neither the smallest nor the largest."""
        rates = list(self.trials)
        return len(rates) >= FEWEST_RATES and self.experiment.peak_lr in rates[1:-1]

    @property
    def diverged(self) -> bool:
        """Whether a seed did not converge, the paper's ⋆."""
        return any(run.status == "diverged" for run in self.runs)

    def ours(self, which: Which = "last") -> Score | None:
        """Our number, in per cent; None where nothing has ended or a seed diverged."""
        if not self.runs or self.diverged:
            return None
        test, measure = MEASURES[which]
        values = [100 * summary[test][measure] for run in self.runs if (summary := run.summary)]
        return Score(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    @property
    def difference(self) -> float | None:
        """Ours less the paper's, where both have a number."""
        ours = self.ours()
        return None if ours is None or self.cell.score is None else ours.mean - self.cell.score.mean


def outcomes(table: Table, root: Path, scale: Scale = "paper") -> list[Outcome]:
    """What the store under `root` has of each cell of a table."""
    ended: dict[str, list[Run]] = {}
    for run in find(root):
        if run.summary is not None:
            ended.setdefault(_setting(run.experiment), []).append(run)
    return [_outcome(cell, at_scale(cell.experiment, scale), ended) for cell in table.cells]


def _outcome(cell: Cell, experiment: Experiment, ended: Mapping[str, list[Run]]) -> Outcome:
    runs = ended.get(_setting(experiment), [])
    if experiment.lr is not None:
        runs = [run for run in runs if run.experiment.peak_lr == experiment.lr]
    trials = {run.experiment.peak_lr: run for run in runs if run.experiment.seed == experiment.seed}
    trials = dict(sorted(trials.items()))
    if not trials:
        return Outcome(cell, experiment, (), {})
    best = max(trials, key=lambda rate: _accuracy(trials[rate]))         # the first of equals: the smallest rate
    chosen = sorted((run for run in runs if run.experiment.peak_lr == best), key=lambda run: run.experiment.seed)
    return Outcome(cell, replace(experiment, lr=best), tuple(chosen), trials)


def _accuracy(run: Run) -> float:
    """What a trial is judged by."""
    summary = run.summary
    return float(summary["last"]["accuracy"]) if summary and run.status == "finished" else -1.0


def _setting(experiment: Experiment) -> str:
    """The same for experiments that differ in nothing but seed and learning rate, however they are spelled.

    Where data are alike α does not matter, nor does the graph where everybody has the same model.
    """
    if experiment.partition == "iid":
        experiment = replace(experiment, alpha=1.0)
    if isinstance(algorithm(experiment.algorithm), Centralized):
        experiment = replace(experiment, topology=f"complete:{parse(experiment.topology).n}")
    return replace(experiment, seed=0, lr=None).hash
