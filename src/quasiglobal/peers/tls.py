"""A channel over mutual TLS 1.3, for sites.

An SSL object must not be used by two threads, so one thread per channel owns it: it writes queued messages, and reads
into the receiver's buffer, directly from and to the memory of the tensors. It reads nothing before there is a buffer:
a peer that sends too much waits, and cannot fill the memory.
"""

from __future__ import annotations

import select
import socket
import ssl
import threading
import time
from collections import deque
from contextlib import suppress

import torch
from torch import Tensor

from quasiglobal.peers.bandwidth import Cap
from quasiglobal.peers.edge import Channel, Lost, Refused, Sending

LINGER = 5.0
"""Seconds in which a closed connection still delivers sent messages."""

KEEPALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""An idle connection is tested after 15 s, which firewalls and NAT need too, and given up 20 s later."""

NO_ISSUER = (18, 19, 20, 21)
"""Codes of OpenSSL for a certificate that none of the federation's keys signed."""

UNKNOWN = "its key is not in this site's federation file: it is revoked or not approved yet; ask the organiser"

UNKNOWN_THERE = (
    "its federation file does not have this site's key: this site is revoked or not approved yet; ask the organiser"
)


def prepare(connection: socket.socket, timeout: float) -> None:
    """Set the options of a TCP connection; give up one that acknowledges nothing for `timeout` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = KEEPALIVE | {"TCP_USER_TIMEOUT": round(1000 * timeout)}
    for name, value in options.items():
        if hasattr(socket, name):                           # not on every system
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class TLSChannel(Channel):
    """A connection after its handshake; `cap` is the limit of what this process sends."""

    def __init__(self, connection: ssl.SSLSocket, cap: Cap | None = None) -> None:
        connection.setblocking(False)
        self._connection, self._cap = connection, cap or Cap()
        self._pause: float | None = None
        """Milliseconds until the cap allows to send; None if it does now."""
        self.sent = self.received = 0
        """Bytes in each direction."""
        self._out: deque[_Message] = deque()
        self._into: memoryview | None = None
        self._state = threading.Condition()
        self._no_sends: str | None = None
        self._no_reads: str | None = None
        self._hung_up = self._closing = False
        self.ended = threading.Event()
        """Set when no more bytes are counted."""
        self._bell, self._wake = socket.socketpair()
        for end in (self._bell, self._wake):
            end.setblocking(False)
        threading.Thread(target=self._run, name="tls", daemon=True).start()

    @property
    def alive(self) -> bool:
        """Whether both directions are open, as far as known here."""
        return not (self._hung_up or self._closing or self._no_sends or self._no_reads)

    def send(self, message: Tensor) -> Sending:
        """Queue a message."""
        queued = _Message(self, message)
        with self._state:
            if self._no_sends is not None:
                raise Lost(self._no_sends)
            if queued.left:
                self._out.append(queued)
        self._ring()
        return queued

    def recv_into(self, buffer: Tensor, deadline: float) -> None:
        """Fill the buffer; close the connection if the bytes do not arrive in time."""
        with self._state:
            if self._no_reads is not None:
                raise Lost(self._no_reads)
            self._into = _bytes(buffer)
            self._ring()
            self._state.wait_for(lambda: not self._into or self._no_reads, max(deadline - time.monotonic(), 0.0))
            late, self._into, why = bool(self._into), None, self._no_reads
        if late and why is not None:
            raise Lost(why)
        if late:
            self.close()
            raise Lost("it did not answer in time")

    def moved(self) -> tuple[int, int]:
        """Bytes in each direction."""
        return self.sent, self.received

    def close(self) -> None:
        """Close the connection in the background; sent messages still arrive."""
        with self._state:
            self._closing = True
            self._no_sends = self._no_sends or "this process closed the connection"
            self._no_reads = self._no_reads or "this process closed the connection"
            self._state.notify_all()
        self._ring()

    def _ring(self) -> None:
        with suppress(OSError):                             # full: it rings already; closed: nobody listens
            self._wake.send(b"!")

    def _run(self) -> None:
        """Send and receive until closed; the only thread that touches the connection."""
        watch = select.poll()
        watch.register(self._bell, select.POLLIN)
        while not self._closing:
            wanted = self._write() | self._read()
            if wanted & MOVED:
                continue
            if not self._hung_up:
                wanted |= HANG_UP
            if wanted:
                watch.register(self._connection, wanted)
            else:                                           # else a hang-up would be reported again and again
                with suppress(KeyError):
                    watch.unregister(self._connection)
            for which, event in watch.poll(self._pause):
                if which == self._bell.fileno():
                    with suppress(OSError):
                        self._bell.recv(4096)
                elif event & (HANG_UP | select.POLLHUP | select.POLLERR):
                    self._hung_up = True
        with self._state:
            self._out.clear()                               # each message refers to this channel
        self.ended.set()
        self._bell.close()
        self._wake.close()
        try:                                                # outlives the main thread, as this one does not
            threading.Thread(target=close_gently, args=(self._connection, LINGER), name="tls-close").start()
        except RuntimeError:                                # the interpreter ends
            self._connection.close()

    def _write(self) -> int:
        """Write some bytes of the first message; return the events to wait for."""
        with self._state:
            message = self._out[0] if self._out and not self._no_sends else None
        self._pause = None
        if message is None:
            return 0
        if pause := self._cap.pause():
            self._pause = 1000 * pause
            return 0
        try:
            count = self._connection.send(message.left[: self._cap.piece])
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except ssl.SSLWantReadError:
            return select.POLLIN
        except (OSError, ValueError) as error:
            with self._state:
                self._no_sends = self._no_sends or reason(error)
                self._out.clear()
                self._state.notify_all()
            return 0
        self.sent += count
        self._cap.count(count)
        message.left = message.left[count:]
        if not message.left:
            with self._state:
                self._out.popleft()
                self._state.notify_all()
        return MOVED

    def _read(self) -> int:
        """Read some bytes into the buffer; return the events to wait for."""
        with self._state:
            into = self._into if not self._no_reads else None
        if not into:
            return 0
        trouble = "it closed the connection"
        try:
            count = self._connection.recv_into(into)
        except ssl.SSLWantReadError:
            return select.POLLIN
        except ssl.SSLWantWriteError:
            return select.POLLOUT
        except (OSError, ValueError) as error:
            count, trouble = 0, reason(error)
        self.received += count
        with self._state:
            if count == 0:
                self._no_reads = self._no_reads or trouble
            elif self._into is not None:
                self._into = into[count:]
            if count == 0 or not self._into:
                self._state.notify_all()
        return MOVED if count else 0


MOVED = 1 << 16
"""Result of a read or write that moved bytes: try again before waiting."""

HANG_UP = getattr(select, "POLLRDHUP", 0)


class _Message(Sending):
    """A message, and the part of it that is still to be sent."""

    def __init__(self, channel: TLSChannel, message: Tensor) -> None:
        self._channel, self.left = channel, _bytes(message)

    def wait(self, deadline: float) -> None:
        of = self._channel
        with of._state:
            of._state.wait_for(lambda: not self.left or of._no_sends, max(deadline - time.monotonic(), 0.0))
            if self.left:
                raise Lost(of._no_sends or "it did not answer in time")


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor."""
    return memoryview(tensor.detach().view(-1).view(torch.uint8).numpy())       # type: ignore[arg-type]


