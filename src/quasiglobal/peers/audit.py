"""The record of a site's connections: JSON lines, each chained to the one before by a hash; and a reader of it.

A line's entry `before` is the SHA-256 of the line before it, without the line break. If that one has no such entry, as
lines of version 2, and for the first line, it is the SHA-256 of all bytes before. A crash may tear the last line: the
next line then has the SHA-256 of the torn one in its entry `torn`, and continues the whole line before that.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import BinaryIO

from quasiglobal.common.files import Json, as_line
from quasiglobal.errors import InputError

if sys.platform != "win32":
    import fcntl

AUDIT = "audit.jsonl"
"""File in a run folder that records a site's connections."""

BLOCK = 4096
"""Bytes read at once to find the last line."""


def append(path: Path, facts: Mapping[str, object]) -> None:
    """Append a line, chained to the last one; raise OSError if it cannot be written."""
    with open(path, "a+b", opener=partial(os.open, mode=0o600)) as file, _locked(file):
        last, torn = _last_line(file)
        if _is_chained(last):
            before = _sha256(last)
        else:                                               # the file is empty, or of version 2
            file.seek(0)
            before = _sha256(file.read()[: -len(torn) or None])
        chain = {"before": before} | ({"torn": _sha256(torn)} if torn else {})
        file.write(b"\n" * bool(torn) + as_line(dict(facts) | chain).encode() + b"\n")


@contextmanager
def _locked(file: BinaryIO) -> Iterator[None]:
    """Let no other process append meanwhile."""
    if sys.platform != "win32":
        fcntl.flock(file, fcntl.LOCK_EX)                    # until the file is closed
    yield


def _last_line(file: BinaryIO) -> tuple[bytes, bytes]:
    """The last whole line, and the bytes of a torn one after it."""
    end = size = file.seek(0, os.SEEK_END)
    found = b""
    while end and found.count(b"\n") < 2:
        end = max(end - BLOCK, 0)
        file.seek(end)
        found = file.read(size - end)
    *lines, torn = found.split(b"\n")
    return lines[-1] if lines else b"", torn


def _is_chained(line: bytes) -> bool:
    return isinstance(_parsed(line).get("before"), str)


def _parsed(line: bytes) -> Json:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# ---------------------------------------------------------------------------------------- reading

CHANGED = "does not continue the line before it: a line was changed, inserted or removed there"
UNCHAINED = "has no hash: it was changed or inserted, or version 2 wrote it"
"""Why the chain breaks at a line."""


@dataclass
class Trail:
    """The content of an audit file, and the state of its chain."""

    lines: list[Json] = field(default_factory=list)
    """All readable lines, each with its `line` number."""
    unchained: int = 0
    """Number of lines at the start that a version without the chain wrote."""
    torn: list[int] = field(default_factory=list)
    """Numbers of the lines that a crash tore."""
    breaks: dict[int, str] = field(default_factory=dict)
    """The lines at which the chain breaks, and why."""
    hashes: list[str] = field(default_factory=list)
    """The hash that continues each line; the last one proves the whole file to whoever has noted it."""

    @classmethod
    def read(cls, path: Path) -> Trail:
        """Read an audit file and check its chain."""
        try:
            *lines, rest = path.read_bytes().split(b"\n")
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from None
        found, whole, expected = cls(), hashlib.sha256(), _sha256(b"")
        parsed = [_parsed(line) for line in lines]
        for number, (line, values) in enumerate(zip(lines, parsed, strict=True), start=1):
            whole.update(line + b"\n")
            if number < len(parsed) and parsed[number].get("torn") == _sha256(line):
                found.torn.append(number)
            else:
                if values:
                    found.lines.append({"line": number} | values)
                if _is_chained(line):
                    if values["before"] != expected or ("torn" in values) != (found.torn[-1:] == [number - 1]):
                        found.breaks[number] = CHANGED
                elif number == found.unchained + 1:
                    found.unchained = number
                else:
                    found.breaks[number] = UNCHAINED
                expected = _sha256(line) if _is_chained(line) else whole.hexdigest()
            found.hashes.append(expected)
        if rest:
            found.torn.append(len(lines) + 1)
        return found

    @property
    def last_hash(self) -> str:
        """The hash that a next line would have."""
        return self.hashes[-1] if self.hashes else ""

    def place_of(self, noted: str) -> int:
        """The number of the line with this hash; 0 if there is none."""
        return self.hashes.index(noted) + 1 if noted in self.hashes else 0


class Story:
    """What the lines of an audit file say: the processes of the site, its connections, and everything else."""

    def __init__(self, lines: Sequence[Json]) -> None:
        self.processes: list[Json] = []
        """The starts: began, until, end, node, site, version, experiment, data, key, steps."""
        self.connections: list[Json] = []
        """The connections: node, site, key, certificate, address, dialled, relay, began, until, end, sent, received."""
        self.events: list[Json] = []
        """The other lines, such as refusals, revocations and results that were given."""
        self._open: list[Json] = []
        known: dict[object, Callable[[Json], object]] = {
            "started": self._started, "connected": self._connected, "renewed": self._connected,
            "traffic": self._traffic, "closed": self._closed, "finished": self._finished,
        }
        for line in lines:
            try:
                known.get(line.get("event"), self.events.append)(line)
            except (LookupError, TypeError, ValueError, OverflowError, AttributeError):   # not written by us
                self.events.append(line)

    def _started(self, line: Json) -> None:
        step = int(line["step"])
        own = _texts(line, "site", "version", "federation", "experiment", "data", "key")
        self.processes.append(_begun(line) | own | {"steps": [step, step]})
        self._open = []                                     # those of an earlier process have ended with it

    def _connected(self, line: Json) -> None:
        whom = _texts(line, "site", "key", "certificate", "address", "dialled")
        whom |= {"relay": line["relay"]} if "relay" in line else {}
        self.connections.append(_begun(line) | whom | {"sent": 0, "received": 0})
        self._open.append({"row": self.connections[-1], "number": line.get("connection")})

    def _traffic(self, line: Json) -> None:
        for edge in line["edges"]:
            with suppress(ValueError):                      # too many connections began, so its beginning was left out
                self._moved(edge, line)

    def _closed(self, line: Json) -> None:
        one = self._moved(line, line)
        one["row"]["end"] = "closed"
        self._open.remove(one)

    def _finished(self, line: Json) -> None:
        self._went_on(line)
        self.processes[-1]["end"] = str(line["status"])

    def _moved(self, edge: Json, line: Json) -> Json:
        """Note the bytes of a connection; lines of version 2 do not number them, and the oldest one ends first."""
        for one in self._open:
            if one["row"]["node"] == int(edge["node"]) and one["number"] == edge.get("connection"):
                amounts = {name: int(edge[name]) for name in ("sent", "received")}
                one["row"].update(amounts, until=str(line["time"]))
                self._went_on(line)
                return one
        raise ValueError("it has not begun")

    def _went_on(self, line: Json) -> None:
        if self.processes:
            now = self.processes[-1]
            now["until"], now["steps"] = str(line["time"]), [now["steps"][0], max(now["steps"][1], int(line["step"]))]


def _begun(line: Json) -> Json:
    """The beginning of a process or a connection, whose end is not known yet."""
    return {"began": str(line["time"]), "until": str(line["time"]), "end": None, "node": int(line["node"])}


def _texts(line: Json, *names: str) -> Json:
    return {name: None if line.get(name) is None else str(line[name]) for name in names}
