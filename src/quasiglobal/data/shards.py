"""Data on disk: a memory-mapped file, made once, shard by shard, and checked by checksums.

A finished shard is noted in shards.json, so making the file continues where it stopped. Every image has a checksum,
which is verified when the image is first read. A user's own examples are stored likewise: each is a record of bytes,
which reading turns into tensors again.
"""

from __future__ import annotations

import math
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.files import alone, cache_folder, read_json, write_json
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError

T = TypeVar("T")

SHARD = 2**26
"""Bytes of a shard: the unit in which the file is made, and made again if it is damaged."""

THREADS = min(8, os.cpu_count() or 1)
"""Threads that read the rows of a batch."""

_pool = ThreadPoolExecutor(THREADS)                         # starts its threads with the first batch

LARGE_ROW = 2**14
"""Size in bytes from which a row is read by a system call."""

Read = Callable[[int], NDArray[np.uint8]]
"""(row) → one image."""

ALIGNMENT = 16
"""Every tensor of a record begins at a multiple of this many bytes, the size of the largest number."""

SMALL = 64
"""Size in bytes up to which all targets are kept in memory, where partitions need them."""


@dataclass(frozen=True, eq=False)
class Shards:
    """uint8 images [m, …] in a folder: `images`, `checksums` and shards.json."""

    what = "images"
    """Name of the file, and of its rows in messages."""
    in_threads = True
    """Whether threads read the rows of a shard at the same time."""
    has_targets = False
    """Whether the rows have the targets too."""

    folder: Path
    shape: tuple[int, ...]
    """[m, channels, height, width]"""
    _verified: NDArray[np.bool_] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_verified", np.zeros(self.shape[0], dtype=np.bool_))

    @cached_property
    def x(self) -> Tensor:
        """All images; indexing it reads those images alone from the disk."""
        if not math.prod(self.shape):
            return torch.empty(self.shape, dtype=torch.uint8)
        return torch.from_numpy(np.memmap(self.folder / self.what, np.uint8, mode="c", shape=self.shape))

    @cached_property
    def checksums(self) -> NDArray[np.uint32]:
        """The checksum of each image."""
        return np.fromfile(self.folder / "checksums", dtype="<u4")

    @property
    def rows_per_shard(self) -> int:
        """Number of images in a shard; the last shard may have fewer."""
        return max(1, SHARD // math.prod(self.shape[1:]))

    @property
    def count(self) -> int:
        """Number of shards."""
        return math.ceil(self.shape[0] / self.rows_per_shard)

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The images in these rows; raise InputError if one is damaged."""
        found = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8) if out is None else out
        size = max(1, -(-len(rows) // THREADS))
        pieces = [slice(first, first + size) for first in range(0, len(rows), size)]
        for _ in _pool.map(lambda piece: self._copy(rows[piece], found[piece]), pieces):
            pass
        new = np.flatnonzero(~self._verified[rows.numpy()])
        if len(new):
            pixels, at = found.numpy(), rows.numpy()
            for i in new:
                if zlib.crc32(pixels[i]) != self.checksums[at[i]]:
                    self._forget(int(at[i]))
            self._verified[at[new]] = True
        return found

    def _copy(self, rows: Tensor, out: Tensor) -> None:
        """Read rows into `out`: large ones by one call each, which costs less than the page faults of a memory map."""
        size = math.prod(self.shape[1:])
        if size < LARGE_ROW:
            torch.index_select(self.x, 0, rows, out=out)
            return
        for row, place in zip(rows.tolist(), out.numpy(), strict=True):
            os.preadv(self._file, [place], row * size)

    @cached_property
    def _file(self) -> int:
        opened = os.open(self.folder / self.what, os.O_RDONLY)
        weakref.finalize(self, os.close, opened)
        return opened

    def _forget(self, row: int) -> None:
        """Note that a shard has to be made again."""
        shard = row // self.rows_per_shard
        write_json(self.folder / "shards.json", self._note([done for done in self.done() if done != shard]))
        raise InputError(
            f"shard {shard} of {self.folder} is damaged at {self.what[:-1]} {row}; run the same command again to make "
            "it anew"
        )

    def done(self) -> list[int]:
        """The finished shards; none if the folder holds other images."""
        try:
            note = read_json(self.folder / "shards.json")
            done: list[int] = note["done"]
            whole = os.path.getsize(self.folder / self.what) == math.prod(self.shape)
        except (OSError, ValueError, KeyError):
            return []
        return done if whole and note == self._note(done) else []

    def _note(self, done: Sequence[int]) -> dict[str, object]:
        return {"shape": list(self.shape), "rows per shard": self.rows_per_shard, "done": sorted(done)}

    def make(self, read: Read) -> None:
        """Make the missing shards; other processes wait until they are made."""
        with alone(self.folder, wait=True):
            done = self.done()
            missing = [shard for shard in range(self.count) if shard not in set(done)]
            if not missing:
                return
            self._check_disk(bool(done))
            try:
                for shard in missing:
                    _show.get()(f"storing {self.shape[0]:,} {self.what}", len(done), self.count)
                    self._make_shard(shard, read)
                    done.append(shard)
                    write_json(self.folder / "shards.json", self._note(done))
            except OSError as error:
                raise InputError(
                    f"cannot write {self.folder}: {error.strerror}; {len(done)} of {self.count} shards are made, and "
                    "the same command continues"
                ) from None

    def _make_shard(self, shard: int, read: Read) -> None:
        rows = range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.shape[0]))
        with ThreadPoolExecutor() as pool:                  # Pillow releases Python's lock while it decodes and scales
            images = np.stack(list((pool.map if self.in_threads else map)(read, rows)))
        sums = np.array([zlib.crc32(image) for image in images], dtype="<u4")
        for name, values, size in ((self.what, images, math.prod(self.shape[1:])), ("checksums", sums, 4)):
            with open(os.open(self.folder / name, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
                file.seek(rows.start * size)
                file.write(values.tobytes())
                file.flush()
                os.fsync(file.fileno())

    def _check_disk(self, begun: bool) -> None:
        """Raise InputError if the disk is too small; reserve the space otherwise."""
        size, images = math.prod(self.shape), self.folder / self.what
        there = images.stat().st_blocks * 512 if begun else 0
        free = shutil.disk_usage(self.folder).free
        if size - there > free:
            raise InputError(
                f"{self.folder} needs {(size - there) / 1e9:.3g} GB, but its disk has {free / 1e9:.3g} GB free; set "
                "QG_CACHE to a folder on a larger disk"
            )
        with open(os.open(images, os.O_RDWR | os.O_CREAT, 0o666), "r+b") as file:
            file.truncate(size)


@dataclass(frozen=True, eq=False)
class Blank(Shards):
    """Placeholder for images that are not decoded, to estimate the cost of a training: all pixels are 0."""

    in_memory: bool
    """Whether the training would keep the images in memory."""

    @cached_property
    def x(self) -> Tensor:
        """Images that take no memory."""
        return torch.zeros((), dtype=torch.uint8).expand(self.shape)

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Black images."""
        return torch.zeros(len(rows), *self.shape[1:], dtype=torch.uint8) if out is None else out.zero_()


UNDECODED: ContextVar[bool] = ContextVar("undecoded", default=False)
"""Whether readers of image files return `Blank` images."""


def undecoded() -> AbstractContextManager[None]:
    """Within this context, readers of image files return `Blank` images."""
    return _during(UNDECODED, True)


@contextmanager
def _during(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Give a variable a value inside the block."""
    before = variable.set(value)
    try:
        yield
    finally:
        variable.reset(before)


# ------------------------------------------------------------------------------------------------ a user's own examples


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
    """The form of a record."""

    places: object
    """The places of all tensors of an example: a tree like the example."""
    size: int

    @classmethod
    def of(cls, example: Tree) -> Form:
        """The form of an example."""
        end = 0

        def placed(value: Tensor) -> Place:
            nonlocal end
            place = Place(value.dtype, tuple(value.shape), end)
            end += -(-place.size // ALIGNMENT) * ALIGNMENT
            return place

        return cls(tree_map(placed, example), end)

    def pack(self, example: Tree) -> NDArray[np.uint8]:
        """The record of an example of this form."""
        record = np.zeros(self.size, dtype=np.uint8)
        for place, value in zip(tree_leaves(self.places), tree_leaves(example), strict=True):
            flat = value.contiguous().reshape(-1).view(torch.uint8).numpy()
            record[place.start : place.start + place.size] = flat
        return record

    def unpack(self, records: Tensor) -> Tree:
        """The tensors [m, …] in records uint8 [m, size], as views."""
        return tree_map(lambda place: place.read(records), self.places)


@dataclass(frozen=True, eq=False)
class ExampleShards(Shards):
    """Examples (input, target) in shards."""

    what = "examples"
    in_threads = False                                      # the random numbers of an example are seeded globally
    has_targets = True

    form: Form

    @property
    def inputs(self) -> Tree:
        """All inputs; indexing them reads those examples alone from the disk."""
        return self.form.unpack(self.x)[0]

    def targets(self) -> Tree:
        """All targets; small ones are read into the memory."""
        return tree_map(
            lambda values: values.clone() if values[0].nbytes <= SMALL else values, self.form.unpack(self.x)[1]
        )


def store(read: Callable[[int], Tree], count: int, key: str) -> ExampleShards:
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


# --------------------------------------------------------- progress of making shards, shown by the command that runs it


ShowProgress = Callable[[str, int, int], None]
"""Shows a text, the number of completed parts and their total."""

_show: ContextVar[ShowProgress] = ContextVar("show", default=lambda what, done, total: None)


def showing(show: ShowProgress) -> AbstractContextManager[None]:
    """Show the progress of everything inside the block by `show`."""
    return _during(_show, show)
