"""Terminal output: the console, progress bars, log lines, sizes and durations."""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from quasiglobal.cli import discard_output, wrapped
from quasiglobal.common.files import as_line, finite
from quasiglobal.data.shards import showing
from quasiglobal.runs.callbacks import utilisation
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.metrics import Ranking, Record, number, ranking


class PatientConsole(Console):
    """A console that falls silent if its reader closes the pipe: a training continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True
        discard_output()


console = PatientConsole(
    highlight=False,
    markup=False,
    force_terminal=False if os.environ.get("NO_COLOR") else None,       # no escape codes: no colours, no live bars
)

WIDE = 130
"""Terminal width in columns at which further columns fit beside the numbers."""


def print_json(value: object) -> None:
    """Print a value as one JSON document on standard output; numbers that are not finite become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str))


def show_warning(message: Warning | str, *rest: object) -> None:
    """Print a warning as one line."""
    console.print(f"warning: {message}")


def say(text: str = "") -> None:
    """Print a text, wrapped if it is for a terminal."""
    console.print(wrapped(text), soft_wrap=True)


def say_written(paths: Sequence[Path]) -> None:
    """Print the files that were written."""
    console.print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)


def say_utilisation(path: Path, since: float) -> None:
    """Print the utilisation by the programs in a file that began after a time, if any."""
    used = utilisation(path, since)
    if used.examples:
        console.print(f"utilisation: {used}", soft_wrap=True)


def progress_bar() -> Progress:
    """A bar with counts and the remaining time; it disappears when done."""
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, speed_estimate_period=LONGEST_EPOCH)


LONGEST_EPOCH = 1e5
"""Seconds; the remaining time is estimated from the epochs of this period."""


class Whole:
    """Progress of all runs of a command: the finished runs, with fractions of those that train, and the time left."""

    def __init__(self, runs: int) -> None:
        self.total, self.began = runs, time.monotonic()
        self.reached: dict[Path, float] = {}
        self.first = 0.0

    def update(self, runs: Sequence[RunFolder], records: Sequence[Record]) -> None:
        """Note an epoch of runs that train together."""
        begun = bool(self.reached)
        for run, record in zip(runs, records, strict=True):
            ended = number(record, "loss") is None                      # it diverged
            self.reached[run.folder] = 1.0 if ended else record["epoch"] / run.experiment.epochs
        self.total = max(self.total, len(self.reached))
        if not begun:                                                   # the epochs of resumed runs took no time here
            self.first, self.began = self.done, time.monotonic()

    @property
    def done(self) -> float:
        """Finished runs, and the finished fractions of others."""
        return sum(self.reached.values())

    def __str__(self) -> str:
        text = f"{int(self.done + 1e-6)} of {self.total} runs done"
        if self.done <= self.first:
            return text
        left = (time.monotonic() - self.began) / (self.done - self.first) * (self.total - self.done)
        return f"{text}, {time_in_words(left)} left"


def log_as(log: str) -> None:
    """With log = json, write JSON objects to standard output, and everything else to standard error."""
    if log != "json":
        return
    console.stderr = True
    console.quiet = os.environ.get("RANK", "0") != "0"      # one table for all processes of a run
    handler = PatientHandler(sys.stdout)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("quasiglobal")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)


class PatientHandler(logging.StreamHandler[TextIO]):
    """A log handler that falls silent if its reader closes the pipe."""

    def handleError(self, record: logging.LogRecord) -> None:       # noqa: N802  (the name in `logging`)
        """Ignore a closed pipe; show other errors."""
        if isinstance(sys.exc_info()[1], BrokenPipeError):
            logging.getLogger("quasiglobal").removeHandler(self)
            discard_output()
        else:
            super().handleError(record)


