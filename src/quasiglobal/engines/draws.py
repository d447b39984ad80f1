"""Draws from a run's seed: lost messages, absent nodes, random nodes and coins, the same in every process."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

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


def happens(probability: float, key: Tensor) -> Tensor:
    """Mask the hashes whose first 53 bits, read as a fraction, are below the probability."""
    return (key >> 11 & (1 << 53) - 1) < round(probability * 2**53)


def choose(seeds: Tensor, draw: Tensor, n: int, count: int) -> Tensor:
    """Return a [runs, n] mask of `count` of n nodes for each run's seed: the nodes with the smallest hashes.

    Integer arithmetic on the device (splitmix64), so that both engines, CPU and GPU, choose the same nodes
    and a captured graph draws new nodes at each replay.

    >>> choose(torch.tensor([0, 1]), torch.tensor(3.0), n=4, count=2).sum(dim=1).tolist()
    [2, 2]
    """
    nodes = torch.arange(n, device=seeds.device)
    key = hashed(seeds[:, None], draw.to(torch.int64), nodes)
    return key <= key.sort(dim=1).values[:, count - 1 : count]


def hashed(key: Tensor, *numbers: Tensor | int) -> Tensor:
    """Hash whole numbers, which broadcast, to 64 bits (splitmix64, one round per number)."""
    for number in numbers:
        key = _scramble(key) + number
    return _scramble(key)


def _scramble(key: Tensor) -> Tensor:
    key = key - 0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        key = (key ^ (key >> shift & (1 << 64 - shift) - 1)) * factor
    return key ^ (key >> 31 & (1 << 33) - 1)
