"""Properties that a module can declare for many copies of it to be computed as one program."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import nn


@dataclass(frozen=True)
class Stacking:
    """Value of a module's attribute `stacking`; a module without it has the defaults."""

    autograd: Literal["inside", "outside", "alone"] = "inside"
    """Where autograd runs: inside vmap, outside vmap, or for one model after the other without vmap."""
    draws: bool = False
    """Whether a step draws random numbers outside of dropout modules."""
    large: bool = False
    """Whether one copy saturates a CPU, so that stacking gains nothing there."""


def stacking_of(module: nn.Module) -> Stacking:
    """The module's attribute `stacking`, or the default.

    >>> stacking_of(nn.Linear(2, 3)).autograd
    'inside'
    """
    own = getattr(module, "stacking", None)
    return own if isinstance(own, Stacking) else Stacking()
