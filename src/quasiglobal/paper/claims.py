"""What the paper says in words, each as comparisons of cells, judged by the paper's own numbers and by ours.

A claim holds when every comparison comes out as it says; it does not hold when one is the other way round beyond the
noise. A claim that something makes no difference holds when the difference is within the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quasiglobal.algorithms import with_option
from quasiglobal.paper.comparison import Gap, Verdict, gap, model_and_method, our_sample, paper_sample
from quasiglobal.paper.published import published
from quasiglobal.paper.reproduce import Outcome, setting
from quasiglobal.paper.tables import TABLES, Cell, Scale, Table, at_scale
from quasiglobal.report.noise import Sample
from quasiglobal.runs.local import find
from quasiglobal.training.experiment import Experiment

Place = tuple[str, str, str]
"""A cell: table, row, column."""

TIE = 1e-9
"""A smaller difference, in points, is one of rounding: what is as good is not above."""


@dataclass(frozen=True)
class Comparison:
    """A sum of cells with weights, which should lie between two bounds: above 0 where that is the lower one."""

    label: str
    terms: tuple[tuple[float, Place], ...]
    low: float = 0.0
    high: float = math.inf
    noise_allowed: bool = False
    """Whether the claim is of a difference that noise explains."""

    def judge(self, scores: Mapping[Place, Sample]) -> Judged | None:
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

    def judge(self, scores: Mapping[Place, Sample]) -> list[Judged]:
        """The comparisons for which there are scores."""
        return [judged for one in self.comparisons if (judged := one.judge(scores)) is not None]


def verdict(judged: Sequence[Judged]) -> Verdict | None:
    """The worst of them; None where there is none."""
    worst: tuple[Verdict, ...] = ("does not hold", "within noise", "holds")
    return next((kind for kind in worst if any(one.verdict == kind for one in judged)), None)


def paper_scores() -> dict[Place, Sample]:
    """The paper's own numbers."""
    return {
        (name, row, column): paper_sample(score)
        for name, table in published().items()
        for (row, column), score in table.scores.items()
    }


def our_scores(found: Mapping[str, Iterable[Outcome]]) -> dict[Place, Sample]:
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


def above(table: str, high: str, *low: str, model: str = "", column: str = "") -> Iterator[Comparison]:
    """A method is above others, for each model and in each column that has both (and whose name has the text given)."""
    for here, place in _settings(table):
        for other in low:
            if model in here and column in place and {high, other} <= _methods(table, here, place):
                terms = ((1.0, _place(table, here, high, place)), (-1.0, _place(table, here, other, place)))
                yield Comparison(_label(f"{high} − {other}", here, place), terms)


def models_above(table: str, high: str, low: str, column: str = "") -> Iterator[Comparison]:
    """A model is above another, with each method and in each column."""
    for here, place in _settings(table):
        if here == high and column in place:
            for method in sorted(_methods(table, high, place) & _methods(table, low, place)):
                terms = ((1.0, _place(table, high, method, place)), (-1.0, _place(table, low, method, place)))
                yield Comparison(_label(f"{high} − {low}", method, place), terms)


def columns_above(table: str, high: str, low: str) -> Iterator[Comparison]:
    """A column is above another, in each row that has both."""
    scores = published()[table].scores
    for row in published()[table].rows:
        if (row, high) in scores and (row, low) in scores:
            yield Comparison(_label(f"{high} − {low}", row), ((1.0, (table, row, high)), (-1.0, (table, row, low))))


def gain_above(table: str, method: str, base: str, high: str, low: str) -> Iterator[Comparison]:
    """A method gains more over another in one column than in a second, for each model."""
    for model in dict.fromkeys(model for model, _ in _settings(table)):
        if all({method, base} <= _methods(table, model, column) for column in (high, low)):
            terms = tuple(
                (sign * side, _place(table, model, name, column))
                for side, column in ((1.0, high), (-1.0, low))
                for sign, name in ((1.0, method), (-1.0, base))
            )
            yield Comparison(_label(f"gain of {method} over {base}", model, f"{high} less {low}"), terms)


def between(comparisons: Iterable[Comparison], low: float, high: float) -> Iterator[Comparison]:
    """The same differences, within bounds."""
    for one in comparisons:
        yield replace(one, low=low, high=high)


def not_clearly_above(comparisons: Iterable[Comparison]) -> Iterator[Comparison]:
    """The first of each two is not above the second by more than the noise."""
    for one in comparisons:
        yield replace(one, low=-math.inf, high=0.0, noise_allowed=True)


def _settings(table: str) -> list[tuple[str, str]]:
    """Each model and column of a table."""
    return list(dict.fromkeys((model_and_method(row)[0], column) for row, column in published()[table].scores))


def _methods(table: str, model: str, column: str) -> set[str]:
    rows = (row for row, place in published()[table].scores if place == column)
    return {method for here, method in map(model_and_method, rows) if here == model}


