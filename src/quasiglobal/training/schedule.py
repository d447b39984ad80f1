"""Learning rate schedule: warm-up, then decay at fractions of the run.

P. Goyal et al.: Accurate, large minibatch SGD: training ImageNet in 1 hour. 2017.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quasiglobal.errors import InputError


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

    def __post_init__(self) -> None:
        if not 0 < self.peak < float("inf"):
            raise InputError(f"lr must be > 0 and finite, got {self.peak}")
        if any(not 0 < fraction < 1 for fraction in self.milestones):
            raise InputError(f"milestones must be fractions of the run between 0 and 1, got {self.milestones}")

    def __call__(self, t: int) -> float:
        """The learning rate at step t = 1, 2, …"""
        done = t - 1
        if done < self.warmup_steps and self.peak > self.warmup_from:
            return self.warmup_from + (self.peak - self.warmup_from) * done / self.warmup_steps
        passed = sum(done >= _nearest(fraction * self.steps) for fraction in self.milestones)
        return self.peak * self.decay**passed


def _nearest(number: float) -> int:
    """Round to the nearest integer; halves round up, also if binary fractions make them a little less.

    >>> [_nearest(number) for number in (4.5, 5.5, 5.49, 0.29 * 50)]
    [5, 6, 5, 15]
    """
    return math.floor(round(number, 6) + 0.5)


def scaled_lr(batch: int, nodes: int, base: float = 0.1, base_batch: int = 64) -> float:
    """Scale the peak linearly with the global batch: 0.1 per 64 examples, so 0.8 for 16 nodes of batch 32.

    >>> scaled_lr(batch=32, nodes=16)
    0.8
    """
    return base / base_batch * batch * nodes
