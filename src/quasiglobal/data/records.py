"""A user's own examples on disk: each is a record of bytes in shards, and any tensors again after reading."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.files import cache_folder
from quasiglobal.data.arrays import on_device
from quasiglobal.data.shards import Shards

ALIGNMENT = 16
"""Every tensor of a record begins at a multiple of this many bytes, the size of the largest number."""

SMALL = 64
"""Bytes of a target up to which all targets are kept in memory, where partitions need them."""


@dataclass(frozen=True)
class Place:
    """Dtype, shape and first byte of a tensor in a record."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int

    @property
    def size(self) -> int:
        """Number of bytes."""
        return self.dtype.itemsize * math.prod(self.shape)

    def read(self, records: Tensor) -> Tensor:
        """A view of this tensor in records uint8 [m, size]: [m, …]."""
        values = records[:, self.start : self.start + self.size].view(self.dtype)
        return torch.unflatten(values, 1, self.shape) if self.shape else values[:, 0]


@dataclass(frozen=True)
class Form:
    """The form of a record: the places of all tensors of an example, a tree of them."""

    places: Any
    size: int

    @classmethod
    def of(cls, example: Any) -> Form:
        """The form of an example."""
        end = 0

        def placed(value: Tensor) -> Place:
            nonlocal end
            place = Place(value.dtype, tuple(value.shape), end)
            end += -(-place.size // ALIGNMENT) * ALIGNMENT
            return place

        return cls(tree_map(placed, example), end)

    def pack(self, example: Any) -> NDArray[np.uint8]:
        """The record of an example of this form."""
        record = np.zeros(self.size, dtype=np.uint8)
        for place, value in zip(tree_leaves(self.places), tree_leaves(example), strict=True):
            flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            record[place.start : place.start + place.size] = flat
        return record

    def unpack(self, records: Tensor) -> Any:
        """The tensors [m, …] in records uint8 [m, size], as views."""
        return tree_map(lambda place: place.read(records), self.places)


@dataclass(frozen=True, eq=False)
class ExampleShards(Shards):
    """Examples (input, target) in shards."""

    what = "examples"
    in_threads = False                                      # the random numbers of an example are seeded globally

    form: Form

    @property
    def inputs(self) -> Any:
        """All inputs; indexing them reads those examples alone from the disk."""
        return self.form.unpack(self.x)[0]

    @property
    def targets(self) -> Any:
        """All targets; small ones are read into the memory."""
        return tree_map(
            lambda values: values.clone() if values[0].nbytes <= SMALL else values, self.form.unpack(self.x)[1]
        )


def store(read: Callable[[int], Any], count: int, key: str) -> ExampleShards:
    """Write examples (input, target) into shards in the cache folder, unless they are there.

    The folder's name depends on the key and on eight of the examples.
    """
    form = Form.of(read(0))
    digest = sha256(key.encode())
    for row in np.linspace(0, count - 1, num=min(8, count)).astype(np.int64):
        digest.update(form.pack(read(int(row))).tobytes())
    records = ExampleShards(cache_folder("shards") / digest.hexdigest()[:32], (count, form.size), form)
    records.make(lambda row: form.pack(read(row)))
    return records


class Unpacked:
    """A batch of records on the device as model input and targets; the counterpart of `Arrays`."""

    cost = 1
    moving = False

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        """Without records: `view` adds them."""
        self.form, self.dtype = form, dtype
        self.x = torch.empty(0, form.size, dtype=torch.uint8)

    def framed(self, x: Tensor) -> Tensor:
        """The records unchanged."""
        return x

    def view(self, x: Tensor) -> Unpacked:
        """The same view of other records."""
        other = copy.copy(self)
        other.x = x
        return other

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Random augmentation: none."""
        return ()

    def show(self, index: Tensor) -> Any:
        """The inputs at these indices."""
        return self._at(index, 0)

    def targets(self, index: Tensor) -> Any:
        """The targets at these indices."""
        return self._at(index, 1)

    def _at(self, index: Tensor, which: int) -> Any:
        found = self.form.unpack(self.x)[which]
        return on_device(tree_map(lambda values: values[index], found), self.x.device, self.dtype)
