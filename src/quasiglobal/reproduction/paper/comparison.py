"""Our numbers against the paper's: within the noise or not, and whether the methods come in the same order."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import ColumnLabel
from quasiglobal.reproduction.report.noise import Sample, difference, paired, tolerance
from quasiglobal.runs.comparison import Score
from quasiglobal.topology.parsing import count_nodes

PAPER_SEEDS = 3
"""Number of seeds behind each of the paper's means with a standard deviation."""

Verdict = Literal["holds", "within noise", "does not hold"]


@dataclass(frozen=True)
class Gap:
    """A difference and its noise, the size that chance explains; None if no standard deviation is known.

    A side that diverged has lost: the value is ±∞, or NaN if both sides diverged.
    """

    value: float
    noise: float | None

    @property
    def within(self) -> bool | None:
        """Whether chance explains the difference; never if one side diverged, None if the noise is unknown."""
        if math.isinf(self.value):
            return False
        return None if self.noise is None or math.isnan(self.value) else abs(self.value) <= self.noise


@dataclass(frozen=True)
class Order:
    """Rank of a method against the others of its column that both the paper and our runs have."""

    agreed: tuple[str, ...] = ()
    """Methods on the same side as in the paper."""
    unclear: tuple[str, ...] = ()
    """Methods on the other side, within the noise of our runs."""
    reversed: tuple[str, ...] = ()
    """Methods on the other side, beyond the noise of our runs."""

    @property
    def verdict(self) -> Verdict | None:
        """The worst result of all comparisons; None if there are none."""
        if self.reversed:
            return "does not hold"
        if self.unclear:
            return "within noise"
        return "holds" if self.agreed else None


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
    partition = one.data, one.partition, count_nodes(one.topology), one.alpha if one.uses_alpha else None
    return Sample(score.mean, score.std, len(outcome.runs), outcome.by_seed(), partition)


def gap(terms: Sequence[tuple[float, Sample]]) -> Gap:
    """A weighted sum of scores with its noise, seed by seed where the scores share their partitions."""
    terms = paired(terms)
    return Gap(difference(terms), tolerance(terms))


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
    found: Mapping[Verdict, list[str]] = {"holds": [], "within noise": [], "does not hold": []}
    for other in others:
        theirs = our_sample(other)
        if other is outcome or ours is None or theirs is None:
            continue
        in_paper = gap([(1, paper_sample(outcome.cell.score)), (-1, paper_sample(other.cell.score))])
        in_ours = gap([(1, ours), (-1, theirs)])
        if math.isnan(in_paper.value) or in_paper.value == 0:
            continue
        name = other.cell.row.method
        if in_ours.value * in_paper.value > 0:
            found["holds"].append(name)
        else:
            found["does not hold" if in_ours.within is False else "within noise"].append(name)
    return Order(tuple(found["holds"]), tuple(found["within noise"]), tuple(found["does not hold"]))
