"""Rendezvous of processes: the environment variables that torchrun sets, and a common store (torch.distributed's)."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
from torch._C._distributed_c10d import Store as Store
from torch._C._distributed_c10d import TCPStore

from quasiglobal.errors import InputError

MOST_PORT = 65535

Value = TypeVar("Value")

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def launched() -> bool:
    """Whether this process was started as one of several, by torchrun or `qg train --processes`."""
    return all(name in os.environ for name in VARIABLES)


def serve(host: str, port: int) -> TCPStore:
    """Serve a store at this address only; it lives as long as the returned object. Port 0: any free port."""
    _check_port(port)
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family)
    except (OSError, OverflowError) as error:
        raise InputError(f"cannot listen at {host}:{port}: {error}") from None
    chosen = listener.getsockname()[1]
    return TCPStore(host, chosen, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def meet(host: str, port: str, timeout: float) -> TCPStore:
    """Connect to the store served at this address."""
    if port.isdecimal():
        _check_port(int(port))
    try:
        return TCPStore(host, int(port), is_master=False, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0][:120]
        raise InputError(f"cannot reach rendezvous at {host}:{port} ({reason}); is `qg rendezvous` running?") from None


def _check_port(port: int) -> None:
    if not 0 <= port <= MOST_PORT:
        raise InputError(f"port must be at most {MOST_PORT}, got {port}")


def spread(n: int, processes: int) -> list[tuple[int, ...]]:
    """Assign nodes to processes in contiguous blocks.

    >>> spread(5, 2)
    [(0, 1, 2), (3, 4)]
    """
    if not 1 <= processes <= n:
        raise InputError(f"{n} nodes need 1 to {n} processes, got {processes}")
    return [tuple(nodes.tolist()) for nodes in np.array_split(np.arange(n), processes)]


def all_gather(store: Store, about: str, mine: str, rank: int, size: int, timeout: float) -> list[str]:
    """All-gather one string per process."""
    store.set(f"{about}/{rank}", mine)
    names = [f"{about}/{process}" for process in range(size)]
    try:
        store.wait(names, timedelta(seconds=timeout))
    except RuntimeError:
        raise InputError(f"not all {size} processes connected within {timeout:g} s") from None
    return [store.get(name).decode(errors="replace") for name in names]      # strangers may write there too


def join(timeout: float = 60.0) -> tuple[Store, int, int]:
    """Return the store, this process's rank and the number of processes."""
    if not launched():
        missing = ", ".join(name for name in VARIABLES if name not in os.environ)
        raise InputError(
            f"this process was not started as one of several ({missing} not set); use torchrun, or --processes N"
        )
    rank, size, host, port = (os.environ[name] for name in VARIABLES)
    hosted_elsewhere = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if rank == "0" and not hosted_elsewhere and port.isdecimal():
        store = serve(host, int(port))
    else:
        store = meet(host, port, timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(store, f"quasiglobal/{attempt}"), int(rank), int(size)


def until(condition: Callable[[], Value], seconds: float) -> Value:
    """Poll with back-off; return the first truthy value."""
    began, pause = time.monotonic(), 0.002
    while not (value := condition()):
        if time.monotonic() - began > seconds:
            raise TimeoutError(f"no answer within {seconds:g} s")
        time.sleep(pause)
        pause = min(1.5 * pause, 0.1)
    return value


class Meeting(Store):
    """A store, or a prefix of it, with one connection that many threads share; it waits by polling.

    A c10d store blocks its connection while it waits. One connection per edge would be slow where name resolution is
    slow: c10d looks up the name of the other side for each connection.
    """

    def __init__(self, store: Store, prefix: str = "") -> None:
        super().__init__()
        self._connection: list[Any] = store._connection if isinstance(store, Meeting) else [store]
        outer = store._prefix if isinstance(store, Meeting) else ""
        self._prefix: str = outer + (f"{prefix}/" if prefix else "")

    def set(self, key: str, value: str | bytes) -> None:
        """Write a value."""
        self._connection[0].set(self._prefix + key, value)

    def get(self, key: str) -> bytes:
        """Wait until the key exists, then read its value."""
        self.wait([key])
        return bytes(self._connection[0].get(self._prefix + key))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; return the sum."""
        return int(self._connection[0].add(self._prefix + key, amount))

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""
        return bool(self._connection[0].check([self._prefix + key for key in keys]))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        """Wait until all keys exist; raise RuntimeError on timeout, as any store does."""
        try:
            until(lambda: self.check(keys), timeout.total_seconds())
        except TimeoutError as error:
            raise RuntimeError(f"timed out: {error}") from None

    def reconnect(self) -> None:
        """Reconnect to the store; raise OSError if it is unreachable."""
        client = self._connection[0]
        socket.create_connection((client.host, client.port), timeout=1.0).close()   # c10d itself would block
        self._connection[0] = client.clone()
