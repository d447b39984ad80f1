"""What the paper says in words, each as comparisons of cells, judged by the paper's own numbers and by ours.

A claim holds when every comparison comes out as it says; it does not hold when one is the other way round beyond the
noise. A claim that something makes no difference holds when the difference is within the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from quasiglobal.paper.comparison import Gap, Verdict, gap, our_sample, paper_sample
from quasiglobal.paper.outcomes import Outcome
from quasiglobal.paper.published import ColumnLabel, RowLabel, published
from quasiglobal.report.noise import Sample

CellKey = tuple[str, RowLabel, ColumnLabel]
"""A cell: table, row, column."""

TIE = 1e-9
"""A smaller difference, in points, is one of rounding: what is as good is not above."""


@dataclass(frozen=True)
class Comparison:
    """A sum of cells with weights, which should lie between two bounds: above 0 where that is the lower one."""

    label: str
    terms: tuple[tuple[float, CellKey], ...]
    low: float = 0.0
    high: float = math.inf
    noise_allowed: bool = False
    """Whether the claim is of a difference that noise explains."""

    def judge(self, scores: Mapping[CellKey, Sample]) -> Judged | None:
        """What the scores say; None where one is missing, or two that did not converge are compared."""
        if any(place not in scores for _, place in self.terms):
            return None
        found = gap([(factor, scores[place]) for factor, place in self.terms])
        if found is None or (math.isinf(found.value) and (len(self.terms) > 2 or self.low != 0)):
            return None
        if self.low == 0 and abs(found.value) < TIE:
            return Judged(self, found, "within noise")
        beyond = max(self.low - found.value, found.value - self.high, 0.0)
        if beyond == 0:
            return Judged(self, found, "holds")
        if Gap(beyond, found.noise).within is not False:
            return Judged(self, found, "holds" if self.noise_allowed and found.noise is not None else "within noise")
        return Judged(self, found, "does not hold")


@dataclass(frozen=True)
class Judged:
    """A comparison with what came out."""

    comparison: Comparison
    gap: Gap
    verdict: Verdict

    def __str__(self) -> str:
        if math.isinf(self.gap.value):
            return f"{self.comparison.label}: {'the latter' if self.gap.value > 0 else 'the former'} did not converge"
        noise = "" if self.gap.noise is None else f" (noise ±{self.gap.noise:.2f})"
        return f"{self.comparison.label}: {signed(self.gap.value)}{noise}"


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper's, and the comparisons that it stands or falls with."""

    says: str
    where: str
    comparisons: tuple[Comparison, ...]

    def judge(self, scores: Mapping[CellKey, Sample]) -> list[Judged]:
        """The comparisons for which there are scores."""
        return [judged for one in self.comparisons if (judged := one.judge(scores)) is not None]


def verdict(judged: Sequence[Judged]) -> Verdict | None:
    """The worst of them; None where there is none."""
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
    """Ours, from the outcomes of each table."""
    return {
        (name, outcome.cell.row, outcome.cell.column): sample
        for name, table in found.items()
        for outcome in table
        if (sample := our_sample(outcome)) is not None
    }


def signed(value: float) -> str:
    """A difference for readers.

    >>> signed(-3.468), signed(0.5)
    ('−3.47', '+0.50')
    """
    return f"{value:+.2f}".replace("-", "−")


# ------------------------------------------------------------------------------------------------ comparisons


def above(table: str, high: str, *low: str, group: str | None = None) -> Iterator[Comparison]:
    """A method is above others, for each model and in each column that has both (of a group of columns, if given)."""
    for model, column in settings_of(table):
        for other in low:
            if group in (None, column.group) and {high, other} <= methods_of(table, model, column):
                terms = (
                    (1.0, (table, RowLabel(high, model), column)), (-1.0, (table, RowLabel(other, model), column)),
                )
                yield Comparison(label(f"{high} − {other}", model, column), terms)


def models_above(table: str, high: str, low: str, setting: str | None = None) -> Iterator[Comparison]:
    """A model is above another, with each method and in each column (of a setting, if given)."""
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
    """A method gains more over another in one column than in a second, for each model."""
    for model in dict.fromkeys(model for model, _ in settings_of(table)):
        if all({method, base} <= methods_of(table, model, column) for column in (high, low)):
            terms = tuple(
                (sign * side, (table, RowLabel(name, model), column))
                for side, column in ((1.0, high), (-1.0, low))
                for sign, name in ((1.0, method), (-1.0, base))
            )
            yield Comparison(label(f"gain of {method} over {base}", model, f"{high} less {low}"), terms)


def between(comparisons: Iterable[Comparison], low: float, high: float) -> Iterator[Comparison]:
    """The same differences, within bounds."""
    for one in comparisons:
        yield replace(one, low=low, high=high)


def not_clearly_above(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The first of each two is not above the second by more than the noise."""
    for one in comparisons:
        yield replace(one, low=-math.inf, high=0.0, noise_allowed=True)


def settings_of(table: str) -> list[tuple[str, ColumnLabel]]:
    """Each model and column of a table."""
    return list(dict.fromkeys((row.model, column) for row, column in published()[table].scores))


def methods_of(table: str, model: str, column: ColumnLabel) -> set[str]:
    """The methods that the paper has of a model in a column."""
    return {row.method for row, place in published()[table].scores if place == column and row.model == model}


def label(*parts: object) -> str:
    """The parts that are not empty, in words."""
    return ", ".join(text for part in parts if (text := str(part)))
