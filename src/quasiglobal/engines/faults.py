"""Simulated deployment faults: lost messages and absent nodes, drawn from the run's seed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quasiglobal.engines.node import happens, hashed
from quasiglobal.errors import InputError

WINDOW = 20
"""Steps for which a node stays absent or present before the next draw."""

DROP, CHURN = 1, 2
"""Hash keys that separate the draws for messages from the draws for nodes."""


@dataclass(frozen=True)
class Faults:
    """Link j → i is lost for a step with probability `drop`; a node is absent for a window with probability `churn`.

    The two directions of an edge are drawn independently. An absent node neither sends nor receives; it continues
    to train on its own data.
    """

    drop: float = 0.0
    churn: float = 0.0

    def __post_init__(self) -> None:
        for name in ("drop", "churn"):
            check_probability(name, getattr(self, name))

    def __bool__(self) -> bool:
        return self.drop > 0 or self.churn > 0

    def arrived(self, seeds: Tensor, time: Tensor, n: int) -> Tensor:
        """Return a [runs, n, n] mask: at [r, i, j], whether the message j → i arrives in run r at step `time` = 1, 2, …

        The mask is a function of (seed, step, receiver, sender) and (seed, window, node), in integer arithmetic on the
        device: CPU and GPU agree, and a captured graph draws new values at each replay.

        >>> Faults(drop=0.5).arrived(torch.tensor([0]), torch.tensor(1.0), n=3)[0].tolist()
        [[False, False, True], [False, False, False], [True, True, True]]
        """
        step, node = time.to(torch.int64), torch.arange(n, device=seeds.device)
        window = (step - 1) // WINDOW
        here = ~happens(self.churn, hashed(seeds[:, None], CHURN, window, node))
        lost = happens(self.drop, hashed(seeds[:, None, None], DROP, step, node[:, None], node))
        return ~lost & here[:, :, None] & here[:, None, :]


def check_probability(name: str, value: float) -> None:
    """Raise `InputError` unless 0 <= value < 1."""
    if not 0 <= value < 1:
        raise InputError(f"{name} must be a probability in [0, 1), got {value}")
