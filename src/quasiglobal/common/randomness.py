"""Random numbers without hidden state: every draw is a function of its key, on all machines and torch versions.

The functions for torch's generators import it when called: topologies need NumPy's alone.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch


def generator(*key: int) -> np.random.Generator:
    """NumPy's Philox generator keyed by integers, such as (seed, node, epoch).

    >>> generator(0, 3, 1).integers(100, size=4).tolist()
    [96, 36, 56, 32]
    """
    # The length is part of the key: NumPy pads with zeros, so (7,) and (7, 0) would be equal.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


@contextmanager
def seeded(device: torch.device, *key: int, elsewhere: bool = False) -> Iterator[None]:
    """Seed torch's random numbers, as for dropout, by the key; restore its generators afterwards.

    `elsewhere` also seeds the global generators of NumPy and Python. A captured graph reads the generator's seed at
    each replay, so this also works around a replay.

    >>> import torch
    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     first = torch.rand(3)
    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     print(first.equal(torch.rand(3)))
    True
    """
    import torch

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
    import torch

    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


@contextmanager
def restored_generators() -> Iterator[None]:
    """Restore the global generators of torch (CPU), NumPy and Python afterwards."""
    import torch

    numbers, states = np.random.get_state(), random.getstate()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numbers)
        random.setstate(states)
