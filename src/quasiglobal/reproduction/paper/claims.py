"""Claims of the paper as comparisons of cells, judged by the paper's own numbers and by ours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.algorithms.sgd import DSGDm
from quasiglobal.reproduction.paper.outcomes import Outcome, Verdict, our_sample, paper_sample, worst
from quasiglobal.reproduction.paper.tables import (
    TABLES,
    ColumnLabel,
    PaperCell,
    PaperTable,
    RowLabel,
    Scale,
    at_scale,
    published,
)
from quasiglobal.reproduction.report.noise import Gap, Sample, gap
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment, setting

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
    return worst({one.verdict for one in judged})


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


def claim(says: str, where: str, *comparisons: Iterable[Comparison]) -> Claim:
    """A claim that all of the comparisons decide."""
    return Claim(says, where, tuple(chain(*comparisons)))


def one_above(says: str, high: CellKey, low: CellKey) -> Comparison:
    """A cell is above another."""
    return Comparison(says, ((1.0, high), (-1.0, low)))


def above(table: str, high: str, *low: str, group: str | None = None) -> Iterator[Comparison]:
    """A method is above each of the others, for every model and column with both; `group` restricts the columns."""
    for model, column in settings_of(table):
        for other in low:
            if group in (None, column.group) and {high, other} <= methods_of(table, model, column):
                rows = RowLabel(high, model), RowLabel(other, model)
                yield one_above(label(f"{high} − {other}", model, column), *((table, row, column) for row in rows))


def models_above(table: str, high: str, low: str, setting: str | None = None) -> Iterator[Comparison]:
    """A model is above another, for every method and column with both; `setting` restricts the columns."""
    for model, column in settings_of(table):
        if model == high and setting in (None, column.setting):
            for method in sorted(methods_of(table, high, column) & methods_of(table, low, column)):
                rows = RowLabel(method, high), RowLabel(method, low)
                yield one_above(label(f"{high} − {low}", method, column), *((table, row, column) for row in rows))


def columns_above(table: str, high: ColumnLabel, low: ColumnLabel) -> Iterator[Comparison]:
    """A column is above another, in each row that has both."""
    scores = published()[table].scores
    for row in published()[table].rows:
        if (row, high) in scores and (row, low) in scores:
            yield one_above(label(f"{high} − {low}", row), (table, row, high), (table, row, low))


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


def not_clearly_above(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The first score of each comparison is not above the second by more than the noise."""
    return (replace(one, low=-math.inf, high=0.0, noise_allowed=True) for one in comparisons)


def settings_of(table: str) -> list[tuple[str, ColumnLabel]]:
    """All pairs of model and column in a table."""
    return list(dict.fromkeys((row.model, column) for row, column in published()[table].scores))


def methods_of(table: str, model: str, column: ColumnLabel) -> set[str]:
    """The paper's methods for a model in a column."""
    return {row.method for row, place in published()[table].scores if place == column and row.model == model}


def label(*parts: object) -> str:
    """Join the non-empty parts by commas."""
    return ", ".join(text for part in parts if (text := str(part)))


QG, LOCAL, PLAIN, CENTRAL = "QG-DSGDm-N", "DSGDm-N", "DSGD", "SGDm-N (centralized)"
RING, SOCIAL = "ring 16", "social 32"
EVERY_OTHER = tuple(
    row.method for row in published()["momentum-variants"].rows if row.method not in ("QG-DSGDm", QG, CENTRAL)
)
SYNCHRONIZED = ("DSGDm-N, momentum over the ring", "DSGDm-N, gradients over the ring")

