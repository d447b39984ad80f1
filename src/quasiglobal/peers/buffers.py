"""Memory of messages, used again: new memory has to be mapped and cleared, which costs more than to write a message."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.peers.shared import new, new_shared

SPARE = 3
"""Free buffers that are kept for the next messages."""


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
        self._new = new_shared if shared else new
        self._lock = threading.Lock()
        self._held: list[tuple[NDArray[np.uint8], weakref.ref[Any]]] = []

    def empty(self, count: int, dtype: torch.dtype) -> Tensor:
        """Return a tensor [count] of any numbers."""
        size = count * dtype.itemsize
        with self._lock:
            free = [memory for memory, lent in self._held if lent() is None]
            fitting = [memory for memory in free if memory.nbytes == size]
            memory = fitting[0] if fitting else self._new(size)
            spare = fitting[1 : 1 + SPARE]
            loan = memory[:]                                # a tensor's storage refers to this view of the memory
            kept = [entry for entry in self._held if entry[1]() is not None or any(entry[0] is one for one in spare)]
            self._held = [*kept, (memory, weakref.ref(loan))]
            return torch.from_numpy(loan).view(dtype)
