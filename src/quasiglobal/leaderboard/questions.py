"""Questions that the leaderboard answers: differences between two of its numbers, with their noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quasiglobal.leaderboard.standings import Standing
from quasiglobal.report.noise import Sample, difference, paired, tolerance

SEVERE = {"digits": "sorted", "cifar": "α = 0.01", "relay": "α = 0.01"}
"""The condition of each tier in which the nodes' data differ most."""


@dataclass(frozen=True)
class Number:
    """A number of the leaderboard."""

    tier: str
    method: str
    condition: str
    measure: str = "mean"

    def sample(self, standings: Mapping[str, Sequence[Standing]]) -> Sample | None:
        """The number; None if there is no record of it, or if it has no score."""
        for one in standings.get(self.tier, ()):
            if one.name == self.method and self.condition in one.conditions:
                data = self.condition.removesuffix(", 30 % loss")          # a seed draws one partition, lossy or not
                return one.conditions[self.condition].sample(self.measure, f"{self.tier}, {data}")
        return None


@dataclass(frozen=True)
class Contrast:
    """A question about the difference of two numbers."""

    says: str
    ours: Number
    other: Number

    def answer(self, standings: Mapping[str, Sequence[Standing]]) -> Answer | None:
        """The difference and its noise, seed by seed; None if a number is missing."""
        ours, other = self.ours.sample(standings), self.other.sample(standings)
        if ours is None or other is None:
            return None
        terms = paired([(1.0, ours), (-1.0, other)])
        return Answer(self.says, ours.mean, other.mean, difference(terms), tolerance(terms))


@dataclass(frozen=True)
class Answer:
    """Two numbers in per cent, their difference, and the difference that chance explains."""

    says: str
    ours: float
    other: float
    difference: float
    noise: float | None

    @property
    def verdict(self) -> str:
        """Whether the difference is beyond the noise."""
        if self.noise is None:
            return "noise unknown"
        beyond = abs(self.difference) > self.noise
        return ("higher" if self.difference > 0 else "lower") if beyond else "no difference beyond the noise"


def _loss(method: str, data: str) -> Contrast:
    with_loss = Number("digits", method, f"{data}, 30 % loss")
    return Contrast(f"{method}, {data}: 30 % loss against none", with_loss, Number("digits", method, data))


def _merge(method: str) -> tuple[Contrast, Contrast]:
    nodes = Number("digits", method, "sorted")
    return (
        Contrast(f"{method}, sorted: averaged model against nodes", Number(*_places(nodes), "averaged"), nodes),
        Contrast(f"{method}, sorted: tuned with the merge against without", _number(f"{method} + merge"), nodes),
    )


def _number(method: str, condition: str = "sorted") -> Number:
    return Number("digits", method, condition)


def _places(number: Number) -> tuple[str, str, str]:
    return number.tier, number.method, number.condition


QUESTIONS: dict[str, tuple[Contrast, ...]] = {
    "Does EDM on a lazy ring hold where the data differ most?": tuple(
        Contrast(
            f"{tier}, {condition}: edm against {other}, {words}",
            Number(tier, "edm", condition, measure), Number(tier, other, condition, measure),
        )
        for tier, condition in SEVERE.items()
        for measure, words in (("mean", "mean of nodes"), ("worst", "worst node"))
        for other in ("qg-dsgdm-n", "relaysgd, momentum")
    ),
    "Do running sums and LT-ADMM keep their accuracy under 30 % one-sided loss?": tuple(
        _loss(method, data)
        for method in (
            "push-diging, sums", "push-diging, sums, momentum", "lt-admm", "lt-admm, momentum", "qg-dsgdm-n",
            "push-diging", "edm", "dsgd-gt",
        )
        for data in ("sorted", "α = 0.1")
    ),
    "What does the final merge give?": tuple(
        one for method in ("dsgd", "dsgdm-n", "qg-dsgdm-n", "edm") for one in _merge(method)
    ),
    "What does a Base-2 graph give, compared with a better method on a ring?": tuple(
        Contrast(f"{data}: {one} against {other}", _number(one, data), _number(other, data))
        for data in ("sorted", "α = 0.1")
        for one, other in (
            ("dsgd, base graph", "dsgd"), ("dsgdm-n, base graph", "dsgdm-n"), ("qg-dsgdm-n, base graph", "qg-dsgdm-n"),
            ("dsgd, base graph", "edm"), ("dsgdm-n, base graph", "edm"), ("qg-dsgdm-n, base graph", "edm"),
        )
    ),
}
"""The questions, and the differences that answer them."""


def answers(standings: Mapping[str, Sequence[Standing]]) -> dict[str, list[Answer]]:
    """The answers that the records give to each question."""
    return {
        question: [found for one in comparisons if (found := one.answer(standings))]
        for question, comparisons in QUESTIONS.items()
    }
