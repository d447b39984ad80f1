"""Progress of long preparations, shown by the command that runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

ShowProgress = Callable[[str, int, int], None]
"""Shows a text, the number of completed parts and their total."""

_show: ContextVar[ShowProgress | None] = ContextVar("show", default=None)


@contextmanager
def showing(show: ShowProgress) -> Iterator[None]:
    """Show the progress of everything inside the block by `show`."""
    before = _show.set(show)
    try:
        yield
    finally:
        _show.reset(before)


def report_progress(what: str, done: int, total: int) -> None:
    """Report progress, if somebody shows it.

    >>> with showing(print):
    ...     report_progress("decoding", 3, 10)
    decoding 3 10
    """
    show = _show.get()
    if show is not None:
        show(what, done, total)
