"""A limit on the reports about each neighbour, and about strangers: nobody can fill the log or the audit."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

PERIOD = 60.0
"""Seconds over which reports are counted."""

MOST_REPORTS = 10
"""Different reports about one subject in a period."""

STRANGERS = "strangers"
"""The subject of reports about whoever has not proved to be a neighbour: strangers may have any number of addresses."""


class Reports:
    """Says which reports to write: in a minute each report once, and at most `MOST_REPORTS` about each subject.

    A report without a text repeats no other. `write(subject, sums)` writes the sums of what was left out, "times" among
    them, once the minute is over.
    """

    def __init__(self, write: Callable[[str, Counter[str]], None]) -> None:
        self._write = write
        self._lock = threading.Lock()
        self._minutes: dict[str, _Minute] = {}

    def pass_on(self, subject: str, report: str | None, amounts: Mapping[str, int] | None = None) -> bool:
        """Whether to write this report; if not, add the amounts to the sums."""
        self.write_rest()
        with self._lock:
            minute = self._minutes.setdefault(subject, _Minute())
            repeats = report is not None and report in minute.written
            passes = not repeats and len(minute.written) < MOST_REPORTS
            if passes:
                minute.written.append(report)
            else:
                minute.rest.update({"times": 1, **(amounts or {})})
        return passes

    def write_rest(self, period: float | None = None) -> None:
        """Write the sums of the minutes that are over; `period` 0 ends all of them."""
        period, now = PERIOD if period is None else period, time.monotonic()
        with self._lock:
            over = {subject: one for subject, one in self._minutes.items() if now - one.began >= period}
            for subject in over:
                del self._minutes[subject]
        for subject, minute in over.items():
            if minute.rest:
                self._write(subject, minute.rest)


@dataclass
class _Minute:
    began: float = field(default_factory=time.monotonic)
    written: list[str | None] = field(default_factory=list)
    rest: Counter[str] = field(default_factory=Counter)
