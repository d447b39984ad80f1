"""No hidden randomness: every draw is a function of a key, on every machine and in every version."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def generator(*key: int) -> np.random.Generator:
    """NumPy's Philox keyed by these numbers, such as (seed, node, epoch).

    >>> generator(0, 3, 1).integers(100, size=4).tolist()
    [96, 36, 56, 32]
    """
    # The length is part of the key: NumPy pads with zeros, so that (7,) and (7, 0) would be one.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))


@contextmanager
def seeded(device: torch.device, *key: int) -> Iterator[None]:
    """What torch draws here, for dropout, is a function of the key; afterwards its generators go on as if nothing was.

    A captured graph takes the generator's seed when it is replayed, so this holds around a replay too.

    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     first = torch.rand(3)
    >>> with seeded(torch.device("cpu"), 0, 7):
    ...     print(first.equal(torch.rand(3)))
    True
    """
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):
        torch.manual_seed(int(generator(*key).integers(2**63)))
        yield
