"""Runs compared: mean ± std over the seeds of each setting."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from quasiglobal.runs.store import Run
from quasiglobal.training.experiment import Experiment, group_by_seed
from quasiglobal.training.metrics import Ranking, number

NOT_CONVERGED = "⋆"
"""The paper's mark for a run that did not converge."""


@dataclass(frozen=True)
class Score:
    """Mean of a score over seeds, and standard deviation if there are several; by default an accuracy in per cent.

    >>> print(Score(82.2, 1.27))
    82.20 ± 1.27
    """

    mean: float
    std: float | None = None

    @classmethod
    def of(cls, values: Sequence[float]) -> Score:
        """Mean and standard deviation of at least one value."""
        return cls(statistics.mean(values), statistics.stdev(values) if len(values) > 1 else None)

    @classmethod
    def parse(cls, text: str) -> Score | None:
        """Parse a score of published.toml; None for a run that did not converge."""
        if text == NOT_CONVERGED:
            return None
        mean, _, std = text.partition(" ± ")
        return cls(float(mean), float(std) if std else None)

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed."""

    label: str
    """The settings that vary between all compared runs."""
    runs: Sequence[Run]
    score: Ranking
    named: bool = False
    """Whether to print the metric's name before the score."""

    @property
    def measured(self) -> tuple[Score | None, ...]:
        """Last test, best test, worst node and averaged model, mean and std over the seeds, in the records' units.

        None if it was not measured, or if a seed diverged.
        """
        lasts = [run.summary.last for run in self.runs if run.summary]
        bests = [run.summary.best for run in self.runs if run.summary]
        of = self.score.name
        found = ((lasts, of), (bests, of), (lasts, f"{of}_worst"), (lasts, f"{of}_averaged"))
        measured = ([value for test in tests if (value := number(test, name)) is not None] for tests, name in found)
        return tuple(None if self.diverged or not values else Score.of(values) for values in measured)

    @property
    def scores(self) -> tuple[str, ...]:
        """`measured` as text: mean ± std, or ⋆ if a seed diverged."""
        if self.diverged:
            return (NOT_CONVERGED,) * len(self.measured)
        last, *others = (self._shown(found) for found in self.measured)
        return f"{self.score.title} {last}" if self.named else last, *others

    def _shown(self, found: Score | None) -> str:
        if found is None:
            return "-"
        digits = ".2f" if self.score.percent else ".4g"
        return " ± ".join(f"{self.score.factor * x:{digits}}" for x in (found.mean, found.std) if x is not None)

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged."""
        return any(run.status == "diverged" for run in self.runs)

    @property
    def status(self) -> str:
        """The status of all runs."""
        return ", ".join(sorted({run.status for run in self.runs}))


def compared(runs: Sequence[Run], named: bool = False) -> list[Setting]:
    """The settings of the runs, similar experiments next to each other.

    The score has the metric's name before it if the runs have different scores, or with `named`.
    """
    groups = group_by_seed(runs, lambda run: run.experiment)
    named = named or len({run.ranking() for run in runs}) > 1
    return [
        Setting(label, group, group[0].ranking(), named)
        for label, group in sorted(groups.items(), key=lambda item: _order(item[1][0].experiment))
    ]


def _order(one: Experiment) -> tuple[object, ...]:
    """Sort key: similar experiments next to each other, numbers in numeric order."""
    learner = (one.data, one.model, one.norm or "", one.algorithm)
    return *learner, one.topology, one.partition, one.alpha, one.epochs, one.peak_lr
