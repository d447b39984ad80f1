"""Reused memory for messages: mapping and clearing new memory costs more than writing a message.

Other processes of the same user on this machine can read large messages there: a message is copied once, not through
sockets. On Linux such memory is a `memfd_create` file, which others open in /proc; elsewhere memory is not shared.
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

SPARE = 3
"""Free buffers that are kept for the next messages."""

NAME = "quasiglobal"
"""Name of the files: no other file is ever read."""

LARGE = 2**20
"""Minimum size in bytes of shared memory: smaller messages are faster through the connection."""

_FILES: dict[int, int] = {}
"""File descriptors of the shared memory of this process, by its address."""


class MessageMemory:
    """Uninitialised tensors, whose memory is free again once no tensor refers to it, here or in the transport.

    `shared`: other processes on this machine can read it, if it is large.

    >>> buffers = MessageMemory()
    >>> one, other = buffers.empty(5, torch.float32), buffers.empty(5, torch.float32)
    >>> address = one.data_ptr()
    >>> view = one[1:]
    >>> del one
    >>> buffers.empty(5, torch.float32).data_ptr() == address          # the view still refers to it
    False
    >>> del view
    >>> buffers.empty(5, torch.float32).data_ptr() == address
    True
    """

    def __init__(self, shared: bool = False) -> None:
        self._shared = shared
        self._lock = threading.Lock()
        self._held: list[tuple[NDArray[np.uint8], weakref.ref[NDArray[np.uint8]]]] = []

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return an uninitialised tensor [count]."""
        size = count * dtype.itemsize
        with self._lock:
            fitting = [memory for memory, lent in self._held if lent() is None and memory.nbytes == size]
            memory = fitting[0] if fitting else (new_shared(size) if self._shared else np.empty(size, dtype=np.uint8))
            spare = fitting[1 : 1 + SPARE]
            loan = memory[:]                                # a tensor's storage refers to this view of the memory
            kept = [entry for entry in self._held if entry[1]() is not None or any(entry[0] is one for one in spare)]
            self._held = [*kept, (memory, weakref.ref(loan))]
            return torch.from_numpy(loan).view(dtype)


def new_shared(size: int) -> NDArray[np.uint8]:
    """Return memory, shared if it is large and this machine allows it."""
    if size >= LARGE and hasattr(os, "memfd_create"):
        with suppress(OSError):                             # such as a limit of the size of files
            file = os.memfd_create(NAME)
            try:
                os.ftruncate(file, size)
                memory = np.frombuffer(mmap.mmap(file, size), dtype=np.uint8)
            except OSError:
                os.close(file)
                raise
            _FILES[memory.ctypes.data] = file
            weakref.finalize(memory, lambda address: os.close(_FILES.pop(address)), memory.ctypes.data)
            return memory
    return np.empty(size, dtype=np.uint8)



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
