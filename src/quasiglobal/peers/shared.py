"""Memory that other processes of the same user on this machine can read: a message is copied once, not through sockets.

It is a file in memory (`memfd_create`), which others open in /proc. Linux only; elsewhere memory is ordinary.
"""

from __future__ import annotations

import mmap
import os
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

NAME = "quasiglobal"
"""Name of the files: no other file is ever read."""

LARGE = 2**20
"""Bytes from which memory is shared; for less, a connection costs less than to agree on the memory."""

_FILES: dict[int, int] = {}
"""File descriptors of the shared memory of this process, by its address."""


def new(size: int) -> NDArray[np.uint8]:
    """Return memory of this process alone."""
    return np.empty(size, dtype=np.uint8)


def new_shared(size: int) -> NDArray[np.uint8]:
    """Return memory, shared if it is large and this machine allows it."""
    if size < LARGE or not hasattr(os, "memfd_create"):
        return new(size)
    try:
        file = os.memfd_create(NAME)
    except OSError:
        return new(size)
    try:
        os.ftruncate(file, size)
        memory = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
    except OSError:                                         # such as a limit of the size of files
        os.close(file)
        return new(size)
    _FILES[memory.ctypes.data] = file
    weakref.finalize(memory, _close, memory.ctypes.data)
    return memory


def _close(address: int) -> None:
    os.close(_FILES.pop(address))


def file_of(message: Tensor) -> tuple[int, int] | None:
    """Return the file that has this message, and the position in it; None if its memory is not shared."""
    address = message.untyped_storage().data_ptr()
    return (_FILES[address], message.data_ptr() - address) if address in _FILES else None


def read_file(process: int, file: int, position: int, buffer: Tensor) -> None:
    """Fill the buffer from the shared memory of a process; raise OSError if there is no such memory."""
    path = f"/proc/{process}/fd/{file}"
    if not os.readlink(path).startswith(f"/memfd:{NAME} "):
        raise OSError(f"{path} is not shared memory")
    here = os.open(path, os.O_RDONLY)
    try:
        left = buffer.view(torch.uint8).numpy().data
        while left:
            count = os.preadv(here, [left], position)
            if not count:
                raise OSError(f"{path} is too short")
            left, position = left[count:], position + count
    finally:
        os.close(here)
