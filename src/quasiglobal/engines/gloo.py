"""Groups of processes on gloo, as torch.distributed has them; typed here, since its stubs leave most of them out."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, Store, TCPStore

__all__ = ["Group", "PrefixStore", "Store", "TCPStore", "another", "open_group"]

Group = Any
"""A ProcessGroupGloo."""


def another(store: Store) -> Store:
    """A connection of its own to the same store: waiting on one blocks it."""
    client: Any = store
    connected: Store = client.clone()
    return connected


def open_group(store: Store, rank: int, size: int, host: str, seconds: float) -> Group:
    """All `size` processes that call this with the same store; it listens at this machine's address `host`."""
    gloo: Any = ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timedelta(seconds=seconds)
    options._devices = [gloo.create_device(hostname=host)]
    return gloo(store, rank, size, options)
