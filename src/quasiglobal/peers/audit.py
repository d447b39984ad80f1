"""A site's record of its connections, for its IT department: who connected, when, and how much was sent."""

from __future__ import annotations

import logging
import os
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from quasiglobal.common.files import as_line

log = logging.getLogger("quasiglobal")

AGAIN = 60.0
"""Seconds after which a refusal that repeats is recorded again, with the number of times."""

MOST_KINDS = 1000
"""Maximum number of different refusals to tell apart."""


class Audit:
    """Appends JSON lines to a file, which nothing here shortens; without a file, refusals are only logged."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._refusals: dict[tuple[str, str], tuple[float, int]] = {}
        self._failed = False

    def record(self, event: str, **facts: object) -> None:
        """Append a line; a full disk is logged and stops nothing."""
        if self._path is None:
            return
        now = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = as_line({"time": now, "event": event} | facts) + "\n"
        try:
            file = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(file, line.encode())
            finally:
                os.close(file)
            self._failed = False
        except OSError as error:
            if not self._failed:
                self._failed = True
                log.warning("cannot write %s: %s; connections are not recorded", self._path, error.strerror)

    def refuse(self, whom: str, why: str, logged: bool = True) -> None:
        """Log a refusal once, and record it; a flood of the same refusals is one line a minute.

        `logged` is False if the caller logs it.
        """
        with self._lock:
            if len(self._refusals) > MOST_KINDS:
                self._refusals.clear()
            said, count = self._refusals.get((whom, why), (None, 0))
            due = said is None or time.monotonic() - said > AGAIN
            self._refusals[whom, why] = (time.monotonic(), 0) if due or said is None else (said, count + 1)
        if due:
            self.record("refused", who=whom, reason=why, times=count + 1)
        if said is None and logged:
            log.warning("refused %s: %s", whom, why)
