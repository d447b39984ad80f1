"""Checks of a message before it counts: a neighbour that is admitted may still send anything."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


class Rejected(Exception):
    """A message does not count; the text is the reason, without numbers that the sender chose."""


@dataclass(frozen=True)
class Expected:
    """The message that a neighbour should send."""

    count: int
    dtype: torch.dtype
    last_step: float = math.inf
    """The last step of the run."""
    packed: bool = False
    """Whether the numbers are packed bits, which are checked once they are restored."""


def check_message(step: int, payload: Tensor, expected: Expected) -> None:
    """Raise `Rejected` unless a message for this step has the expected size and bounded numbers."""
    check_step(step, expected.last_step)
    if (payload.numel(), payload.dtype) != (expected.count, expected.dtype):
        size = f"{expected.count} numbers of {expected.dtype.itemsize} bytes"
        raise Rejected(f"it sent a message of another size than {size}")
    if not expected.packed:
        check_numbers(payload)


def check_step(step: int, last_step: float) -> None:
    """Raise `Rejected` unless the run has this step."""
    if not 0 <= step <= last_step:
        raise Rejected("it claims a step that the run does not have")


def check_numbers(values: Tensor) -> None:
    """Raise `Rejected` unless the sum of the squares of all numbers is finite.

    Numbers near the largest would pass as finite, but overflow in the receiver's next differences and norms, so that
    honest neighbours would reject each other. The sum of squares is a single fast pass.
    """
    flat = values.flatten()
    flat = flat.float() if flat.dtype == torch.bfloat16 else flat
    if not torch.dot(flat, flat).isfinite():
        raise Rejected("it sent numbers that are not finite, or too large to compute with")
