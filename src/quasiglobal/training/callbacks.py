"""Training callbacks that do not use the disk."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from quasiglobal.training.loop import Callback, Loop


class Call(Callback):
    """Calls a function after each epoch."""

    def __init__(self, function: Callable[[Loop], None]) -> None:
        self.function = function

    def on_epoch(self, loop: Loop) -> None:
        self.function(loop)


class Interrupts(Callback):
    """Stops the loop after the epoch in which Ctrl-C was pressed or SIGTERM came."""

    def __init__(self, noted: list[int]) -> None:
        """`noted` is the list that `patient_interrupts` yields."""
        self.noted = noted

    def on_epoch(self, loop: Loop) -> None:
        if self.noted:
            loop.interrupt()


@contextmanager
def patient_interrupts() -> Iterator[list[int]]:
    """Add the first Ctrl-C, and the first SIGTERM, to the yielded list, so that the epoch can end and be saved.

    A second signal of the same kind stops at once. Both kinds count apart: after Ctrl-C, torchrun sends SIGTERM to its
    processes. Outside the main thread the list stays empty.
    """
    noted: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def note(number: int, frame: object) -> None:
        noted.append(number)
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, note)
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
