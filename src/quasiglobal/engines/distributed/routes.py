"""Which rows and messages travel between this process and its neighbours at each step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from quasiglobal.engines.links import Links
from quasiglobal.topology import Topology

Sent = dict[int, tuple[list[int], list[int]]]
"""For each neighbouring process: local indices of nodes to send, and nodes to receive."""

Slots = tuple[Tensor, Tensor]
"""Index of messages per edge: places of nodes, and slots."""


class Routes:
    """The routes from process `rank`; process p hosts the nodes `hosted[p]`."""

    def __init__(self, topology: Topology, rank: int, hosted: Sequence[Sequence[int]]) -> None:
        self.topology, self.rank, self.hosted, self.nodes = topology, rank, hosted, list(hosted[rank])
        self.home = {node: process for process, nodes in enumerate(hosted) for node in nodes}
        self._rows: dict[int, Sent] = {}

    @cached_property
    def neighbours(self) -> list[int]:
        """The processes that host a neighbour of a node here, in either direction."""
        links = self.topology.links()
        either = (links | links.T)[self.nodes].any(axis=0)
        return sorted({self.home[j] for j in np.flatnonzero(either).tolist()} - {self.rank})

    def key(self, t: int) -> int:
        """Key of the steps with the weights of step t: its position in the period, or the step itself if W is drawn."""
        return -t if self.topology.is_drawn(t) else self.topology.position(t)

    def rows(self, t: int) -> Sent:
        """For each neighbour at step t: local indices of nodes to send, and nodes to receive."""
        key = self.key(t)
        if key not in self._rows:
            if self.topology.is_drawn(t):
                self._rows.clear()                          # never needed again
            links = self.topology.links(t)
            self._rows[key] = {
                there: (
                    np.flatnonzero(links[list(hosted)][:, self.nodes].any(axis=0)).tolist(),
                    [hosted[k] for k in np.flatnonzero(links[self.nodes][:, list(hosted)].any(axis=0)).tolist()],
                )
                for there, hosted in ((there, self.hosted[there]) for there in self.neighbours)
            }
        return self._rows[key]

    def to_others(self, t: int, message: Tensor) -> dict[int, Tensor]:
        """The rows of a message [tensors, runs, nodes, columns] that each neighbouring process receives at step t."""
        copies: dict[tuple[int, ...], Tensor] = {}          # one tensor for neighbours that receive the same rows
        sent: dict[int, Tensor] = {}
        for there, (out, _) in self.rows(t).items():
            if rows := tuple(out):
                if rows not in copies:
                    copies[rows] = message if len(rows) == len(self.nodes) else message[:, :, rows]
                sent[there] = copies[rows]
        return sent

    def slots(self, links: Links) -> list[dict[int, tuple[Slots, Slots]]]:
        """For each step of a period and each process, this one too: the slots here of messages to it, and from it."""
        here = {node: place for place, node in enumerate(self.nodes)}
        periods = []
        for t in range(1, links.period + 1):
            messages = links.messages(t)
            periods.append({
                there: (
                    _index((here[j], s) for j, s, i, _ in messages if j in here and self.home[i] == there),
                    _index((here[i], s) for j, _, i, s in messages if i in here and self.home[j] == there),
                )
                for there in (self.rank, *self.neighbours)
            })
        return periods


def _index(places: Iterable[tuple[int, int]]) -> Slots:
    """Places and slots as an index."""
    found = torch.tensor(list(places), dtype=torch.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
