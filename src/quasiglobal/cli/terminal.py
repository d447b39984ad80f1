"""Terminal output: the console, progress bars, log lines, sizes and durations."""

from __future__ import annotations

import logging
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from quasiglobal.cli import discard_output
from quasiglobal.common.files import as_line
from quasiglobal.common.progress import showing
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.metrics import Ranking, Record, number, ranking


class PatientConsole(Console):
    """A console that falls silent if its reader closes the pipe: a training continues."""

    def on_broken_pipe(self) -> None:
        """Print nothing more."""
        self.quiet = True
        discard_output()


console = PatientConsole(highlight=False, markup=False)

WIDE = 130
"""Terminal width in columns at which further columns fit beside the numbers."""


def show_warning(message: Warning | str, *rest: Any) -> None:
    """Print a warning as one line."""
    console.print(f"warning: {message}")


def say_written(paths: Sequence[Path]) -> None:
    """Print the files that were written."""
    console.print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)


def progress_bar() -> Progress:
    """A bar with counts and the remaining time; it disappears when done."""
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True)


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
def watcher(log: str) -> Iterator[Watcher]:
    """Show progress: a bar on a terminal, else a line per test; after `log_as("json")`, a JSON object per epoch."""
    to = logging.getLogger("quasiglobal")
    with progress_bar() as progress:
        bar = progress.add_task("", total=None)

        def watch(runs: Sequence[RunFolder], records: list[Record]) -> None:
            score = ranking(runs[0].experiment.metric, records)
            record, text = records[0], _in_words(records, score)
            tested = any(number(one, score.name) is not None for one in records)
            names = {run.experiment.algorithm for run in runs}
            what = names.pop() if len(names) == 1 else f"{len(runs)} runs"
            total = runs[0].experiment.epochs
            progress.update(bar, completed=record["epoch"], total=total, description=f"{what}  {text}")
            if log == "json":
                for run, measured in zip(runs, records, strict=True):
                    to.info("epoch %d", measured["epoch"], extra={"facts": {"run": run.folder.name} | dict(measured)})
            elif not console.is_terminal and tested:
                console.print(f"epoch {record['epoch']}: {text}, {record['images_per_second']:,.0f} examples/s")

        def prepare(what: str, done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total, description=what)

        with showing(prepare):
            yield watch


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
