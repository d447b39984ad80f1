"""Trust in neighbours: how far the model of a neighbour may be from a node's own before it counts less.

Self-centred clipping is due to L. He, S. P. Karimireddy, M. Jaggi: Byzantine-robust decentralized learning via
ClippedGossip. 2022. The radius here is taken from the other neighbours, so that it needs no tuning of its own.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from torch import Tensor

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

    Further messages in a row that are beyond the radius count for half of the last one. So a neighbour that is always
    beyond moves the node by at most 2 r_j in total, and not by r_j at every step.
    """

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self._recent: dict[int, deque[float]] = {}
        self._in_a_row: dict[int, int] = {}

    def shares(self, distances: Mapping[int, float], moved: float, length: float) -> dict[int, float]:
        """Return the share of x_j − x_i that counts for each neighbour j that sent its model: 1, or less if clipped.

        `moved` is the length of the node's own local step, `length` that of its model.
        """
        radius = {j: self.ratio * max(self._scale(j, distances, length), moved) for j in distances}
        shares = {}
        for j, distance in distances.items():
            beyond = distance > radius[j]
            shares[j] = radius[j] / distance * 0.5 ** self._in_a_row.get(j, 0) if beyond else 1.0
            self._in_a_row[j] = self._in_a_row.get(j, 0) + 1 if beyond else 0
        for j, distance in distances.items():
            self._recent.setdefault(j, deque(maxlen=RECENT)).append(min(distance, radius[j]))
        return shares

    def _scale(self, j: int, distances: Mapping[int, float], length: float) -> float:
        """The distance that is usual for the neighbours other than j."""
        known = [d for k, recent in self._recent.items() if k != j for d in recent]
        known = known or [d for k, d in distances.items() if k != j] or list(self._recent.get(j, ()))
        return statistics.median(known) if known else length / self.ratio


class Guard:
    """Clips what the neighbours of one node send, each tensor of each exchange and run by a `Trust` of its own.

    `report` is called with each neighbour that was clipped in an exchange.
    """

    def __init__(self, ratio: float, report: Callable[[int], None]) -> None:
        self.ratio, self._report = ratio, report
        self._trust: dict[tuple[int, int, int], Trust] = {}
        self._last: dict[int, list[Tensor]] = {}

    def clipped(self, exchange: int, own: Sequence[Tensor], received: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return what counts of [tensors, runs, columns] of each neighbour; `own` are the node's [runs, 1, columns]."""
        result = dict(received)
        for k, rows in enumerate(own):
            last = self._last.get(exchange)
            for run, x in enumerate(rows[:, 0].double()):
                away = {j: sent[k, run].double() - x for j, sent in received.items()}
                moved = float((x - last[k][run, 0].double()).norm()) if last else 0.0
                trust = self._trust.setdefault((exchange, k, run), Trust(self.ratio))
                shares = trust.shares({j: float(v.norm()) for j, v in away.items()}, moved, float(x.norm()))
                for j, share in shares.items():
                    if share < 1:
                        result[j] = received[j].clone() if result[j] is received[j] else result[j]
                        result[j][k, run] = (x + away[j] * share).to(rows)
        for j in received:
            if result[j] is not received[j]:
                self._report(j)
        return result

    def averaged(self, exchange: int, own: Sequence[Tensor]) -> None:
        """Note the node's tensors after the average, from which its next local step begins."""
        self._last[exchange] = [rows.clone() for rows in own]
