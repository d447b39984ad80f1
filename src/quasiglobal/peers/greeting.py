"""Greetings on a connection between two sites, after the TLS handshake and before any model.

Each side sends its greeting, compares the other's with its own, and accepts or refuses it. Messages are JSON of at most
`MOST` bytes. Nothing here is secret: TLS has authenticated both sides, and prevents replays.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, fields

from quasiglobal.common.files import Json
from quasiglobal.errors import printable
from quasiglobal.peers.certificates import minute, now
from quasiglobal.peers.edge import Lost, Refused
from quasiglobal.peers.tls import trouble

PROTOCOL = 1
"""Version of the greeting and of the messages after it."""

START = struct.Struct("!4sH")
"""Start of a message: `MAGIC` and the number of bytes that follow."""

MAGIC = b"qgg1"
MOST = 2048

ACCEPTED = {"accepted": True}

FOREIGN = "it does not speak this protocol"

MOST_WHOLE = 2**53
"""Maximum integer: every JSON reader keeps integers up to this one."""


@dataclass(frozen=True)
class Greeting:
    """The facts that two neighbours compare."""

    protocol: int
    library: str
    """Version of this library; a difference is logged, not refused."""
    experiment: str
    """Hash of the experiment."""
    topology: str
    """Fingerprint of the weights."""
    node: int
    step: int
    """Last step completed."""
    serial: int
    """Serial number of the federation file."""
    session: str
    """Random string of the process, the same in all its connections."""
    renews: int = 0
    """1: this connection replaces an open one, before a certificate ends; 0: it opens an edge."""

    def misfit(self, other: Greeting) -> str:
        """Describe the contradictions between another greeting and this one; empty if they fit."""
        if other.protocol != self.protocol:
            return f"it speaks protocol {other.protocol}, this node {self.protocol}; install the same quasiglobal"
        wrong = [
            f"its {name} is {theirs[:12]}, not {mine[:12]}"
            for name in ("experiment", "topology")
            if (theirs := getattr(other, name)) != (mine := getattr(self, name))
        ]
        return " and ".join(wrong) + ("; compare the experiment files" if wrong else "")


def exchange(
    connection: socket.socket, mine: Greeting, deadline: float, check: Callable[[Greeting], str] = lambda theirs: ""
) -> Greeting:
    """Exchange greetings; return the other's if both sides accept, else raise `Refused` with the reason.

    `check` returns a further reason to refuse it, or an empty string.
    """
    _send(connection, asdict(mine), deadline)
    said = _receive(connection, deadline)
    if "refused" in said:
        raise _refusal(said)
    theirs = parsed(said)
    if wrong := mine.misfit(theirs) or check(theirs):
        refuse(connection, wrong, deadline)
        raise Refused(wrong)
    accept(connection, deadline)
    answer = _receive(connection, deadline)
    if answer != ACCEPTED:
        raise _refusal(answer)
    return theirs


def refuse(connection: socket.socket, why: str, deadline: float, clock: bool = False) -> None:
    """Send the reason, instead of a greeting or an acceptance; ignore a closed connection.

    `clock`: ask the other side to add the time of its clock.
    """
    words: Json = {"refused": why[:300].encode("ascii", "replace").decode()}
    with suppress(Lost):
        _send(connection, words | {"clock": True} if clock else words, deadline)


def _refusal(said: Json) -> Refused:
    own = f"; it is {minute(now())} by the clock of this node" if said.get("clock") is True else ""
    return Refused(f"it refused this node: {_text(said.get('refused', FOREIGN))}{own}")


def ask_to_meet(connection: socket.socket, there: int, deadline: float) -> None:
    """Ask a relay, instead of a greeting, for a connection to another site; raise `Refused` if it does not relay."""
    _send(connection, {"meet": there}, deadline)
    answer = _receive(connection, deadline)
    if answer != ACCEPTED:
        raise Refused(f"it refused this node: {_text(answer.get('refused', FOREIGN))}")


def asked_to_meet(connection: socket.socket, deadline: float) -> int:
    """The site that another one asks this relay for."""
    return _whole(_receive(connection, deadline).get("meet"))


def accept(connection: socket.socket, deadline: float) -> None:
    """Accept a greeting, or a request to a relay."""
    _send(connection, ACCEPTED, deadline)


def parsed(said: Json) -> Greeting:
    """The greeting in a received object; unknown members are ignored."""
    values = {field.name: said.get(field.name) for field in fields(Greeting)}
    if values["protocol"] != PROTOCOL and type(values["protocol"]) is int:
        return Greeting(_whole(values["protocol"]), "", "", "", 0, 0, 0, "")
    numbers = {field.name for field in fields(Greeting) if field.type == "int"}
    checked: Json = {name: _whole(value) if name in numbers else _text(value) for name, value in values.items()}
    return Greeting(**checked)


def _whole(value: object) -> int:
    if type(value) is not int or not 0 <= value <= MOST_WHOLE:
        raise Refused(FOREIGN)
    return value


def _text(value: object) -> str:
    """A string that is safe to log; raise `Refused` if the value is no short string."""
    if type(value) is not str or len(value) > MOST:
        raise Refused(FOREIGN)
    return printable(value, keep="")[:300]


def _send(connection: socket.socket, words: Json, deadline: float) -> None:
    text = json.dumps(words).encode()
    try:
        connection.settimeout(_left(deadline))
        connection.sendall(START.pack(MAGIC, len(text)) + text)
    except OSError as error:
        raise trouble(error) from None


def _receive(connection: socket.socket, deadline: float) -> Json:
    magic, size = START.unpack(_exactly(connection, START.size, deadline))
    if magic != MAGIC or size > MOST:
        raise Refused(FOREIGN)
    try:
        said = json.loads(_exactly(connection, size, deadline), parse_constant=_whole)        # NaN is no JSON
    except (ValueError, RecursionError):
        raise Refused(FOREIGN) from None
    if not isinstance(said, dict):
        raise Refused(FOREIGN)
    return said


def _exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Receive exactly this many bytes by the deadline."""
    found = bytearray()
    while len(found) < count:
        try:
            connection.settimeout(_left(deadline))
            part = connection.recv(count - len(found))
        except OSError as error:
            raise trouble(error) from None
        if not part:
            raise Lost("it closed the connection")
        found += part
    return bytes(found)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
