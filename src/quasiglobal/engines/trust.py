"""Trust in neighbours: a neighbour's model counts less if it is too far from the node's own.

Self-centred clipping is due to L. He, S. P. Karimireddy, M. Jaggi: Byzantine-robust decentralized learning via
ClippedGossip. 2022. The radius here is taken from the other neighbours, so that it needs no tuning of its own.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quasiglobal.errors import InputError

SUGGESTED = 8.0
"""Measured ratio that lies exceed and honest runs do not (docs/deploy.md)."""

RECENT = 8
"""Number of remembered distances per neighbour, and of remembered local steps of the node."""

PART = 0.75
"""A node trusts any model within this share of its own distance from the start."""

LEAST = 1 / 8
"""Minimum pull of a clipped model, in local steps; with 1, a liar with the opposite sign could shrink a model."""

FAR = "its model is too far away"
REPEATED = "it sends the same model again and again"


class Trust:
    """One node's trust in its neighbours, by distances alone.

    The model of neighbour j counts in full up to the distance

        r_j = max(ratio · u_j, 3/4 of the node's own distance from the start),  where
        u_j = max(median of the other neighbours' recent distances, the node's own local steps since j's last model)

    The local steps (at most the last 8) and the node's own distance are floors that no neighbour can raise at will.
    Neighbours that start equal have distances of 0; those that were apart have moved as far as the node. Before there
    are recent distances, those of this exchange are used. With a single neighbour, its own recent distances are used,
    and at first, when there is nothing to compare with, the length of the node's own model / ratio. If the last models
    of most neighbours are outside their radius, the node itself was away: then these last distances are used.

    A model outside the radius is clipped to the distance u_j in its direction, and each further one in a row to half of
    the distance before, down to an eighth of a local step: a neighbour that is always outside has little effect, and
    honest nodes that were apart still attract each other. If models were clipped to r_j instead, a single lie would
    carry a node so far from the others that their distances, and with them the radius, grow for the next lie.

    Distances are remembered as at most r_j, so that a neighbour cannot widen the radius of another at will.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._recent: dict[int, deque[float]] = {}
        self._last: dict[int, float] = {}
        self._beyond: dict[int, int] = {}
        """Consecutive models of each neighbour outside its radius."""
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._missed: dict[int, int] = {}
        """Exchanges since the last model of each neighbour."""

    def shares(
        self, distances: Mapping[int, float], moved: float, length: float, travelled: float = 0.0
    ) -> dict[int, float]:
        """Return the share of x_j − x_i that counts for each neighbour j that sent its model: 1, or less if clipped.

        `moved` is the length of the node's own local step, `length` that of its model, `travelled` its distance from
        the model at the start.
        """
        self._steps.append(moved)
        self._missed = {j: missed + 1 for j, missed in self._missed.items()}
        self._last.update(distances)
        usual = {j: max(self._usual(j, self._recent, length), self._alone(j)) for j in distances}
        self._missed.update(dict.fromkeys(distances, 0))
        for j, distance in distances.items():
            beyond = distance > max(self.ratio * usual[j], PART * travelled)
            self._beyond[j] = self._beyond.get(j, 0) + 1 if beyond else 0
        if len(self._last) > 1 and 2 * sum(map(bool, self._beyond.values())) > len(self._last):
            last = {j: [distance] for j, distance in self._last.items()}
            usual = {j: max(usual[j], self._usual(j, last, length)) for j in distances}
        return {j: self._share(j, distance, usual[j], moved, PART * travelled) for j, distance in distances.items()}

    def _usual(self, j: int, known: Mapping[int, Sequence[float]], length: float) -> float:
        """The distance that is usual for the neighbours other than j."""
        others = [d for k, recent in known.items() if k != j for d in recent]
        others = others or [d for k, d in self._last.items() if k != j] or [*known.get(j, ())]
        return statistics.median(others) if others else length / self.ratio

    def _alone(self, j: int) -> float:
        """The length of the local steps since the last model of j."""
        return sum([*self._steps][-self._missed.get(j, 1) :])

    def _share(self, j: int, distance: float, usual: float, moved: float, floor: float) -> float:
        radius = max(self.ratio * usual, floor)
        self._recent.setdefault(j, deque(maxlen=RECENT)).append(min(distance, radius))
        if distance <= radius:
            self._beyond[j] = 0
            return 1.0
        return max(usual * 0.5 ** (self._beyond[j] - 1), min(usual, LEAST * moved)) / distance


class Guard:
    """Clips the messages of one node's neighbours, with a separate `Trust` for each tensor of each exchange and run.

    A model that a neighbour has sent before does not count: the model of an honest node changes. `report` is called
    with each neighbour that sent a model, and with the reason why it does not count in full, or "".
    """

    def __init__(self, ratio: float, report: Callable[[int, str], None]) -> None:
        self.ratio, self._report = ratio, report
        self._trust: dict[tuple[int, int, int], Trust] = {}
        self._averages: dict[tuple[int, int, int], Tensor] = {}
        """Models after the last average, at which the local step began."""
        self._starts: dict[tuple[int, int, int], Tensor] = {}
        """Models at the start, or else of the first exchange."""
        self._sums: dict[tuple[int, int, int, int], tuple[float, float]] = {}
        """Sum and length of each neighbour's last model."""

    def begin(self, models: Tensor) -> None:
        """Take these [runs, columns] as the models at the start: after a restart, the first exchange is later."""
        self._starts |= {(0, 0, run): row.double() for run, row in enumerate(models)}

    def leap(self) -> None:
        """Note that the model was replaced: the way there is no local step."""
        self._averages.clear()

    def clipped(
        self, exchange: int, own: Tensor, received: Mapping[int, Tensor], weights: Sequence[float]
    ) -> dict[int, Tensor]:
        """Return the clipped [tensors, runs, columns] of each neighbour; `weights` are theirs in the average."""
        result, why = dict(received), dict.fromkeys(received, "")
        for k, run in itertools.product(*map(range, own.shape[:2])):
            at, x = (exchange, k, run), own[k, run].double()
            sent = {j: rows[k, run].double() for j, rows in received.items()}
            distances = {j: float((v - x).norm()) for j, v in sent.items()}
            average = self._averages.get(at, x)
            trust = self._trust.setdefault(at, Trust(self.ratio))
            if at not in self._starts or self._starts[at].shape != x.shape:
                self._starts[at] = x
            travelled = float((x - self._starts[at]).norm())
            shares = trust.shares(distances, float((x - average).norm()), float(x.norm()), travelled)
            average = x.clone()
            for (j, v), weight in zip(sent.items(), weights, strict=True):
                sums = float(v.sum()), float(v.norm())
                repeated = self._sums.get((*at, j)) == sums and distances[j] > 0
                self._sums[*at, j] = sums
                share = 0.0 if repeated else shares[j]
                if share < 1:
                    why[j] = REPEATED if repeated else FAR
                    result[j] = received[j].clone() if result[j] is received[j] else result[j]
                    result[j][k, run] = torch.lerp(x, v, share).to(own)
                average.add_(v - x, alpha=weight * share)
            self._averages[at] = average
        for j, reason in why.items():
            self._report(j, reason)
        return result


def guard_of(ratio: float, hosted: Sequence[Sequence[int]], report: Callable[[int, str], None]) -> Guard | None:
    """Return the guard of a process; None if the ratio is infinite."""
    if math.isinf(ratio):
        return None
    if max(map(len, hosted)) > 1:
        nodes = sum(map(len, hosted))
        raise InputError(f"trust needs one node per process; start {nodes} processes, or leave it out")
    return Guard(ratio, report)
