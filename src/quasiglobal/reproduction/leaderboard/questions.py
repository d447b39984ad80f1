"""Questions that the leaderboard answers: differences between two of its numbers, with their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from quasiglobal.reproduction.leaderboard.standings import Placing, Standing
from quasiglobal.reproduction.report.noise import Sample, difference, paired, tolerance

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
        data = self.condition.removesuffix(", 30 % loss")                  # a seed draws one partition, lossy or not
        placing = self._placing(standings)
        return placing.sample(self.measure, f"{self.tier}, {data}") if placing else None

    def learns(self, standings: Mapping[str, Sequence[Standing]]) -> bool:
        """Whether a trial of its rates learnt something."""
        placing = self._placing(standings)
        return placing is None or placing.learns

    def diverges(self, standings: Mapping[str, Sequence[Standing]]) -> bool:
        """Whether there is no number since a seed diverged."""
        placing = self._placing(standings)
        return placing is not None and placing.diverged > 0

    def _placing(self, standings: Mapping[str, Sequence[Standing]]) -> Placing | None:
        found = (one.conditions.get(self.condition) for one in standings.get(self.tier, ()) if one.name == self.method)
        return next(found, None)


@dataclass(frozen=True)
class Contrast:
    """A question about the difference of two numbers."""

    says: str
    ours: Number
    other: Number

    def answer(self, standings: Mapping[str, Sequence[Standing]]) -> Answer | None:
        """The difference and its noise, seed by seed; None if a number is missing."""
        ours, other = self.ours.sample(standings), self.other.sample(standings)
        if other is not None and ours is None and self.ours.diverges(standings):
            return Answer(self.says, None, other.mean)
        if ours is None or other is None:
            return None
        terms = paired([(1.0, ours), (-1.0, other)])
        learns = self.ours.learns(standings) and self.other.learns(standings)
        return Answer(self.says, ours.mean, other.mean, difference(terms), tolerance(terms), learns)


@dataclass(frozen=True)
class Answer:
    """Two numbers in per cent, their difference, and the difference that chance explains; ours may have diverged."""

    says: str
    ours: float | None
    other: float
    difference: float = math.nan
    noise: float | None = None
    learns: bool = True

    @property
    def verdict(self) -> str:
        """Whether the difference is beyond the noise."""
        if self.ours is None:
            return "diverges"
        if not self.learns:
            return "not tuned: no rate learnt anything"
        if self.noise is None:
            return "noise unknown"
        beyond = abs(self.difference) > self.noise
        return ("higher" if self.difference > 0 else "lower") if beyond else "no difference beyond the noise"


def _loss(method: str, data: str) -> Contrast:
    with_loss = Number("digits", method, f"{data}, 30 % loss")
    return Contrast(f"{method}, {data}: 30 % loss against none", with_loss, Number("digits", method, data))


def _averaged(tier: str, method: str, condition: str) -> Contrast:
    says = f"{tier}, {condition}: {method}, averaged model against nodes"
    return Contrast(says, Number(tier, method, condition, "averaged"), Number(tier, method, condition))


def _tuned_with_merge(method: str) -> Contrast:
    merged, plain = (Number("digits", name, "sorted") for name in (f"{method} + merge", method))
    return Contrast(f"digits, sorted: {method}, tuned with the merge against without", merged, plain)


def _against(tier: str, condition: str, one: str, other: str) -> Contrast:
    ours, theirs = (Number(tier, name, condition) for name in (one, other))
    return Contrast(f"{tier}, {condition}: {one} against {other}", ours, theirs)


MERGED = ("dsgd", "dsgdm-n", "qg-dsgdm-n", "edm")
"""Methods with a row of their own for the final merge, in tier digits."""

ON_CIFAR = (*MERGED, "momentum-tracking", "decentlam", "gut", "lt-admm, momentum", "relaysgd, momentum")
"""Methods whose nodes may differ at the end of a run on CIFAR-10."""

BASE_OR_METHOD = (
    ("dsgd, base graph", "dsgd"), ("dsgdm-n, base graph", "dsgdm-n"), ("qg-dsgdm-n, base graph", "qg-dsgdm-n"),
    ("dsgd, base graph", "edm"), ("dsgdm-n, base graph", "edm"), ("qg-dsgdm-n, base graph", "edm"),
    ("dsgdm-n, base graph", "qg-dsgdm-n"), ("qg-dsgdm-n, base graph", "relaysgd, momentum"),
)
"""The same method on a ring, and better methods on a ring or a chain."""


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
    "What does the final merge give?": (
        *(one for name in MERGED for one in (_averaged("digits", name, "sorted"), _tuned_with_merge(name))),
        *(_averaged("cifar", name, condition) for condition in ("α = 0.1", "α = 0.01") for name in ON_CIFAR),
    ),
    "What does a Base-2 graph give, compared with a better method on a ring?": tuple(
        _against(tier, condition, one, other)
        for tier, conditions in (("digits", ("sorted", "α = 0.1")), ("cifar", ("α = 0.1", "α = 0.01")))
        for condition in conditions
        for one, other in BASE_OR_METHOD
    ),
}
"""The questions, and the differences that answer them."""


def answers(standings: Mapping[str, Sequence[Standing]]) -> dict[str, list[Answer]]:
    """The answers that the records give to each question."""
    return {
        question: [found for one in comparisons if (found := one.answer(standings))]
        for question, comparisons in QUESTIONS.items()
    }
