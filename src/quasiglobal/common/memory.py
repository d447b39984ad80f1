"""Free memory of this machine and its GPUs, reuse of freed memory, and out-of-memory errors."""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

import torch

USABLE = 0.75
"""Fraction of the free memory to use; the rest is for tests and fragmentation."""


def free_bytes(device: torch.device) -> int:
    """Free memory now, in bytes."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        found = re.search(r"MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text())
    except OSError:                                         # not Linux: half of the physical memory
        found = None
    here = 1024 * int(found[1]) if found else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    try:                                                    # a container may have less
        used, most = (int(Path("/sys/fs/cgroup", name).read_text()) for name in ("memory.current", "memory.max"))
    except (OSError, ValueError):
        return here
    return min(here, most - used)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether an error, or one that it came from, says that memory could not be allocated.

    >>> is_out_of_memory(RuntimeError("DefaultCPUAllocator: can't allocate memory")), is_out_of_memory(ValueError())
    (True, False)
    """
    if error is None:
        return False
    known = isinstance(error, MemoryError | torch.OutOfMemoryError)
    said = isinstance(error, RuntimeError) and re.search("allocate|out of memory|ALLOC_FAILED", str(error))
    return known or bool(said) or is_out_of_memory(error.__cause__ or error.__context__)


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3     # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of glibc's malloc.h


def keep_freed_memory() -> None:
    """Configure glibc to keep up to 1 GiB of freed memory, from tensors of up to 32 MiB, for the next step.

    On a CPU, mapping a step's temporaries again costs more than computing them: this reduced the step time of 16 small
    networks by a third. No effect without glibc.
    """
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)       # not in every C library
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, 32 << 20)
            mallopt(TRIM_THRESHOLD, 1 << 30)
