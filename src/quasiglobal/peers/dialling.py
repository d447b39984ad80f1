"""Dial an address: look up its name and connect to it, directly or through an HTTP proxy."""

from __future__ import annotations

import base64
import os
import queue
import re
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeAlias

from quasiglobal.errors import InputError
from quasiglobal.peers.edge import Lost, Refused
from quasiglobal.peers.federation_file import read_address, split_address
from quasiglobal.peers.tls import reason

LOOK_UP = 30.0
"""Additional seconds for looking up a name: with a dead name server, each look-up takes 5 to 10 s."""

CREDENTIALS = "QG_PROXY_AUTH"
"""Environment variable with user:password for the proxy; other users of the machine can read arguments."""

MOST_HEAD = 8192
"""Maximum size of a proxy's answer in bytes."""

REMEDIES = {
    403: "; allow this address and port in the proxy",
    407: f"; set {CREDENTIALS}=user:password (Basic is the only method)",
}
"""What to do about a proxy's status."""

Place: TypeAlias = tuple[
    socket.AddressFamily, socket.SocketKind, int, str, tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes]
]
"""An address as `getaddrinfo` returns it."""


@dataclass(frozen=True)
class Proxy:
    """An HTTP proxy that connects to addresses on request (CONNECT), and looks up their names."""

    address: str
    credentials: str = field(default="", repr=False)
    """user:password for Basic authentication, or an empty string."""

    def open(self, connection: socket.socket, address: str, deadline: float) -> None:
        """Request a connection to an address; afterwards, the bytes on this connection are those of the address."""
        request = f"CONNECT {address} HTTP/1.1\r\nHost: {address}\r\n"
        if self.credentials:
            request += f"Proxy-Authorization: Basic {base64.b64encode(self.credentials.encode()).decode()}\r\n"
        head = bytearray()
        try:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(f"{request}\r\n".encode())
            while not head.endswith(b"\r\n\r\n"):           # byte by byte: the next ones are not the proxy's
                connection.settimeout(max(deadline - time.monotonic(), 0.001))
                byte = connection.recv(1)
                if not byte or len(head) == MOST_HEAD:
                    raise Refused(f"{self.address} does not answer as an HTTP proxy")
                head += byte
        except OSError as error:
            raise OSError(f"the proxy {self.address}: {reason(error)}") from None
        found = re.match(rb"HTTP/1\.[01] ([0-9]{3}) ?([ -~]{0,80})", head)
        if found is None:
            raise Refused(f"{self.address} does not answer as an HTTP proxy")
        status = int(found[1])
        if status // 100 != 2:
            kind = Refused if status // 100 == 4 else OSError       # others, such as 502, may pass
            why = f"{status} {found[2].decode()}".strip() + REMEDIES.get(status, "")
            raise kind(f"the proxy {self.address} does not connect to {address}: {why}")


def read_proxy(text: str) -> Proxy:
    """The proxy at http://HOST:PORT, with the credentials in the environment.

    >>> read_proxy("http://proxy.example:3128").address
    'proxy.example:3128'
    """
    if "@" in text:
        raise InputError(f"leave user and password out of --proxy, where others can read them; set {CREDENTIALS}")
    found = re.fullmatch(r"http://([A-Za-z0-9.:_\[\]-]+)/?", text)
    address = found and split_address(found[1])[1] and read_address(found[1], "the proxy")
    if not address:
        raise InputError(f"proxy must be http://HOST:PORT, as in http://proxy.example:3128, got {text[:80]!r}")
    return Proxy(address, os.environ.get(CREDENTIALS, ""))


def connected(
    address: str,
    deadline: float,
    closing: threading.Event,
    hold: Callable[[socket.socket], None],
    proxy: Proxy | None = None,
) -> tuple[socket.socket, float]:
    """Try each IP address of the name; return a TCP connection, and the deadline extended by the look-up.

    `hold` receives each connection before it is made, so that another thread can end it. Raise OSError if nobody
    answers, and `Refused` if the proxy refuses.
    """
    failed, began = OSError("it has no address"), time.monotonic()
    found = resolved(*split_address(proxy.address if proxy else address), LOOK_UP, closing)
    deadline += time.monotonic() - began
    for k, (family, kind, protocol, _, place) in enumerate(found):
        connection = socket.socket(family, kind, protocol)
        hold(connection)
        try:
            if closing.is_set():
                raise TimeoutError
            connection.settimeout(max((deadline - time.monotonic()) / (len(found) - k), 0.001))
            connection.connect(place)
        except OSError as error:
            failed = OSError(f"the proxy {proxy.address}: {reason(error)}" if proxy else reason(error))
            connection.close()
            continue
        if proxy:
            try:
                proxy.open(connection, address, deadline)
            except (Lost, OSError):
                connection.close()
                raise
        return connection, deadline
    raise failed


class Unresolved(OSError):
    """The name of a host has no address."""


def resolved(host: str, port: int, seconds: float, closing: threading.Event) -> Sequence[Place]:
    """Addresses of a name; raise `Unresolved` after `seconds`, or when `closing` is set.

    The look-up continues in its thread: it cannot be stopped.
    """
    found: queue.SimpleQueue[Sequence[Place] | str] = queue.SimpleQueue()

    def look_up() -> None:
        try:
            found.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except OSError as error:
            found.put(reason(error))
        except UnicodeError:                                # an empty label, or one of more than 63 characters
            found.put(f"{host} is not the name of a host")

    deadline = time.monotonic() + seconds
    threading.Thread(target=look_up, name="look-up", daemon=True).start()
    while time.monotonic() < deadline and not closing.is_set():
        with suppress(queue.Empty):
            places = found.get(timeout=0.1)
            if isinstance(places, str):
                raise Unresolved(places)
            return places
    raise Unresolved(f"{host} was not found in time")
