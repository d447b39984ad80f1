"""Random numbers without hidden state: every draw is a function of its key, on all machines and torch versions."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from quasiglobal.common.randomness import generator


@contextmanager
def seeded(device: torch.device, *key: int, elsewhere: bool = False) -> Iterator[None]:
    """Seed torch's random numbers, as for dropout, by the key; restore its generators afterwards.

    `elsewhere` also seeds the global generators of NumPy and Python. A captured graph reads the generator's seed at
    each replay, so this also works around a replay.

    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     first = torch.rand(3)
    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     print(first.equal(torch.rand(3)))
    True
    """
    seed = int(generator(*key).integers(2**63))
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(seed)
        if not elsewhere:
            yield
            return
        with restored_generators():
            seed_all(seed)
            yield


def seed_all(seed: int) -> None:
    """Seed the global generators of torch (CPU), NumPy and Python."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of torch (CPU), NumPy and Python afterwards."""
    numbers, states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(states)
