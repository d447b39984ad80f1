"""A deadline for each step: who is waited for, and how a process that is late gets in step again."""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

Moment = tuple[int, int]
"""(step, exchange index in that step)."""

WINDOW = 4
"""Exchanges over which the pace of a neighbour is measured."""


class Pace:
    """Decides how long to wait for each neighbour: to the end of the step's deadline, or not at all if it is late.

    A process is late if it has sent fewer than half as many messages as this one in the last exchanges. Its messages
    still count in the steps for which they are there in time. A neighbour that is merely some steps behind, at the
    same pace, is waited for, so that it gets in step. Without a deadline everybody is waited for.
    """

    def __init__(self, seconds: float | None) -> None:
        self.seconds = seconds
        self._recent: dict[int, deque[int]] = {}
        """Of each process: the number of its messages before each of the last exchanges and the current one."""
        self._step, self._began = 0, 0.0

    @property
    def late(self) -> list[int]:
        """The processes that are not waited for."""
        return [there for there, counts in self._recent.items() if 2 * (counts[-1] - counts[0]) < len(counts) - 1]

    def begin(self, moment: Moment) -> None:
        """Begin an exchange; the deadline is for all exchanges of a step together."""
        if moment[0] != self._step:
            self._step, self._began = moment[0], time.monotonic()

    def until(self, there: int, arrived: int) -> float:
        """The time at which to go on without this process, which has sent so many messages so far."""
        if self.seconds is None:
            return math.inf
        known = self._recent.get(there)
        if known is None or known[-1] > arrived:            # a new edge: it counts as punctual at first
            known = self._recent[there] = deque(range(arrived - WINDOW, arrived), maxlen=WINDOW + 1)
        known.append(arrived)
        return 0.0 if there in self.late else self._began + self.seconds

    def behind(self, step: int, newest: Sequence[Moment], rounds: int, last_step: float) -> int:
        """How many steps to skip, to make the step that the neighbours are about to make: the median, of two the lower.

        Neighbours that wait for this process are at most `rounds` steps ahead.
        """
        known = [claimed for claimed, _ in newest if claimed <= last_step]
        theirs = statistics.median_low(known) if known else 0
        if self.seconds is None or theirs <= step + rounds:
            return 0
        return int(min(theirs + 1, last_step)) - step


class Outbox:
    """Sends in a thread: if the other side does not read, the oldest messages are dropped, and nobody waits."""

    def __init__(self, send: Callable[..., None], most: int) -> None:
        self._send, self._closed, self._busy = send, False, False
        self._messages: deque[tuple[Any, ...]] = deque(maxlen=most)
        self._news = threading.Condition()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, *message: Any) -> None:
        """Send this message as soon as those before it are sent."""
        with self._news:
            self._messages.append(message)
            self._news.notify_all()

    def finish(self, seconds: float) -> None:
        """Wait until all messages are sent."""
        with self._news:
            self._news.wait_for(lambda: self._closed or not (self._messages or self._busy), seconds)

    def close(self) -> None:
        """Send nothing more."""
        with self._news:
            self._closed = True
            self._news.notify_all()

    def _run(self) -> None:
        while True:
            with self._news:
                self._busy = False
                self._news.notify_all()
                self._news.wait_for(lambda: self._closed or self._messages)
                if self._closed:
                    return
                message, self._busy = self._messages.popleft(), True
            self._send(*message)
            del message                                     # its memory is free
