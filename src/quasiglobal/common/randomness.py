"""NumPy's random numbers as a function of a key."""

from __future__ import annotations

import numpy as np


def generator(*key: int) -> np.random.Generator:
    """NumPy's Philox generator keyed by integers, such as (seed, node, epoch).

    >>> generator(0, 3, 1).integers(100, size=4).tolist()
    [96, 36, 56, 32]
    """
    # The length is part of the key: NumPy pads with zeros, so (7,) and (7, 0) would be equal.
    return np.random.Generator(np.random.Philox(np.random.SeedSequence((len(key), *key))))
