"""Claims of the paper as comparisons of cells, judged by the paper's own numbers and by ours.

A claim holds when every comparison agrees with it. It does not hold when a comparison contradicts it beyond the noise.
A claim that something makes no difference holds when the difference is within the noise. Comparisons of cells that were
not run are left out. A cell of which a seed diverged has lost its comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quasiglobal.reproduction.paper.comparison import Gap, Verdict, gap, our_sample, paper_sample
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import ColumnLabel, RowLabel, published
from quasiglobal.reproduction.report.noise import Sample

CellKey = tuple[str, RowLabel, ColumnLabel]
"""A cell: table, row, column."""

TIE = 1e-9
"""Smaller differences, in points, are rounding errors: equal scores do not count as above."""


@dataclass(frozen=True)
class Comparison:
    """A weighted sum of cells that should lie between two bounds; a lower bound of 0 excludes 0."""

    label: str
    terms: tuple[tuple[float, CellKey], ...]
    low: float = 0.0
    high: float = math.inf
    noise_allowed: bool = False
    """Whether the comparison also holds if a bound is exceeded by no more than the noise."""

    def judge(self, scores: Mapping[CellKey, Sample]) -> Judged | None:
        """Judge by the scores; None if one is missing. If a side diverged, only the sign counts."""
        if any(place not in scores for _, place in self.terms):
            return None
        found = gap([(factor, scores[place]) for factor, place in self.terms])
        if math.isnan(found.value) or (self.low == 0 and abs(found.value) < TIE):
            return Judged(self, found, "within noise")
        if math.isinf(found.value):
            expected = self.high > 0 if found.value > 0 else self.low < 0
            return Judged(self, found, "holds" if expected else "does not hold")
        beyond = max(self.low - found.value, found.value - self.high, 0.0)
        if beyond == 0:
            return Judged(self, found, "holds")
        if Gap(beyond, found.noise).within is not False:
            return Judged(self, found, "holds" if self.noise_allowed and found.noise is not None else "within noise")
        return Judged(self, found, "does not hold")


@dataclass(frozen=True)
class Judged:
    """A comparison with its result."""

    comparison: Comparison
    gap: Gap
    verdict: Verdict

    def __str__(self) -> str:
        if not math.isfinite(self.gap.value):
            sign = {math.inf: "+∞", -math.inf: "−∞"}.get(self.gap.value, "undefined")
            return f"{self.comparison.label}: {sign}, as not all converged"
        noise = "unknown" if self.gap.noise is None else f"±{self.gap.noise:.2f}"
        return f"{self.comparison.label}: {signed(self.gap.value)} (noise {noise})"


@dataclass(frozen=True)
class Claim:
    """A claim of the paper and the comparisons that decide it."""

    says: str
    where: str
    comparisons: tuple[Comparison, ...]

    def judge(self, scores: Mapping[CellKey, Sample]) -> list[Judged]:
        """Judge every comparison that has scores."""
        return [judged for one in self.comparisons if (judged := one.judge(scores)) is not None]


def verdict(judged: Sequence[Judged]) -> Verdict | None:
    """The worst verdict; None if nothing was judged."""
    worst: tuple[Verdict, ...] = ("does not hold", "within noise", "holds")
    return next((kind for kind in worst if any(one.verdict == kind for one in judged)), None)


def paper_scores() -> dict[CellKey, Sample]:
    """The paper's own numbers."""
    return {
        (name, row, column): paper_sample(score)
        for name, table in published().items()
        for (row, column), score in table.scores.items()
    }


def our_scores(found: Mapping[str, Iterable[Outcome]]) -> dict[CellKey, Sample]:
    """Our scores, from the outcomes of each table."""
    return {
        (name, outcome.cell.row, outcome.cell.column): sample
        for name, table in found.items()
        for outcome in table
        if (sample := our_sample(outcome)) is not None
    }


def signed(value: float) -> str:
    """Format a difference with sign and two decimals.

    >>> signed(-3.468), signed(0.5)
    ('−3.47', '+0.50')
    """
    return f"{value:+.2f}".replace("-", "−")


# ------------------------------------------------------------------------------------------------ comparisons


def above(table: str, high: str, *low: str, group: str | None = None) -> Iterator[Comparison]:
    """A method is above each of the others, for every model and column with both; `group` restricts the columns."""
    for model, column in settings_of(table):
        for other in low:
            if group in (None, column.group) and {high, other} <= methods_of(table, model, column):
                terms = (
                    (1.0, (table, RowLabel(high, model), column)), (-1.0, (table, RowLabel(other, model), column)),
                )
                yield Comparison(label(f"{high} − {other}", model, column), terms)


def models_above(table: str, high: str, low: str, setting: str | None = None) -> Iterator[Comparison]:
    """A model is above another, for every method and column with both; `setting` restricts the columns."""
    for model, column in settings_of(table):
        if model == high and setting in (None, column.setting):
            for method in sorted(methods_of(table, high, column) & methods_of(table, low, column)):
                terms = (
                    (1.0, (table, RowLabel(method, high), column)), (-1.0, (table, RowLabel(method, low), column)),
                )
                yield Comparison(label(f"{high} − {low}", method, column), terms)


def columns_above(table: str, high: ColumnLabel, low: ColumnLabel) -> Iterator[Comparison]:
    """A column is above another, in each row that has both."""
    scores = published()[table].scores
    for row in published()[table].rows:
        if (row, high) in scores and (row, low) in scores:
            yield Comparison(label(f"{high} − {low}", row), ((1.0, (table, row, high)), (-1.0, (table, row, low))))


def gain_above(table: str, method: str, base: str, high: ColumnLabel, low: ColumnLabel) -> Iterator[Comparison]:
    """A method's gain over `base` is larger in column `high` than in column `low`, for each model."""
    for model in dict.fromkeys(model for model, _ in settings_of(table)):
        if all({method, base} <= methods_of(table, model, column) for column in (high, low)):
            terms = tuple(
                (sign * side, (table, RowLabel(name, model), column))
                for side, column in ((1.0, high), (-1.0, low))
                for sign, name in ((1.0, method), (-1.0, base))
            )
            yield Comparison(label(f"gain of {method} over {base}", model, f"{high} less {low}"), terms)


def between(comparisons: Iterable[Comparison], low: float, high: float) -> Iterator[Comparison]:
    """The same comparisons with other bounds."""
    for one in comparisons:
        yield replace(one, low=low, high=high)


def not_clearly_above(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The first score of each comparison is not above the second by more than the noise."""
    for one in comparisons:
        yield replace(one, low=-math.inf, high=0.0, noise_allowed=True)


def settings_of(table: str) -> list[tuple[str, ColumnLabel]]:
    """All pairs of model and column in a table."""
    return list(dict.fromkeys((row.model, column) for row, column in published()[table].scores))


def methods_of(table: str, model: str, column: ColumnLabel) -> set[str]:
    """The paper's methods for a model in a column."""
    return {row.method for row, place in published()[table].scores if place == column and row.model == model}


def label(*parts: object) -> str:
    """Join the non-empty parts by commas."""
    return ", ".join(text for part in parts if (text := str(part)))
