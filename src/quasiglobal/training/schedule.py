"""Learning rate schedules: the paper's warm-up and decay at fractions of the run, cosine, linear and constant.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. 2017.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quasiglobal.common.objects import is_own, recall
from quasiglobal.errors import InputError, unknown

if TYPE_CHECKING:
    from quasiglobal.training.experiment import Experiment


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up from `warmup_from` to the peak, updated at each step, then a factor `decay` at each milestone.

    As in the experiments behind the paper's tables: the warm-up is skipped unless the peak is above
    `warmup_from`, and a milestone is a fraction of all steps. Without milestones the rate is constant.

    >>> rate = Schedule(peak=0.8, steps=29400, warmup_steps=490)
    >>> [round(rate(t), 6) for t in (1, 246, 491, 14700, 14701, 22051)]
    [0.1, 0.45, 0.8, 0.8, 0.08, 0.008]
    """

    peak: float
    steps: int
    warmup_steps: int = 0
    warmup_from: float = 0.1
    milestones: tuple[float, ...] = (0.5, 0.75)
    decay: float = 0.1
    shape: str = "steps"
    """steps (decay at the milestones), cosine or linear (both to 0), or constant."""

    def __post_init__(self) -> None:
        if not 0 < self.peak < float("inf"):
            raise InputError(f"lr must be > 0 and finite, got {self.peak}")
        if any(not 0 < fraction < 1 for fraction in self.milestones):
            raise InputError(f"milestones must be fractions of the run between 0 and 1, got {self.milestones}")

    def __call__(self, t: int) -> float:
        """The learning rate at step t = 1, 2, …"""
        done = t - 1
        if self.shape == "constant":
            return self.peak
        if done < self.warmup_steps and self.peak > self.warmup_from:
            return self.warmup_from + (self.peak - self.warmup_from) * done / self.warmup_steps
        if self.shape != "steps":                           # from the peak at the end of the warm-up
            warm = self.warmup_steps if self.peak > self.warmup_from and self.warmup_steps < self.steps else 0
            return self.peak * SHAPES[self.shape]((done - warm) / (self.steps - warm))
        passed = sum(done >= nearest(fraction * self.steps) for fraction in self.milestones)
        return self.peak * self.decay**passed


SHAPES: dict[str, Callable[[float], float]] = {
    "constant": lambda done: 1.0,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    "linear": lambda done: 1 - done,
}
"""Factor of the peak by the fraction of the steps that are done."""


def check_schedule(name: str) -> None:
    """Raise InputError for the name of an unknown schedule."""
    if name not in SHAPES and name != "steps" and not is_own(name):
        raise unknown("schedule", name, [*SHAPES, "steps"])


def schedule_of(experiment: Experiment, steps_per_epoch: int) -> Callable[[int], float]:
    """The learning rate of an experiment as a function of the step t = 1, 2, …"""
    steps = steps_per_epoch * experiment.epochs
    if not is_own(experiment.schedule):
        return Schedule(
            peak=experiment.peak_lr,
            steps=steps,
            warmup_steps=round(experiment.warmup * steps_per_epoch),
            warmup_from=experiment.warmup_from,
            milestones=experiment.milestones,
            decay=experiment.decay,
            shape=experiment.schedule,
        )
    factor, by_step = recall(experiment.schedule, "schedule")

    def rate(t: int) -> float:
        what = f"lr({t})" if by_step else f"the schedule at {(t - 1) / steps:g} of the run"
        try:
            found = float(factor(t if by_step else (t - 1) / steps))
        except Exception as error:
            raise InputError(f"{what} fails: {type(error).__name__}: {error}; it has to return a number") from None
        value = found if by_step else experiment.peak_lr * found
        if not 0 < value < math.inf:
            raise InputError(f"{what} must be > 0 and finite, got {found}")
        return value

    for t in range(1, steps + 1):                           # all rates, before anything is written
        rate(t)
    return rate


def nearest(number: float) -> int:
    """Round to the nearest integer; halves round up, also if their binary fractions are a little less.

    >>> [nearest(number) for number in (4.5, 5.5, 5.49, 0.29 * 50)]
    [5, 6, 5, 15]
    """
    return math.floor(round(number, 6) + 0.5)


def scaled_lr(batch: int, nodes: int) -> float:
    """Scale the peak linearly with the global batch: 0.1 per 64 examples, so 0.8 for 16 nodes of batch 32.

    >>> scaled_lr(batch=32, nodes=16)
    0.8
    """
    return 0.1 / 64 * batch * nodes
