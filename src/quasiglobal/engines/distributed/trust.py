"""Trust in neighbours: how far the model of a neighbour may be from a node's own before it counts less.

Self-centred clipping is due to L. He, S. P. Karimireddy, M. Jaggi: Byzantine-robust decentralized learning via
ClippedGossip. 2022. The radius here is taken from the other neighbours, so that it needs no tuning of its own.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from quasiglobal.errors import InputError

SUGGESTED = 8.0
"""A ratio for runs without absences, by measurement; no default, since honest nodes may be clipped after one."""

RECENT = 8
"""Distances that are remembered of each neighbour."""


class Trust:
    """One node's trust in its neighbours. It sees distances alone.

    The model x_j of a neighbour counts as x_i + (x_j − x_i) · min(1, r_j/‖x_j − x_i‖), where

        r_j = ratio · max(median of the other neighbours' recent distances, the node's own local step)

    A distance beyond r_j is remembered as r_j, so that a neighbour that lies cannot widen the radius of another at
    will. The local step is the floor: neighbours that start equal, or have equal data, have distances of 0. Before
    there are recent distances, those of this exchange serve. With a single neighbour its own recent ones serve, and
    at first, when there is nothing to compare with, the length of the node's own model.

    If the last models of most neighbours are beyond, the node itself was away: these last distances then serve.

    Further messages in a row that are beyond the radius count for half of the last one, down to the node's own local
    step. So a neighbour that is always beyond has little effect, and two honest ones that were apart meet again.
    """

    floor = 1.0
    most = True
    gaps = 8

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._recent: dict[int, deque[float]] = {}
        self._last: dict[int, float] = {}
        self._in_a_row: dict[int, int] = {}
        self._since = {}

    def shares(self, distances: Mapping[int, float], moved: float, length: float) -> dict[int, float]:
        """Return the share of x_j − x_i that counts for each neighbour j that sent its model: 1, or less if clipped.

        `moved` is the length of the node's own local step, `length` that of its model.
        """
        for j in self._since:
            self._since[j].append(moved)
        self._last.update(distances)
        alone = {j: sum(self._since.get(j, (moved,))) for j in distances}
        if not self.gaps: alone = dict.fromkeys(distances, moved)
        for j in distances:
            self._since[j] = deque(maxlen=self.gaps or 1)
        radius = {j: self.ratio * max(self._usual(j, self._recent, length), alone[j]) for j in distances}
        for j, distance in distances.items():
            self._in_a_row[j] = self._in_a_row.get(j, 0) + 1 if distance > radius[j] else 0
        if self.most and len(self._last) > 1 and 2 * sum(map(bool, self._in_a_row.values())) > len(self._last):
            last = {j: [distance] for j, distance in self._last.items()}
            radius = {j: max(radius[j], self.ratio * self._usual(j, last, length)) for j in distances}
        shares = {}
        for j, distance in distances.items():
            if distance <= radius[j]:
                shares[j], self._in_a_row[j] = 1.0, 0
            else:
                n = max(self._in_a_row[j], 1)
                shares[j] = max(radius[j] * 0.5 ** (n - 1), min(radius[j], self.floor * moved)) / distance
            self._recent.setdefault(j, deque(maxlen=RECENT)).append(min(distance, radius[j]))
        return shares

    def _usual(self, j: int, known: Mapping[int, Sequence[float]], length: float) -> float:
        """The distance that is usual for the neighbours other than j."""
        others = [d for k, recent in known.items() if k != j for d in recent]
        others = others or [d for k, d in self._last.items() if k != j] or [*known.get(j, ())]
        return statistics.median(others) if others else length / self.ratio


class Guard:
    """Clips what the neighbours of one node send, each tensor of each exchange and run by a `Trust` of its own.

    `report` is called with each neighbour that was clipped in an exchange.
    """

    def __init__(self, ratio: float, report: Callable[[int], None]) -> None:
        self.ratio, self._report = ratio, report
        self._trust: dict[tuple[int, int, int], Trust] = {}
        self._averages: dict[tuple[int, int, int], Tensor] = {}
        self._signatures = {}
        """From these the next local step begins."""

    def clipped(
        self, exchange: int, own: Tensor, received: Mapping[int, Tensor], weights: Sequence[float]
    ) -> dict[int, Tensor]:
        """Return what counts of the [tensors, runs, columns] of each neighbour, which enters the average by its weight.
        """
        result = dict(received)
        for k, run in torch.cartesian_prod(*map(torch.arange, own.shape[:2])).tolist():
            x, at = own[k, run].double(), (exchange, k, run)
            away = {j: sent[k, run].double() - x for j, sent in received.items()}
            moved = float((x - self._averages.get(at, x)).norm())
            trust = self._trust.setdefault(at, Trust(self.ratio))
            shares = trust.shares({j: float(v.norm()) for j, v in away.items()}, moved, float(x.norm()))
            for j, sent in received.items():
                v = sent[k, run].double()
                signature = float(v.sum()), float(v.norm())
                if self._signatures.get((at, j)) == signature and away[j].any():
                    shares[j] = 0.0
                self._signatures[at, j] = signature
            for (j, share), weight in zip(shares.items(), weights, strict=True):
                if share < 1:
                    result[j] = received[j].clone() if result[j] is received[j] else result[j]
                    result[j][k, run] = (x + away[j] * share).to(own)
                x = x.add(away[j], alpha=weight * share)
            self._averages[at] = x
        for j in received:
            if result[j] is not received[j]:
                self._report(j)
        return result


def guard_of(ratio: float, hosted: Sequence[Sequence[int]], report: Callable[[int], None]) -> Guard | None:
    """Return the guard of a process; None if the ratio is infinite."""
    if math.isinf(ratio):
        return None
    if max(map(len, hosted)) > 1:
        raise InputError(
            f"trust needs one node per process; start {sum(map(len, hosted))} processes, or leave it out"
        )
    return Guard(ratio, report)
