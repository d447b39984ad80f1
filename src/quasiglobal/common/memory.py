"""Free memory of this machine and of its GPUs, and errors that say that there is too little."""

from __future__ import annotations

import os
import re
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
