"""The weights of a random topology in storage that stays, where a captured step finds those of each new step."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from quasiglobal.topology import Topology

AHEAD = 64
"""Steps whose weights are drawn and copied to a GPU at once, so that it seldom waits for a copy."""

LARGEST = 2**20
"""The most numbers that are copied at once, unless one W has more."""


class DrawnWeights:
    """W(t) − I of a random topology as one tensor for each dtype and device, overwritten for each step.

    >>> from quasiglobal import topology
    >>> held = DrawnWeights(topology.matching(4))
    >>> first = held.at(1, torch.float32, torch.device("cpu"))
    >>> held.prepare(2)
    >>> bool((first + torch.eye(4) == torch.from_numpy(topology.matching(4).weights(2))).all())
    True
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self._held: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        self._steps: dict[tuple[torch.dtype, torch.device], int] = {}
        self._tables: dict[tuple[torch.dtype, torch.device], tuple[int, Tensor]] = {}

    def at(self, t: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The tensor for this dtype and device, with the weights of step t."""
        key = dtype, device
        if key not in self._held:
            self._held[key] = torch.zeros(self.topology.n, self.topology.n, dtype=dtype, device=device)
        self._fill(key, t)
        return self._held[key]

    def prepare(self, t: int) -> None:
        """Write the weights of step t to the tensors that steps have used; a captured step cannot do it itself."""
        if self.topology.is_drawn(t):
            for key in self._held:
                self._fill(key, t)

    def _fill(self, key: tuple[torch.dtype, torch.device], t: int) -> None:
        if self._steps.get(key) == t:
            return
        first, table = self._tables.get(key, (0, None))
        if table is None or not first <= t < first + len(table):
            dtype, device = key
            n = self.topology.n
            ahead = 1 if device.type == "cpu" else max(1, min(AHEAD, LARGEST // n**2))
            steps = [self.topology.weights(step) - np.eye(n) for step in range(t, t + ahead)]
            first, table = self._tables[key] = t, torch.from_numpy(np.stack(steps)).to(device, dtype)
        self._held[key].copy_(table[t - first])
        self._steps[key] = t