def _place(table: str, model: str, method: str, column: str) -> Place:
    return table, f"{model}: {method}" if model else method, column


def _label(*parts: str) -> str:
    return ", ".join(part for part in parts if part)


# ------------------------------------------------------------------------------------------------ tuning the momentum

TUNING = "momentum-tuning"
"""The cells of the paper's heat map, which is no table: DSGDm-N with other β."""


def momentum_tuning(root: Path, scale: Scale = "paper") -> Table:
    """DSGDm-N with every β that the store has, on the ring of momentum-variants."""
    local = [cell for cell in TABLES["momentum-variants"].cells if cell.row == "DSGDm-N"]
    settings = {setting(at_scale(cell.experiment, scale)) for cell in local}
    tried = [run.experiment for run in find(root) if run.experiment.algorithm.startswith("dsgdm-n:beta=")]
    names = {one.algorithm for one in tried if setting(_with_papers_beta(one)) in settings}
    cells = tuple(
        Cell(f"DSGDm-N, β = {name.partition('=')[2]}", cell.column, replace(cell.experiment, algorithm=name), None)
        for name in sorted(names)
        for cell in local
    )
    rows = tuple(dict.fromkeys(cell.row for cell in cells))
    return Table(TUNING, "DSGDm-N with other momentum factors", rows, tuple(cell.column for cell in local), cells)


def _with_papers_beta(experiment: Experiment) -> Experiment:
    """The same with β = 0.9, which is the default and so leaves no trace in the algorithm's name."""
    return replace(experiment, algorithm=with_option(experiment.algorithm, "beta", 0.9))


def tuning_claim(table: Table) -> Claim:
    """Quasi-global momentum with β = 0.9 is above DSGDm-N with any other."""
    comparisons = tuple(
        Comparison(
            _label(f"QG-DSGDm-N − {cell.row}", cell.column),
            ((1.0, ("momentum-variants", "QG-DSGDm-N", cell.column)), (-1.0, (TUNING, cell.row, cell.column))),
        )
        for cell in table.cells
    )
    return Claim("Tuning the momentum factor of DSGDm-N does not bring it up to quasi-global momentum.",
                 "Appendix, figure of learning rate and β", comparisons)


# ------------------------------------------------------------------------------------------------ the claims

