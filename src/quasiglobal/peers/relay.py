"""A relay: a site that connects two others, which can both only dial, and passes on what they encrypt for each other.

Each of the two dials the relay, proves by mutual TLS which site it is, and names the other one. Then this TLS session
ends, and the bare connection waits. Once both sites are there, the relay sends each the byte `MET`, and passes on what
they send: a TLS session between the two, which it can neither read nor change without being noticed.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from quasiglobal.peers.bandwidth import Cap

PROTOCOL = "qg-relay"
"""Name of a request to a relay in the TLS handshake (ALPN); other connections name no protocol."""

MET = b"!"
"""First byte on a relayed connection: the other site is there."""

IDLE = 7200.0
"""Seconds without a byte after which a connection is closed: a neighbour may load its data for one hour."""

TICK = 5.0
"""Maximum seconds between two looks at the connections."""

MOST_SPLICES = 2
"""Connections between the same two sites: a renewed one replaces the other."""

PIECE = 2**16
"""Bytes that are passed on at a time."""


@dataclass(eq=False)
class End:
    """The connection of a site that asks for another one."""

    connection: socket.socket
    node: int
    to: int
    """The site that it asks for."""
    key: str
    """Fingerprint of its key."""
    address: str
    other: End | None = None
    """The other site's connection, once it is there."""
    held: bytes | memoryview = b""
    """Bytes from this end that the other has not got yet."""
    received: int = 0
    heard: float = 0.0
    """Time of the last byte."""
    over: bool = False
    """Whether this end sends no more."""
    cut: bool = False
    """Whether to close the connection."""


def bare(connection: ssl.SSLSocket) -> socket.socket:
    """End the TLS session of a connection; return the connection, whose next bytes are not encrypted."""
    return socket.socket(fileno=connection.unwrap().detach())


def subject(pair: Sequence[End]) -> str:
    """The name of two sites in the audit."""
    return " and ".join(f"node {end.node}" for end in pair)


class Relay:
    """Connects sites. One thread owns the connections, of which there are at most `most`.

    `record` receives a subject, an event and its facts, for the audit; `cap` limits what this process sends.
    """

    def __init__(self, record: Callable[..., object], cap: Cap, most: int) -> None:
        self._record, self._cap, self._most = record, cap, most
        self._lock, self._closing = threading.Lock(), False
        self._ends: list[End] = []
        self._bell, self._wake = socket.socketpair()
        for end in (self._bell, self._wake):
            end.setblocking(False)
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    @property
    def busy(self) -> bool:
        """Whether a site waits here, or is connected to another one."""
        return bool(self._ends)

    def take(self, end: End) -> None:
        """Take over a connection: splice it with that of the site it asks for, or keep it until that one comes.

        An earlier request of the site for the same one makes way. If there is no more room, so does the oldest waiting
        connection of the site with the most; if none waits, this one is closed.
        """
        end.connection.setblocking(False)
        end.heard = time.monotonic()
        with self._lock:
            for one in self._ends:
                one.cut |= one.other is None and (one.node, one.to) == (end.node, end.to)
            there = [one for one in self._ends if not one.cut]
            if self._closing or not self._has_room(there):
                end.connection.close()
                return
            same = [one for one in there if (one.node, one.to) == (end.node, end.to)]
            for earlier in same[: 1 - MOST_SPLICES]:
                earlier.cut = True
            found = (one for one in there if one.other is None and (one.to, one.node) == (end.node, end.to))
            end.other = next(found, None)
            if end.other is not None:
                end.other.other = end
                end.held = end.other.held = MET
                end.other.heard = end.heard
            self._ends.append(end)
        if end.other is not None:
            pair = sorted((end, end.other), key=lambda one: one.node)
            self._record(
                subject(pair), "relay opened", nodes=[one.node for one in pair], keys=[one.key for one in pair],
                addresses=[one.address for one in pair],
            )
        self._ring()

    def keep(self, fits: Callable[[End], bool]) -> None:
        """Cut the connections that do not fit a newer federation file."""
        with self._lock:
            for end in self._ends:
                end.cut |= not fits(end)
        self._ring()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            self._closing = True
        self._ring()

    def _has_room(self, there: list[End]) -> bool:
        if len(there) < self._most:
            return True
        waiting = [one for one in there if one.other is None]
        for crowd, _ in Counter(one.node for one in waiting).most_common(1):
            next(one for one in waiting if one.node == crowd).cut = True
        return bool(waiting)

    def _ring(self) -> None:
        with suppress(OSError):                             # full: it rings already; closed: nobody listens
            self._wake.send(b"!")

    def _run(self) -> None:
        """Pass on bytes until closed; the only thread that reads, writes and closes the connections."""
        while not self._closing:
            pause, watch, at = self._cap.pause(), select.poll(), dict[int, End]()
            watch.register(self._bell, select.POLLIN)
            for end in self._ends[:]:
                wanted = 0 if end.held or end.over else select.POLLIN
                wanted |= select.POLLOUT if end.other and end.other.held and not pause else 0
                if wanted:
                    at[end.connection.fileno()] = end
                    watch.register(end.connection, wanted)
            for file, event in watch.poll(1000 * (pause or TICK)):
                if file not in at:
                    with suppress(OSError):
                        self._bell.recv(4096)
                    continue
                if event & select.POLLOUT:
                    self._send(at[file])
                if event & ~select.POLLOUT:
                    self._receive(at[file])
            self._close_ended()
        with self._lock:
            for end in self._ends:
                end.cut = True
        self._close_ended()
        self._bell.close()
        self._wake.close()

    def _receive(self, end: End) -> None:
        if end.held or end.over:                            # it hung up: what it sent comes first
            return
        try:
            end.held = end.connection.recv(PIECE)
        except BlockingIOError:
            return
        except OSError:
            end.cut = True
        end.heard = time.monotonic()
        end.received += len(end.held)
        end.over = not end.held
        end.cut |= end.other is None                        # one that waits leaves, or speaks before it may
        self._pass_on_end(end)

    def _send(self, end: End) -> None:
        """Send this end what the other one sent."""
        assert end.other is not None
        try:
            count = end.connection.send(end.other.held[: self._cap.piece])
        except BlockingIOError:
            return
        except OSError:
            end.cut = True
            return
        self._cap.count(count)
        end.other.held = memoryview(end.other.held)[count:]
        self._pass_on_end(end.other)

    @staticmethod
    def _pass_on_end(end: End) -> None:
        """Once an end sends no more, tell the other one."""
        if end.over and not end.held and end.other is not None:
            with suppress(OSError):
                end.other.connection.shutdown(socket.SHUT_WR)
            end.cut |= end.other.over and not end.other.held

    def _close_ended(self) -> None:
        """Close the connections that are cut, of which the other end is, or on which nothing comes any more."""
        now, gone = time.monotonic(), list[End]()
        with self._lock:
            for end in self._ends:
                heard = max(end.heard, end.other.heard if end.other else 0.0)
                if end.cut or (end.other and end.other.cut) or now - heard > IDLE:
                    gone.append(end)
            self._ends = [end for end in self._ends if end not in gone]
            for end in gone:
                end.cut = True
        for end in gone:
            end.connection.close()
            if end.other is not None and end.node < end.to:
                self._record(
                    subject([end, end.other]), "relay closed", nodes=[end.node, end.to],
                    bytes=[end.received, end.other.received],
                )