def close_gently(connection: socket.socket, seconds: float) -> None:
    """Close a connection: notify the other side, and read until it closes too, for at most `seconds`.

    Closing with unread bytes resets the connection, and the other side could lose sent messages.
    """
    deadline = time.monotonic() + seconds
    if isinstance(connection, ssl.SSLSocket):
        with suppress(OSError, ValueError):
            connection.setblocking(False)
            connection.unwrap()
    with connection, suppress(OSError, ValueError):
        connection.shutdown(socket.SHUT_WR)
        while (left := deadline - time.monotonic()) > 0:
            connection.settimeout(left)
            if not connection.recv(65536):
                return


def trouble(error: Exception) -> Lost:
    """`Refused` if one side does not accept the other's certificate, else `Lost`."""
    if isinstance(error, ssl.SSLCertVerificationError):
        unknown = error.verify_code in NO_ISSUER
        return Refused(UNKNOWN if unknown else f"its certificate is not accepted: {error.verify_message}")
    if isinstance(error, ssl.SSLError) and "_ALERT_" in (error.reason or ""):
        alert = (error.reason or "").partition("_ALERT_")[2].lower().replace("_", " ")
        unknown = alert == "unknown ca"
        return Refused(UNKNOWN_THERE if unknown else f"it does not accept this site's certificate: {alert}")
    return Lost(reason(error))


def reason(error: Exception) -> str:
    """Describe a connection error."""
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, ssl.SSLEOFError | ConnectionResetError | BrokenPipeError | ssl.SSLZeroReturnError):
        return "it closed the connection"
    if isinstance(error, ssl.SSLError):
        return f"it does not speak TLS 1.3 as expected: {(error.reason or str(error)).lower().replace('_', ' ')[:80]}"
    return (getattr(error, "strerror", None) or str(error) or "it closed the connection")[:120]
