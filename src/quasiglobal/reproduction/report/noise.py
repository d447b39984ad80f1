"""Noise of score differences: seed by seed if the sides share their partitions, otherwise Welch's test."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

LEVEL = 0.05
"""Significance level: how often scores with equal true means are called different."""

EXPLANATION = (
    "A difference is within the noise when it is at most t·√(s₁²/k₁ + s₂²/k₂), where s is the standard deviation over "
    "k seeds and t Student's 97.5 % quantile at Welch's degrees of freedom: scores that are the same in truth pass at "
    "least 19 times in 20. Three seeds each leave 2 to 4 degrees of freedom, so t is 4.3 to 2.8, not 2. A score of one "
    "seed, or one without a standard deviation, borrows that of the scores it is compared with; of fewer than three "
    "seeds the noise is so large that being within it says nothing. Our runs of the same seed share its partition of "
    "the data, so two methods of ours are compared on each seed that both have: s is the standard deviation of these k "
    "differences, and t has k − 1 degrees of freedom. Of one seed the noise is unknown."
)


@dataclass(frozen=True)
class Sample:
    """A mean over seeds, their standard deviation if known, and their number."""

    mean: float
    std: float | None
    seeds: int
    by_seed: Mapping[int, float] = field(default_factory=dict)
    """Score of each seed, if known."""
    partition: Hashable = None
    """Identifies the partitions that the seeds draw; None if unknown."""


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


def gap(terms: Sequence[tuple[float, Sample]]) -> Gap:
    """A weighted sum of scores with its noise, seed by seed where the scores share their partitions."""
    terms = paired(terms)
    return Gap(difference(terms), tolerance(terms))


def paired(terms: Sequence[tuple[float, Sample]]) -> list[tuple[float, Sample]]:
    """Terms of the same partition become one: their weighted sum on each seed that all of them have.

    >>> high = Sample(82.0, 2.0, 3, {0: 84.0, 1: 82.0, 2: 80.0}, "alpha = 0.1")
    >>> low = Sample(80.0, 2.0, 2, {0: 81.0, 1: 79.0}, "alpha = 0.1")
    >>> ((_, found),) = paired([(1, high), (-1, low)])
    >>> found.mean, found.std, found.seeds
    (3.0, 0.0, 2)
    """
    groups: dict[Hashable, list[tuple[float, Sample]]] = {}
    for k, (factor, sample) in enumerate(terms):
        groups.setdefault(k if sample.partition is None else (sample.partition,), []).append((factor, sample))
    found: list[tuple[float, Sample]] = []
    for group in groups.values():
        seeds = set.intersection(*(set(sample.by_seed) for _, sample in group))
        if len(group) == 1 or not seeds:
            found += group
            continue
        sums = [sum(factor * sample.by_seed[seed] for factor, sample in group) for seed in sorted(seeds)]
        std = statistics.stdev(sums) if len(sums) > 1 else None
        found.append((1.0, Sample(statistics.fmean(sums), std, len(sums))))
    return found


def difference(terms: Sequence[tuple[float, Sample]]) -> float:
    """A weighted sum of means, such as one minus another.

    >>> difference([(1, Sample(82.0, 1.0, 3)), (-1, Sample(77.5, 2.0, 3))])
    4.5
    """
    return sum(factor * sample.mean for factor, sample in terms)


def tolerance(terms: Sequence[tuple[float, Sample]]) -> float | None:
    """Largest weighted sum that chance explains if the true sum is 0; None if no standard deviation is known.

    >>> same = Sample(82.0, 1.0, 3)
    >>> round(tolerance([(1, same), (-1, same)]), 3)        # 4 degrees of freedom: t = 2.776
    2.267
    >>> round(tolerance([(1, Sample(80.0, None, 1)), (-1, same)]), 3)       # 2 degrees of freedom: t = 4.303
    4.968
    >>> tolerance([(1, Sample(74.9, None, 1)), (-1, Sample(75.0, None, 1))])
    """
    from scipy.special import stdtrit  # imported here: it would delay every other command by a third of a second

    known = [(sample.std, sample.seeds - 1) for _, sample in terms if sample.std is not None and sample.seeds > 1]
    if not known:
        return None
    borrowed = math.sqrt(sum(std**2 for std, _ in known) / len(known))
    variance, spread = 0.0, 0.0
    for factor, sample in terms:
        own = sample.std if sample.seeds > 1 else None
        part = factor**2 * (borrowed if own is None else own) ** 2 / sample.seeds
        variance += part
        spread += 0.0 if own is None else part**2 / (sample.seeds - 1)
    pooled = sum(seeds for _, seeds in known)                   # upper bound of Welch's, unless a std is borrowed
    freedom = min(pooled, variance**2 / spread) if spread else pooled
    return float(stdtrit(freedom, 1 - LEVEL / 2)) * math.sqrt(variance)