@contextmanager
def watcher(log: str, runs: int | None = None, timed: bool = False) -> Iterator[Watcher]:
    """Show progress: a bar on a terminal, else a line per test; after `log_as("json")`, a JSON object per epoch.

    `runs` is the number of runs to train, if several programs train them; their progress is then shown too. `timed`:
    lines begin with the time.
    """
    to = logging.getLogger("quasiglobal")
    whole = None if runs is None else Whole(runs)
    with progress_bar() as progress:
        over_all = progress.add_task("all runs", total=runs, visible=whole is not None)
        bar = progress.add_task("", total=None)

        def watch(runs: Sequence[RunFolder], records: list[Record]) -> None:
            score = ranking(runs[0].experiment.metric, records)
            record, text = records[0], _in_words(records, score)
            tested = any(number(one, score.name) is not None for one in records)
            names = {run.experiment.algorithm for run in runs}
            what = names.pop() if len(names) == 1 else f"{len(runs)} runs"
            total = runs[0].experiment.epochs
            progress.update(bar, completed=record["epoch"], total=total, description=f"{what}  {text}")
            speed = f"{record['images_per_second']:,.0f} examples/s"
            if whole:
                speed += f" with {sum(run.experiment.resolved.nodes for run in runs)} rows"
                whole.update(runs, records)
                progress.update(over_all, completed=whole.done, total=whole.total, description=f"all runs, {speed}")
            if log == "json":
                for run, measured in zip(runs, records, strict=True):
                    to.info("epoch %d", measured["epoch"], extra={"facts": {"run": run.folder.name} | dict(measured)})
            elif not console.is_terminal and tested:
                so_far = f"; {whole}" if whole else ""
                console.print(f"{_now(timed)}epoch {record['epoch']}: {text}, {speed}{so_far}")

        with _preparing(progress, bar), nullcontext() if log == "json" else _log_lines(to, timed):
            yield watch


@contextmanager
def _log_lines(logger: logging.Logger, timed: bool) -> Iterator[None]:
    """Print what the library logs, such as the compilation of a network, above the progress bar."""
    handler, level = LogLines(timed), logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


class LogLines(logging.Handler):
    """A log handler that prints information on the console, and warnings on standard error; `timed` with the time."""

    def __init__(self, timed: bool = False) -> None:
        super().__init__()
        self.timed = timed

    def emit(self, record: logging.LogRecord) -> None:
        """Print one line."""
        if record.levelno < logging.WARNING:
            console.print(f"{_now(self.timed)}{record.getMessage()}", soft_wrap=True)
        elif logging.lastResort:
            logging.lastResort.setFormatter(logging.Formatter(f"{_now(self.timed)}%(message)s"))
            logging.lastResort.handle(record)


def _now(shown: bool) -> str:
    """The time before a line of the log, in UTC as in audit.jsonl."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ} " if shown else ""


@contextmanager
def preparing() -> Iterator[None]:
    """Show the progress of decoding and sharding data."""
    with progress_bar() as progress, _preparing(progress, progress.add_task("", total=None, visible=False)):
        yield


@contextmanager
def _preparing(progress: Progress, bar: TaskID) -> Iterator[None]:
    def show(what: str, done: int, total: int) -> None:
        progress.update(bar, completed=done, total=total, description=what, visible=True)

    with showing(show):
        yield


def _in_words(records: Sequence[Record], score: Ranking) -> str:
    """The mean loss and score of several runs in an epoch, without the runs that diverged."""
    losses, scores = (
        [found for record in records if (found := number(record, name)) is not None] for name in ("loss", score.name)
    )
    text = f"loss {statistics.fmean(losses):.3f}" if losses else "diverged"
    if not scores:
        return text
    mean = statistics.fmean(scores)
    return f"{text}  {score.name} {100 * mean:.1f}%" if score.percent else f"{text}  {score.title} {mean:.4g}"


class JsonLines(logging.Formatter):
    """Log formatter that writes one JSON object per line: time, level, message, and further facts."""

    def format(self, record: logging.LogRecord) -> str:
        """Format a record as one line."""
        facts = {"time": record.created, "level": record.levelname.lower(), "message": record.getMessage()}
        if "RANK" in os.environ:
            facts["process"] = int(os.environ["RANK"])
        return as_line(facts | getattr(record, "facts", {}))


def size_in_words(count: float) -> str:
    """Format a number of bytes for people.

    >>> size_in_words(1_090_000), size_in_words(999.6e6)
    ('1.09 MB', '1 GB')
    """
    unit = 0
    while count >= 999.5 and unit < 4:
        count, unit = count / 1000, unit + 1
    return f"{count:.3g} {('B', 'kB', 'MB', 'GB', 'TB')[unit]}"


def time_in_words(seconds: float) -> str:
    """Format a duration for people.

    >>> time_in_words(42.4), time_in_words(90), time_in_words(7_000), time_in_words(1e6)
    ('42 s', '2 min', '1.9 h', '12 days')
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * 86400 else f"{seconds / 86400:,.0f} days"