QG, LOCAL, PLAIN, CENTRAL = "QG-DSGDm-N", "DSGDm-N", "DSGD", "SGDm-N (centralized)"
RING, SOCIAL = "ring 16, ", "social 32, "
EVERY_OTHER = tuple(
    row for row in published()["momentum-variants"].rows if row not in ("QG-DSGDm", QG, CENTRAL)
)
SYNCHRONIZED = ("DSGDm-N, momentum over the ring", "DSGDm-N, gradients over the ring")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Quasi-global momentum gains over all other methods at every degree of heterogeneity.",
        "Section 5.2, CIFAR-10",
        tuple(above("cifar10", QG, PLAIN, LOCAL)),
    ),
    Claim(
        "It gains more, the more heterogeneous the data are.",
        "Section 5.2, CIFAR-10",
        tuple(
            comparison
            for graph in (RING, SOCIAL)
            for more, less in (("α = 0.1", "α = 1"), ("α = 1", "α = 10"))
            for comparison in gain_above("cifar10", QG, LOCAL, graph + more, graph + less)
        ),
    ),
    Claim(
        "The improvement in test accuracy is 1 to 20 points.",
        "Abstract",
        tuple(between(above("cifar10", QG, LOCAL), 1, 20)),
    ),
    Claim(
        "It gains over DSGDm-N on ImageNet-32 and ImageNet too.",
        "Section 5.2, ImageNet",
        tuple(above("imagenet", QG, LOCAL)),
    ),
    Claim(
        "ResNets with EvoNorm are above those with GN for all methods, degrees of heterogeneity and topologies.",
        "Section 5.2, CIFAR-10 and ImageNet",
        (
            *models_above("cifar10", "ResNet-EvoNorm-20", "ResNet-GN-20"),
            *models_above("imagenet", "ImageNet-32, ResNet-20-x2 EvoNorm", "ImageNet-32, ResNet-20-x2 GN"),
            *models_above("imagenet", "ImageNet, ResNet-18 EvoNorm", "ImageNet, ResNet-18 GN"),
        ),
    ),
    Claim(
        "Batch normalization loses severely on heterogeneous data: at α = 0.1 it is below GN and EvoNorm.",
        "Sections 1 and 5.1, CIFAR-10",
        tuple(
            comparison
            for other in ("ResNet-GN-20", "ResNet-EvoNorm-20")
            for comparison in models_above("cifar10", other, "ResNet-BN-20", column="α = 0.1")
        ),
    ),
    Claim(
        "Local momentum accelerates: DSGDm and DSGDm-N are above DSGD.",
        "Section 5.2, ablation (2)",
        (
            *above("momentum-variants", "DSGDm", PLAIN),
            *above("momentum-variants", LOCAL, PLAIN),
            *above("cifar10", LOCAL, PLAIN),
        ),
    ),
    Claim(
        "Heterogeneous data hinders local momentum: DSGDm-N gains less over DSGD at α = 0.1 than at α = 10.",
        "Section 1, first contribution; how to measure it is our reading",
        tuple(
            comparison
            for graph in (RING, SOCIAL)
            for comparison in gain_above("cifar10", LOCAL, PLAIN, f"{graph}α = 10", f"{graph}α = 0.1")
        ),
    ),
    Claim(
        "A momentum buffer synchronized with all improves DSGDm-N.",
        "Section 1, momentum-variants",
        tuple(above("momentum-variants", "DSGDm-N, momentum over all", LOCAL)),
    ),
    Claim(
        "Synchronizing momentum or gradients over the ring improves DSGDm-N only marginally: not beyond the noise.",
        "Section 5.2, ablation (3)",
        tuple(
            comparison
            for method in SYNCHRONIZED
            for comparison in not_clearly_above(above("momentum-variants", method, LOCAL))
        ),
    ),
    Claim(
        "Methods with quasi-global momentum surpass all others but the centralized one, without more communication.",
        "Section 5.2, ablation (1)",
        tuple(
            comparison
            for method in ("QG-DSGDm", QG)
            for comparison in above("momentum-variants", method, *EVERY_OTHER)
        ),
    ),
    Claim(
        "DMSGD improves on DSGDm-N, and less than quasi-global momentum does.",
        "Section 5.2, ablation (4)",
        (*above("momentum-variants", "DMSGD", LOCAL), *above("momentum-variants", QG, "DMSGD")),
    ),
    Claim(
        "Quasi-global momentum is above D² and gradient tracking.",
        "Section 5.2, gradient-tracking",
        tuple(above("gradient-tracking", QG, "DSGD (GT)", "DSGDm-N (GT)", "D²", "D²₊")),
    ),
    Claim(
        "Dividing by the learning rate of each step improves D² (D²₊).",
        "Section 5.2, gradient-tracking",
        tuple(above("gradient-tracking", "D²₊", "D²")),
    ),
    Claim(
        "QG-DAdam is preferable to DAdam.",
        "Section 5.2, adam",
        tuple(above("adam", "QG-DAdam", "DAdam")),
    ),
    Claim(
        "Quasi-global momentum gains on a time-varying directed topology too.",
        "Section 5.2, imagenet-topologies",
        tuple(above("imagenet-topologies", QG, LOCAL, column="one-peer")),
    ),
    Claim(
        "It gains on rings of any size.",
        "Section 5.2, ring-scales",
        tuple(above("ring-scales", QG, LOCAL)),
    ),
    Claim(
        "Updating the buffer every τ > 1 steps brings no significant gain.",
        "Appendix, multi-step",
        tuple(
            comparison
            for tau in (2, 3, 4)
            for comparison in not_clearly_above(above("multi-step", f"{QG}, τ = {tau}", f"{QG}, τ = 1"))
        ),
    ),
    Claim(
        "On a single worker, too, quasi-global momentum is above ordinary momentum.",
        "Appendix, single-worker",
        (*above("single-worker", "QG-SGDm-N", "SGDm-N"), *above("single-worker", "QG-SGDm", "SGDm")),
    ),
    Claim(
        "Its gain on a single worker is larger where optimization is challenging: with GN than with BN.",
        "Appendix, single-worker",
        (
            *gain_above("single-worker", "QG-SGDm-N", "SGDm-N", "GN", "BN"),
            *gain_above("single-worker", "QG-SGDm", "SGDm", "GN", "BN"),
        ),
    ),
    Claim(
        "Nesterov momentum is in general above heavy-ball momentum on a single worker.",
        "Appendix, single-worker",
        (*above("single-worker", "SGDm-N", "SGDm"), *above("single-worker", "QG-SGDm-N", "QG-SGDm")),
    ),
    Claim(
        "Training without weight decay is detrimental.",
        "Appendix, weight-decay",
        tuple(
            comparison
            for norm in ("BN", "GN")
            for comparison in columns_above("weight-decay", f"{norm}, weight decay", f"{norm}, none")
        ),
    ),
    Claim(
        "A gap to centralized training remains.",
        "Conclusion, CIFAR-10",
        tuple(
            Comparison(
                _label(f"{CENTRAL} − {QG}", model, column),
                (
                    (1.0, _place("cifar10", model, CENTRAL, f"{column.partition(', ')[0]}, iid")),
                    (-1.0, _place("cifar10", model, QG, column)),
                ),
            )
            for model, column in _settings("cifar10")
            if QG in _methods("cifar10", model, column)
        ),
    ),
)
"""In the paper's order, as nearly as tables allow."""