CLAIMS: tuple[Claim, ...] = (
    claim(
        "Quasi-global momentum gains over all other methods at every degree of heterogeneity.",
        "Section 5.2, CIFAR-10",
        above("cifar10", QG, PLAIN, LOCAL),
    ),
    claim(
        "It gains more, the more heterogeneous the data are.",
        "Section 5.2, CIFAR-10",
        *(
            gain_above("cifar10", QG, LOCAL, ColumnLabel(more, graph), ColumnLabel(less, graph))
            for graph in (RING, SOCIAL)
            for more, less in (("α = 0.1", "α = 1"), ("α = 1", "α = 10"))
        ),
    ),
    claim(
        "The improvement in test accuracy is 1 to 20 points.",
        "Abstract",
        (replace(one, low=1, high=20) for one in above("cifar10", QG, LOCAL)),
    ),
    claim(
        "It gains over DSGDm-N on ImageNet-32 and ImageNet too.",
        "Section 5.2, ImageNet",
        above("imagenet", QG, LOCAL),
    ),
    claim(
        "ResNets with EvoNorm are above those with GN for all methods, degrees of heterogeneity and topologies.",
        "Section 5.2, CIFAR-10 and ImageNet",
        models_above("cifar10", "ResNet-EvoNorm-20", "ResNet-GN-20"),
        models_above("imagenet", "ImageNet-32, ResNet-20-x2 EvoNorm", "ImageNet-32, ResNet-20-x2 GN"),
        models_above("imagenet", "ImageNet, ResNet-18 EvoNorm", "ImageNet, ResNet-18 GN"),
    ),
    claim(
        "Batch normalization loses severely on heterogeneous data: at α = 0.1 it is below GN and EvoNorm.",
        "Sections 1 and 5.1, CIFAR-10",
        models_above("cifar10", "ResNet-GN-20", "ResNet-BN-20", setting="α = 0.1"),
        models_above("cifar10", "ResNet-EvoNorm-20", "ResNet-BN-20", setting="α = 0.1"),
    ),
    claim(
        "Local momentum accelerates: DSGDm and DSGDm-N are above DSGD.",
        "Section 5.2, ablation (2)",
        above("momentum-variants", "DSGDm", PLAIN),
        above("momentum-variants", LOCAL, PLAIN),
        above("cifar10", LOCAL, PLAIN),
    ),
    claim(
        "Heterogeneous data hinders local momentum: DSGDm-N gains less over DSGD at α = 0.1 than at α = 10.",
        "Section 1, first contribution; how to measure it is our reading",
        *(
            gain_above("cifar10", LOCAL, PLAIN, ColumnLabel("α = 10", graph), ColumnLabel("α = 0.1", graph))
            for graph in (RING, SOCIAL)
        ),
    ),
    claim(
        "A momentum buffer synchronized with all improves DSGDm-N.",
        "Section 1, momentum-variants",
        above("momentum-variants", "DSGDm-N, momentum over all", LOCAL),
    ),
    claim(
        "Synchronizing momentum or gradients over the ring improves DSGDm-N only marginally: not beyond the noise.",
        "Section 5.2, ablation (3)",
        *(not_clearly_above(above("momentum-variants", method, LOCAL)) for method in SYNCHRONIZED),
    ),
    claim(
        "Methods with quasi-global momentum surpass all others but the centralized one, without more communication.",
        "Section 5.2, ablation (1)",
        above("momentum-variants", "QG-DSGDm", *EVERY_OTHER),
        above("momentum-variants", QG, *EVERY_OTHER),
    ),
    claim(
        "DMSGD improves on DSGDm-N, and less than quasi-global momentum does.",
        "Section 5.2, ablation (4)",
        above("momentum-variants", "DMSGD", LOCAL),
        above("momentum-variants", QG, "DMSGD"),
    ),
    claim(
        "Quasi-global momentum is above D² and gradient tracking.",
        "Section 5.2, gradient-tracking",
        above("gradient-tracking", QG, "DSGD (GT)", "DSGDm-N (GT)", "D²", "D²₊"),
    ),
    claim(
        "Dividing by the learning rate of each step improves D² (D²₊).",
        "Section 5.2, gradient-tracking",
        above("gradient-tracking", "D²₊", "D²"),
    ),
    claim("QG-DAdam is preferable to DAdam.", "Section 5.2, adam", above("adam", "QG-DAdam", "DAdam")),
    claim(
        "Quasi-global momentum gains on a time-varying directed topology too.",
        "Section 5.2, imagenet-topologies",
        above("imagenet-topologies", QG, LOCAL, group="one-peer exponential 16"),
    ),
    claim("It gains on rings of any size.", "Section 5.2, ring-scales", above("ring-scales", QG, LOCAL)),
    claim(
        "Updating the buffer every τ > 1 steps brings no significant gain.",
        "Appendix, multi-step",
        *(not_clearly_above(above("multi-step", f"{QG}, τ = {tau}", f"{QG}, τ = 1")) for tau in (2, 3, 4)),
    ),
    claim(
        "On a single worker, too, quasi-global momentum is above ordinary momentum.",
        "Appendix, single-worker",
        above("single-worker", "QG-SGDm-N", "SGDm-N"),
        above("single-worker", "QG-SGDm", "SGDm"),
    ),
    claim(
        "Its gain on a single worker is larger where optimization is challenging: with GN than with BN.",
        "Appendix, single-worker",
        gain_above("single-worker", "QG-SGDm-N", "SGDm-N", ColumnLabel("GN"), ColumnLabel("BN")),
        gain_above("single-worker", "QG-SGDm", "SGDm", ColumnLabel("GN"), ColumnLabel("BN")),
    ),
    claim(
        "Nesterov momentum is in general above heavy-ball momentum on a single worker.",
        "Appendix, single-worker",
        above("single-worker", "SGDm-N", "SGDm"),
        above("single-worker", "QG-SGDm-N", "QG-SGDm"),
    ),
    claim(
        "Training without weight decay is detrimental.",
        "Appendix, weight-decay",
        *(
            columns_above("weight-decay", ColumnLabel("weight decay", norm), ColumnLabel("none", norm))
            for norm in ("BN", "GN")
        ),
    ),
    claim(
        "A gap to centralized training remains.",
        "Conclusion, CIFAR-10",
        (
            one_above(
                label(f"{CENTRAL} − {QG}", model, column),
                ("cifar10", RowLabel(CENTRAL, model), ColumnLabel("iid", column.group)),
                ("cifar10", RowLabel(QG, model), column),
            )
            for model, column in settings_of("cifar10")
            if QG in methods_of("cifar10", model, column)
        ),
    ),
)
"""The claims, roughly in the paper's order."""


