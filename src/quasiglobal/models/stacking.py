"""What a module may say of itself for many copies of it to be computed as one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Stacking:
    """An attribute `stacking` of a module; one that has none is as by default."""

    autograd: Literal["inside", "outside", "alone"] = "inside"
    """Where autograd goes: inside of vmap, around it, or one model after the other, without vmap."""
    draws: bool = False
    """Whether a step draws random numbers that no dropout module shows."""
    large: bool = False
    """Whether one copy keeps a CPU busy, so that stacking gains nothing there."""


def stacking_of(module: nn.Module) -> Stacking:
    """What the module says of itself.

    >>> stacking_of(nn.Linear(2, 3)).autograd
    'inside'
    """
    own = getattr(module, "stacking", None)
    return own if isinstance(own, Stacking) else Stacking()
