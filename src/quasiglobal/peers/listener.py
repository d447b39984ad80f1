"""The listening socket of a site: strangers may connect, so what is not yet authenticated is bounded."""

from __future__ import annotations

import errno
import ipaddress
import logging
import math
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from quasiglobal.errors import InputError

if sys.platform != "win32":
    import resource

log = logging.getLogger("quasiglobal")

MOST_WAITING = 64
"""Maximum number of connections that are not yet authenticated."""

AGAIN = 60.0
"""Seconds after which the log says again that no connection can be accepted."""

FILES_EACH = 8
"""Open files that such a connection may need for a moment, with room for what is open otherwise."""


def most_waiting() -> int:
    """`MOST_WAITING`, or fewer where a process may open few files: strangers must not use them up."""
    if sys.platform == "win32":
        return MOST_WAITING
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST_WAITING if most == resource.RLIM_INFINITY else max(min(MOST_WAITING, most // FILES_EACH), 2)


class Guest:
    """A connection that is not yet authenticated."""

    def __init__(self, connection: socket.socket, address: str) -> None:
        self.connection, self.address, self.who = connection, address, address
        self.node: int | None = None
        """The site that its certificate proves."""

    @property
    def network(self) -> str:
        """The address, or the part of an IPv6 address that one owner usually has."""
        with suppress(ValueError):
            ip = ipaddress.ip_address(self.address.partition("%")[0])
            if ip.version == 6 and ip.ipv4_mapped is None:
                return str(ipaddress.ip_network((ip, 64), strict=False))
        return self.address

    def dismiss(self) -> None:
        """End the connection; its thread notices."""
        with suppress(OSError):             # an SSLSocket's own shutdown would change the object under its thread
            socket.socket.shutdown(self.connection, socket.SHUT_RDWR)


class Listener:
    """Accepts connections at one address, and calls `receive` with each in a thread of its own.

    A connection counts as waiting until `receive` returns. If too many wait, the oldest one of the network with the
    most is dismissed, so that a flood from one place does not keep others out.
    """

    def __init__(self, host: str, port: int, receive: Callable[[Guest], None]) -> None:
        self._receive, self._closing, self._lock = receive, threading.Event(), threading.Lock()
        self._waiting: list[Guest] = []
        self._most = most_waiting()
        self._room = threading.Semaphore(self._most + self._most // 4)
        """Also for those that were dismissed, until their threads notice."""
        self._socket = bound(host, port)
        self.port: int = self._socket.getsockname()[1]
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def close(self) -> None:
        """Stop listening, and dismiss who waits."""
        self._closing.set()
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)         # wakes `accept`
        self._socket.close()
        with self._lock:
            for guest in self._waiting:
                guest.dismiss()

    def _accept(self) -> None:
        said = -math.inf
        while not self._closing.is_set():
            if not self._room.acquire(timeout=1.0):
                continue
            try:
                connection, address = self._socket.accept()
                guest = Guest(connection, str(address[0]))
                self._make_room()
                with self._lock:
                    self._waiting.append(guest)
                threading.Thread(target=self._host, args=(guest,), daemon=True).start()
            except (OSError, RuntimeError) as error:        # no descriptors or threads left: wait until there are
                self._room.release()
                if not self._closing.is_set() and time.monotonic() - said > AGAIN:
                    said = time.monotonic()
                    log.warning("cannot accept connections for now: %s", error)
                self._closing.wait(0.1)

    def _host(self, guest: Guest) -> None:
        try:
            self._receive(guest)
        except Exception:                                   # no stranger ends a thread with a trace
            log.exception("a connection from %s failed", guest.address)
            guest.dismiss()
        finally:
            self._room.release()
            with self._lock, suppress(ValueError):          # dismissed before
                self._waiting.remove(guest)

    def _make_room(self) -> None:
        with self._lock:
            if len(self._waiting) < self._most:
                return
            counts = Counter(guest.network for guest in self._waiting)
            (crowd, _), = counts.most_common(1)
            oldest = next(guest for guest in self._waiting if guest.network == crowd)
            self._waiting.remove(oldest)
        oldest.dismiss()


def bound(host: str, port: int) -> socket.socket:
    """A listening socket at this address; all addresses of the machine for 0.0.0.0 and ::."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        both: dict[str, Any] = {"dualstack_ipv6": True} if host == "::" and socket.has_dualstack_ipv6() else {}
        return socket.create_server(address[:2], family=family, backlog=128, **both)
    except (OSError, OverflowError) as error:
        taken = getattr(error, "errno", None) == errno.EADDRINUSE
        remedy = "this node may run already" if taken else "name this machine's own address with --listen HOST:PORT"
        why = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
        raise InputError(f"cannot listen at {host}:{port}: {why}; {remedy}") from None


def resolved(host: str, port: int, seconds: float, closing: threading.Event) -> list[Any]:
    """Addresses of a name, as of `getaddrinfo`; TimeoutError if the look-up takes longer than this, or at the end.

    The look-up goes on in its thread: it cannot be stopped.
    """
    found: list[Any] = []
    trouble: list[OSError] = []

    def look_up() -> None:
        try:
            found.extend(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            trouble.append(error)

    thread, deadline = threading.Thread(target=look_up, name="look-up", daemon=True), time.monotonic() + seconds
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline and not closing.is_set():
        thread.join(0.1)
    if trouble:
        raise trouble[0]
    if not found:
        raise TimeoutError(f"{host} was not found in time")
    return list(found)
