"""Our numbers against the paper's: within the noise or not, and whether the methods come in the same order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quasiglobal.paper.outcomes import Outcome
from quasiglobal.paper.published import ColumnLabel, Score
from quasiglobal.report.noise import Sample, difference, tolerance

PAPER_SEEDS = 3
"""Over which the paper's means are, where they have a std."""

Verdict = Literal["holds", "within noise", "does not hold"]


@dataclass(frozen=True)
class Gap:
    """A difference, and how large it may be by chance; None where no standard deviation is known."""

    value: float
    noise: float | None

    @property
    def within(self) -> bool | None:
        """Whether chance explains it; it does not where one side diverged, however few the seeds."""
        if math.isinf(self.value):
            return False
        return None if self.noise is None else abs(self.value) <= self.noise


@dataclass(frozen=True)
class Order:
    """How a method compares with the others of its column, as far as both the paper and we have them."""

    agreed: tuple[str, ...] = ()
    """The methods that are on the side where the paper has them."""
    unclear: tuple[str, ...] = ()
    """Those on the other side, by no more than the noise of our runs."""
    reversed: tuple[str, ...] = ()
    """Those on the other side, beyond it."""

    @property
    def verdict(self) -> Verdict | None:
        """None where there is nobody to compare with."""
        if self.reversed:
            return "does not hold"
        if self.unclear:
            return "within noise"
        return "holds" if self.agreed else None


def paper_sample(score: Score | None) -> Sample:
    """The paper's number; what did not converge is below any other."""
    if score is None:
        return Sample(-math.inf, None, 1)
    return Sample(score.mean, score.std, 1 if score.std is None else PAPER_SEEDS)


def our_sample(outcome: Outcome) -> Sample | None:
    """Ours after the last epoch, None where nothing was run; what diverged is below any other."""
    if outcome.diverged:
        return Sample(-math.inf, None, len(outcome.runs))
    score = outcome.ours()
    return None if score is None else Sample(score.mean, score.std, len(outcome.runs))


def gap(terms: Sequence[tuple[float, Sample]]) -> Gap | None:
    """A weighted sum of scores with its noise; None between two that did not converge."""
    value = difference(terms)
    return None if math.isnan(value) else Gap(value, tolerance(terms))


def to_paper(outcome: Outcome) -> Gap | None:
    """Ours less the paper's, where both converged."""
    ours, paper = our_sample(outcome), paper_sample(outcome.cell.score)
    if ours is None or math.isinf(ours.mean) or math.isinf(paper.mean):
        return None
    return gap([(1, ours), (-1, paper)])


def by_model_and_column(outcomes: Iterable[Outcome]) -> dict[tuple[str, ColumnLabel], list[Outcome]]:
    """The methods of each model in each column: what the paper puts into an order."""
    groups: dict[tuple[str, ColumnLabel], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.cell.row.model, outcome.cell.column), []).append(outcome)
    return groups


def order(outcome: Outcome, others: Iterable[Outcome]) -> Order:
    """Where a method stands among others, by us and by the paper."""
    ours = our_sample(outcome)
    found: Mapping[Verdict, list[str]] = {"holds": [], "within noise": [], "does not hold": []}
    for other in others:
        theirs = our_sample(other)
        if other is outcome or ours is None or theirs is None:
            continue
        in_paper = gap([(1, paper_sample(outcome.cell.score)), (-1, paper_sample(other.cell.score))])
        in_ours = gap([(1, ours), (-1, theirs)])
        if in_paper is None or in_paper.value == 0:
            continue
        name = other.cell.row.method
        if in_ours is None:
            found["within noise"].append(name)
        elif in_ours.value * in_paper.value > 0:
            found["holds"].append(name)
        else:
            found["does not hold" if in_ours.within is False else "within noise"].append(name)
    return Order(tuple(found["holds"]), tuple(found["within noise"]), tuple(found["does not hold"]))