# ------------------------------------------------------------------------------------------------ tuning the momentum

TUNING = "momentum-tuning"
"""Name for the cells of the paper's heat map, which is not one of its tables: DSGDm-N with other β."""


def momentum_tuning(store: RunStore, scale: Scale = "paper") -> PaperTable:
    """Cells of DSGDm-N with every other β in the store, on the ring of momentum-variants."""
    local = [cell for cell in TABLES["momentum-variants"].cells if cell.row == RowLabel(LOCAL)]
    settings = {setting(at_scale(cell.experiment, scale)) for cell in local}
    tried = {
        run.experiment.algorithm: beta
        for run in store.runs
        if (beta := _other_beta(run.experiment)) and setting(replace(run.experiment, algorithm="dsgdm-n")) in settings
    }
    cells = tuple(
        PaperCell(RowLabel(f"{LOCAL}, β = {beta:g}"), cell.column, replace(cell.experiment, algorithm=name), None)
        for name, beta in sorted(tried.items())
        for cell in local
    )
    return PaperTable(TUNING, "DSGDm-N with other momentum factors", cells)


def _other_beta(experiment: Experiment) -> float | None:
    """β of an experiment whose algorithm differs from the paper's dsgdm-n in β alone; otherwise None."""
    chosen, papers = experiment.resolved.algorithm, ALGORITHMS["dsgdm-n"]
    if not isinstance(chosen, DSGDm) or not isinstance(papers, DSGDm) or chosen.beta == papers.beta:
        return None
    return chosen.beta if replace(chosen, beta=papers.beta) == papers else None


def tuning_claim(table: PaperTable) -> Claim:
    """Claim that quasi-global momentum with β = 0.9 is above DSGDm-N with any other β."""
    comparisons = tuple(
        one_above(
            label(f"{QG} − {cell.row}", cell.column),
            ("momentum-variants", RowLabel(QG), cell.column), (TUNING, cell.row, cell.column),
        )
        for cell in table.cells
    )
    return Claim("Tuning the momentum factor of DSGDm-N does not bring it up to quasi-global momentum.",
                 "Appendix, figure of learning rate and β", comparisons)
