"""Compressed messages: operators that keep a part of a vector, and the bytes in which it travels.

S. U. Stich, J.-B. Cordonnier, M. Jaggi: Sparsified SGD with memory. NeurIPS 2018. (top-k, random-k)
D. Alistarh, D. Grubic, J. Li, R. Tomioka, M. Vojnović: QSGD. NeurIPS 2017.
S. P. Karimireddy, Q. Rebjock, S. U. Stich, M. Jaggi: Error feedback fixes SignSGD. ICML 2019. (scaled sign)
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor
from torch.nn.functional import pad

from quasiglobal.algorithms import Algorithm
from quasiglobal.algorithms.needs import needs_of
from quasiglobal.errors import InputError

Field = tuple[int, int]
"""Count and bits of the numbers in a part of a message; OWN stands for the bits of the vector's own numbers."""


OWN, PLACE = 0, 32
"""Bits of the vector's own numbers, whatever their type, and of a place in it."""


class Wire(ABC):
    """A compression operator on the last dimension: ‖Q(v) − v‖² ≤ (1 − δ)‖v‖² on average, with some δ > 0."""

    random = False
    """Whether Q draws random numbers: `key` then has a hash for each number of v, which the receivers know too."""

    @abstractmethod
    def parts(self, v: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        """The message parts of v [..., c]."""

    @abstractmethod
    def restored(self, parts: Sequence[Tensor], c: int, key: Tensor | None) -> Tensor:
        """Q(v) from its parts."""

    @abstractmethod
    def fields(self, c: int) -> list[Field]:
        """Count and bits of each part of a message of c numbers."""

    def __call__(self, v: Tensor, key: Tensor | None) -> Tensor:
        return self.restored(self.parts(v, key), v.shape[-1], key)

    def bytes(self, c: int, size: int = 4) -> int:
        """Bytes of a message of c numbers of `size` bytes."""
        return sum(_length(field, size) for field in self.fields(c))

    def packed(self, parts: Sequence[Tensor], c: int) -> Tensor:
        """The parts [..., count] as bytes."""
        packed = [_packed(part, bits) for part, (_, bits) in zip(parts, self.fields(c), strict=True)]
        return torch.cat(packed, dim=-1)

    def unpacked(self, row: Tensor, c: int, dtype: torch.dtype) -> list[Tensor]:
        """The parts of a packed message of c numbers of type `dtype`."""
        found, at = [], 0
        for field in self.fields(c):
            length = _length(field, dtype.itemsize)
            found.append(_unpacked(row[..., at : at + length], *field, dtype))
            at += length
        return found


@dataclass(frozen=True)
class TopK(Wire):
    """The largest numbers, and their places."""

    fraction: float

    def parts(self, v: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        index = v.abs().topk(_count(self.fraction, v.shape[-1]), dim=-1).indices
        return v.gather(-1, index), index.to(torch.int32)

    def restored(self, parts: Sequence[Tensor], c: int, key: Tensor | None) -> Tensor:
        values, index = parts
        return values.new_zeros(*values.shape[:-1], c).scatter(-1, index.long(), values)

    def fields(self, c: int) -> list[Field]:
        k = _count(self.fraction, c)
        return [(k, OWN), (k, PLACE)]


@dataclass(frozen=True)
class RandK(Wire):
    """Random numbers of v; their places are known from the key and do not travel."""

    fraction: float
    random = True

    def parts(self, v: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        return (v.gather(-1, self._index(key)),)

    def restored(self, parts: Sequence[Tensor], c: int, key: Tensor | None) -> Tensor:
        return parts[0].new_zeros(*parts[0].shape[:-1], c).scatter(-1, self._index(key), parts[0])

    def fields(self, c: int) -> list[Field]:
        return [(_count(self.fraction, c), OWN)]

    def _index(self, key: Tensor | None) -> Tensor:
        assert key is not None
        return key.topk(_count(self.fraction, key.shape[-1]), dim=-1, largest=False).indices


@dataclass(frozen=True)
class Sign(Wire):
    """One bit per number, and the mean absolute value."""

    def parts(self, v: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        return v.abs().mean(dim=-1, keepdim=True), (v >= 0).to(torch.uint8)

    def restored(self, parts: Sequence[Tensor], c: int, key: Tensor | None) -> Tensor:
        scale, positive = parts
        return scale * (2 * positive.to(scale.dtype) - 1)

    def fields(self, c: int) -> list[Field]:
        return [(1, OWN), (c, 1)]


@dataclass(frozen=True)
class QSGD(Wire):
    """Multiples of ‖v‖/levels, rounded up or down at random, without bias; divided by 1 + the relative variance."""

    levels: int
    random = True

    def parts(self, v: Tensor, key: Tensor | None) -> tuple[Tensor, ...]:
        assert key is not None
        norm = v.norm(dim=-1, keepdim=True)
        scaled = self.levels * v.abs() / norm.clamp_min(torch.finfo(v.dtype).tiny)
        uniform = (key >> 11 & (1 << 53) - 1).double() / 2**53
        level = (scaled + uniform).floor().clamp_max(self.levels)
        return norm, (self.levels + level * v.sign()).to(torch.uint8)

    def restored(self, parts: Sequence[Tensor], c: int, key: Tensor | None) -> Tensor:
        norm, level = parts
        variance = min(c / self.levels**2, math.sqrt(c) / self.levels)
        return norm * (level.to(norm.dtype) - self.levels) / (self.levels * (1 + variance))

    def fields(self, c: int) -> list[Field]:
        return [(1, OWN), (c, (2 * self.levels).bit_length())]


MOST_LEVELS = 127
"""Largest number of levels: a level and its sign fit a byte."""

KNOWN = "full, bf16, topk:0.01, randk:0.01, sign, qsgd:4"


def wire_of(text: str) -> Wire | None:
    """Parse a message format; None for full and bf16, which do not compress.

    >>> wire_of("topk:0.01").bytes(1000), wire_of("sign").bytes(1000), wire_of("qsgd:4").bytes(1000)
    (80, 129, 504)
    """
    name, _, number = text.partition(":")
    try:
        if name in ("topk", "randk") and 0 < float(number) <= 1:
            return (TopK if name == "topk" else RandK)(float(number))
        if name == "qsgd" and 1 <= int(number) <= MOST_LEVELS:
            return QSGD(int(number))
    except ValueError:
        pass
    if text == "sign":
        return Sign()
    if text in ("full", "bf16"):
        return None
    raise InputError(
        f"wire is one of {KNOWN}, with a fraction in (0, 1] or 1 to {MOST_LEVELS} levels, got {text!r}"
    )


def checked_wire(text: str, algorithm: Algorithm, name: str = "") -> Wire | None:
    """The compression of a message format; raise InputError if it does not fit the algorithm, called `name`."""
    wire = wire_of(text)
    if text == "bf16" and needs_of(algorithm).full_precision:
        raise InputError(
            f"{name or type(algorithm).__name__} uses small differences of mixed models, which the rounding of "
            "messages to 16 bits would hide; use --wire full"
        )
    if wire is not None and not needs_of(algorithm).compresses:
        raise InputError(
            f"{type(algorithm).__name__} does not hold the error of compressed messages itself; use choco, adagossip, "
            f"beer or motef with {text}; an algorithm of your own that does has needs = Needs(compresses=True)"
        )
    return wire


def _count(fraction: float, c: int) -> int:
    """The fraction of c numbers, rounded up; exactly, since 0.07 · 100 is more than 7 in floating-point numbers."""
    return min(c, max(1, math.ceil(Fraction(repr(fraction)) * c)))


def _length(field: Field, size: int) -> int:
    """Bytes of a part; the vector's own numbers have `size` bytes."""
    count, bits = field
    return -(-count * (bits or 8 * size) // 8)


def _packed(part: Tensor, bits: int) -> Tensor:
    """A part as bytes; numbers of less than 8 bits without gaps."""
    if bits in (OWN, PLACE, 8):
        return part.contiguous().view(torch.uint8)
    places = torch.arange(bits, device=part.device, dtype=torch.uint8)
    ones = (part[..., None] >> places & 1).flatten(start_dim=-2)
    ones = pad(ones, (0, -ones.shape[-1] % 8))
    return _numbers(ones.view(*ones.shape[:-1], -1, 8))


def _unpacked(row: Tensor, count: int, bits: int, dtype: torch.dtype) -> Tensor:
    if bits in (OWN, PLACE, 8):
        aligned = row.clone(memory_format=torch.contiguous_format)
        return aligned.view({OWN: dtype, PLACE: torch.int32, 8: torch.uint8}[bits])
    places = torch.arange(8, device=row.device, dtype=torch.uint8)
    ones = (row[..., None] >> places & 1).flatten(start_dim=-2)[..., : count * bits]
    return _numbers(ones.reshape(*ones.shape[:-1], count, bits))


def _numbers(ones: Tensor) -> Tensor:
    """Numbers from their bits, [..., bits], the lowest first."""
    powers = torch.tensor([1 << place for place in range(ones.shape[-1])], device=ones.device)
    return (ones * powers).sum(dim=-1).to(torch.uint8)
