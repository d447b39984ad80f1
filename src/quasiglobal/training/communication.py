"""Schedules of communication: averages over all nodes in some parts of a run, in addition to the topology.

T. Zhu, T. Zhang, M. Wang, Z. Zhou, C. Wang: On the surprising effectiveness of a single global merging in
decentralized learning. ICLR 2026.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from functools import reduce

from quasiglobal.algorithms import Algorithm
from quasiglobal.algorithms.centralized import CompleteWindow
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.simulator import NO_MEAN
from quasiglobal.errors import InputError
from quasiglobal.training.schedule import nearest

MERGE = "merge@end"
NUMBER = r"\d+\.?\d*|\.\d+"


@dataclass(frozen=True)
class Communication:
    """Windows of full communication as fractions of the run, and whether the models are merged at its end."""

    windows: tuple[tuple[float, float], ...] = ()
    merges: bool = False

    def steps(self, total: int) -> list[tuple[int, int]]:
        """The first and last step of each window in a run of this many steps.

        >>> Communication(windows=((0.9, 1.0),)).steps(200)
        [(181, 200)]
        """
        ends = [(nearest(first * total) + 1, nearest(last * total)) for first, last in self.windows]
        return [(first, last) for first, last in ends if first <= last]

    def check(self, algorithm: Algorithm, name: str, faults: bool) -> None:
        """Raise InputError if the algorithm of this name cannot average over all nodes in some steps."""
        if not self.windows:
            return
        sent, why = traffic(algorithm), ""
        if algorithm.needs.lambda_min_above is not None:
            name, why = type(algorithm).__name__, "needs a fixed W"
        elif sent.per_edge:
            why = "has messages per edge"
        elif sent.told:
            why = "keeps sums of what its neighbours sent"
        elif sent.sometimes:
            why = "draws the steps at which it averages"
        if why:
            raise InputError(f"{name} {why}; leave out the windows of full communication")
        if faults:                                          # now, not at the first mean
            raise InputError(NO_MEAN)

    def around(self, algorithm: Algorithm, total: int) -> Algorithm:
        """The algorithm with these windows in a run of this many steps."""
        windows = self.steps(total)
        if len(windows) < len(self.windows):
            warnings.warn(f"a window of full communication has no step in a run of {total}; widen it", stacklevel=3)
        return reduce(lambda base, ends: CompleteWindow(base=base, first=ends[0], last=ends[1]), windows, algorithm)


def communication_of(text: str) -> Communication:
    """Parse a schedule of communication: merge@end, complete@0.9-1.0, or several of them with commas.

    >>> communication_of("complete@0.5-0.6,merge@end")
    Communication(windows=((0.5, 0.6),), merges=True)
    """
    windows, merges = [], False
    for part in filter(None, text.split(",")):
        window = re.fullmatch(rf"complete@({NUMBER})-({NUMBER})", part)
        if part == MERGE:
            merges = True
        elif window is None or not 0 <= (first := float(window[1])) < (last := float(window[2])) <= 1:
            raise InputError(
                f"communication is {MERGE}, or complete@FROM-TO with fractions of the run 0 <= FROM < TO <= 1, "
                f"such as complete@0.9-1.0, got {part!r}"
            )
        else:
            windows.append((first, last))
    return Communication(tuple(windows), merges)
