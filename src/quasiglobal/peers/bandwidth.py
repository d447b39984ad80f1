"""A cap on the bytes that a site sends: `--bandwidth 50mbit`."""

from __future__ import annotations

import math
import re
import threading
import time

from quasiglobal.errors import InputError

UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
"""Bits per second."""

ON_THE_WIRE = 1.06
"""Bytes on the wire per byte of a message: headers of TLS, TCP, IP and Ethernet take up to 6 %."""

BURST = 0.1
"""Seconds of the cap that a pause may save up, so that late wake-ups of a thread do not lower the rate."""


def read_bandwidth(text: str) -> float:
    """Bytes per second.

    >>> read_bandwidth("50mbit")
    6250000.0
    """
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)(kbit|mbit|gbit)", text.strip().lower())
    if found is None or not float(found[1]) > 0:
        raise InputError(f"bandwidth must be a number with kbit, mbit or gbit (per second), as in 50mbit, got {text!r}")
    return float(found[1]) * UNITS[found[2]] / 8


class Cap:
    """A token bucket for all connections of a site together, at `rate` bytes per second."""

    def __init__(self, rate: float = math.inf) -> None:
        self._rate, self._lock = rate, threading.Lock()
        self.piece = int(min(max(BURST * rate, 1024), 2**18))
        """Maximum number of bytes to send at a time."""
        self._due = 0.0
        """The time at which a link of this rate has carried all that was sent."""

    def pause(self) -> float:
        """Seconds until more may be sent."""
        return max(self._due - time.monotonic(), 0.0)

    def count(self, size: int) -> None:
        """Note that so many bytes of messages were sent."""
        with self._lock:
            self._due = max(self._due, time.monotonic() - BURST) + ON_THE_WIRE * size / self._rate
