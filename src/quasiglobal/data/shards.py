"""Data on disk: a memory-mapped file, made once, shard by shard, and checked by checksums.

A finished shard is noted in shards.json, so making the file continues where it stopped. Every image has a checksum,
which is verified when the image is first read.
"""

from __future__ import annotations

import math
import os
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.common.files import alone, read_json, write_json
from quasiglobal.common.progress import report_progress
from quasiglobal.errors import InputError

SHARD = 2**26
"""Bytes of a shard: the unit in which the file is made, and made again if it is damaged."""

READERS = min(8, os.cpu_count() or 1)
"""Threads that read the rows of a batch."""

LARGE_ROW = 2**14
"""Bytes of a row from which it is read by a system call."""

Read = Callable[[int], NDArray[np.uint8]]
"""(row) → one image."""


@dataclass(frozen=True, eq=False)
class Shards:
    """uint8 images [m, …] in a folder: `images`, `checksums` and shards.json."""

    what = "images"
    """Name of the file, and of its rows in messages."""
    in_threads = True
    """Whether threads read the rows of a shard at the same time."""

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

    def rows_of(self, shard: int) -> range:
        """The images of a shard."""
        return range(shard * self.rows_per_shard, min((shard + 1) * self.rows_per_shard, self.shape[0]))

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The images in these rows; raise InputError if one is damaged."""
        found = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8) if out is None else out
        size = max(1, -(-len(rows) // READERS))
        pieces = [slice(first, first + size) for first in range(0, len(rows), size)]
        for _ in _pool().map(lambda piece: self._copy(rows[piece], found[piece]), pieces):
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
        """Read rows into `out`: large ones by a call each, which costs less than the page faults of a memory map."""
        size = math.prod(self.shape[1:])
        if size < LARGE_ROW:
            torch.index_select(self.x, 0, rows, out=out)
            return
        for row, place in zip(rows.tolist(), out.numpy(), strict=True):
            os.preadv(self._file, [place], row * size)

    @cached_property
    def _file(self) -> int:
        """Descriptor of the open file."""
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
                    report_progress(f"storing {self.shape[0]:,} {self.what}", len(done), self.count)
                    self._make_shard(shard, read)
                    done.append(shard)
                    write_json(self.folder / "shards.json", self._note(done))
            except OSError as error:
                raise InputError(
                    f"cannot write {self.folder}: {error.strerror}; {len(done)} of {self.count} shards are made, and "
                    "the same command continues"
                ) from None

    def _make_shard(self, shard: int, read: Read) -> None:
        rows = self.rows_of(shard)
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
    """Stands for images that are not decoded, to estimate the cost of a training: all pixels are 0."""

    in_memory: bool
    """Whether the training would keep the images in memory."""

    @cached_property
    def x(self) -> Tensor:
        """Images that take no memory."""
        return torch.zeros((), dtype=torch.uint8).expand(self.shape)

    def read(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """Black images."""
        return torch.zeros(len(rows), *self.shape[1:], dtype=torch.uint8) if out is None else out.zero_()


_UNDECODED: ContextVar[bool] = ContextVar("undecoded", default=False)


@contextmanager
def undecoded() -> Iterator[None]:
    """Within this context, readers of image files return `Blank` images."""
    token = _UNDECODED.set(True)
    try:
        yield
    finally:
        _UNDECODED.reset(token)


def is_undecoded() -> bool:
    """Whether images are not to be decoded now."""
    return _UNDECODED.get()


@lru_cache
def _pool() -> ThreadPoolExecutor:
    """The threads that read; they are started once."""
    return ThreadPoolExecutor(READERS)
