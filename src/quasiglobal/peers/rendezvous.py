"""Rendezvous of processes: the environment variables that torchrun sets, and a common store."""

from __future__ import annotations

import itertools
import os
import socket
from datetime import timedelta

from quasiglobal.errors import InputError
from quasiglobal.peers.gloo import Meeting, Store, TCPStore

MOST_PORT = 65535

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
    if port.isdigit():
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
    size, rest = divmod(n, processes)
    starts = [rank * size + min(rank, rest) for rank in range(processes + 1)]
    return [tuple(range(first, last)) for first, last in itertools.pairwise(starts)]


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
    if rank == "0" and not hosted_elsewhere and port.isdigit():
        store = serve(host, int(port))
    else:
        store = meet(host, port, timeout)
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Meeting(store, f"quasiglobal/{attempt}"), int(rank), int(size)
