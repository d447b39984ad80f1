"""Random numbers without hidden state: every draw is a function of its key, on all machines and torch versions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(*key: int) -> np.random.Generator:
    """NumPy's Philox generator keyed by integers, such as (seed, node, epoch).

    >>> generator(0, 3, 1).integers(100, size=4).tolist()
    [96, 36, 56, 32]
    """
    # The length is part of the key: NumPy pads with zeros, so (7,) and (7, 0) would be equal.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """Seed torch's random numbers, as for dropout, by the key; restore its generators afterwards.

    A captured graph reads the generator's seed at each replay, so this also works around a replay.

    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     first = torch.rand(3)
    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     print(first.equal(torch.rand(3)))
    True
    """
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(int(generator(*key).integers(2**63)))
        yield
