"""Terminal output: the console, tables, progress bars, log lines, sizes and durations."""

from __future__ import annotations

import json
import logging
import os
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.segment import Segment
from rich.table import Column, Table

from quasiglobal.cli import discard_output, wrapped
from quasiglobal.common.files import Json, as_line, finite, markdown_table
from quasiglobal.data.shards import showing
from quasiglobal.errors import printable
from quasiglobal.runs.callbacks import utilisation
from quasiglobal.runs.store import RunFolder, Watcher
from quasiglobal.training.experiment import grouped
from quasiglobal.training.metrics import Ranking, Record, number, ranking


class PatientConsole(Console):
    """A console that stops printing if its reader closes the pipe; the training continues.

    It prints no control characters but its own.
    """

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """The segments of a renderable, printable."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text), style, control)

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
"""Minimum terminal width, in characters, for optional columns of a table."""


def print_json(value: object) -> None:
    """Print a value as one JSON document on standard output; numbers that are not finite become null."""
    print(json.dumps(finite(value), indent=2, ensure_ascii=False, default=str))


def show_warning(message: Warning | str, *rest: object) -> None:
    """Print a warning as one line."""
    console.print(f"warning: {message}")


def say(text: str = "") -> None:
    """Print a string, wrapped on a terminal."""
    console.print(wrapped(text), soft_wrap=True)


def say_written(paths: Sequence[Path]) -> None:
    """Print the files that were written."""
    console.print("wrote " + ", ".join(str(path) for path in paths), soft_wrap=True)


def say_utilisation(path: Path, since: float) -> None:
    """Print the utilisation since a time, by the programs in the file that began after it, if any."""
    used = utilisation(path, since)
    if used.examples:
        console.print(f"utilisation: {used}", soft_wrap=True)


# ---------------------------------------------------------------------------------------- tables

Values = Json
"""A row of a table, or another part of a JSON document."""

Cells = str | Callable[[Values], str] | tuple[str, ...]
"""Cells of a column: the rows' values under this key, a function of a row, or one string per row."""

SHORTEST = 24
"""Minimum width of the first column of a table, which is folded if necessary."""


@dataclass(frozen=True)
class Listing:
    """A table; `columns` has the cells of each column by heading. JSON output has the rows themselves."""

    rows: Sequence[Values]
    columns: Mapping[str, Cells]
    title: str = ""
    caption: str = ""
    group: Cells = ""
    """Heading of each row's group."""
    folds: Mapping[str, int] = field(default_factory=dict)
    """Minimum widths of further columns that may be folded."""
    brief: Callable[[Values], str] | None = None
    """Text under the first column where a table is too wide; by default `name: value` lines."""

    def show(self, as_json: bool = False, markdown: bool = False) -> None:
        """Print the table as JSON, Markdown or text; as lines where it is too wide for the terminal."""
        if as_json:
            print_json(self.rows)
            return
        if markdown:
            print(markdown_table(list(self.columns), self._texts()))
            return
        headings = self._column(self.group) if self.group else [""] * len(self.rows)
        if self.title:
            console.print(self.title, style="bold")
        widths, cells = self._widths(), self._texts()
        for heading, places in grouped(range(len(self.rows)), headings.__getitem__).items():
            if heading:
                console.print(f"\n{heading}", style="bold underline")
            if widths is None:
                self._print_lines([(self.rows[at], cells[at]) for at in places])
            else:
                sized = zip(self.columns, widths, strict=True)
                table = Table(*(Column(name, width=width, overflow="fold") for name, width in sized))
                for at in places:
                    table.add_row(*cells[at])
                console.print(table)
        if self.caption:
            console.print(f"\n{self.caption}" if self.group else self.caption)

    def _column(self, texts: Cells) -> Sequence[str]:
        if isinstance(texts, tuple):
            return texts
        return [str(row[texts]) if isinstance(texts, str) else texts(row) for row in self.rows]

    def _texts(self) -> list[Sequence[str]]:
        """The cells of each row."""
        return list(zip(*map(self._column, self.columns.values()), strict=True))

    def _widths(self) -> list[int] | None:
        """Width of each column; None if the table does not fit the terminal."""
        lines = [[name.replace(" ", "\n") for name in self.columns], *self._texts()]
        full = [max(map(cell_len, "\n".join(cells).split("\n"))) for cells in zip(*lines, strict=True)]
        first = next(iter(self.columns))
        least = {first: SHORTEST} | dict(self.folds)
        widths = [min(least.get(name, width), width) for name, width in zip(self.columns, full, strict=True)]
        left = console.width - sum(widths) - 3 * len(widths) - 1
        if left < 0 or len(widths) == 1:
            return None
        for k, width in enumerate(full):
            more = min(left, width - widths[k])
            widths[k], left = widths[k] + more, left - more
        return widths

    def _print_lines(self, rows: Sequence[tuple[Values, Sequence[str]]]) -> None:
        _, *names = self.columns
        for row, (first, *others) in rows:
            console.print(first, style="bold")
            if self.brief:
                console.print(Padding(self.brief(row), (0, 0, 0, 2), expand=False))
            else:
                said = {f"  {name}:": text for name, text in zip(names, others, strict=True) if text}
                console.print(facts_table(said))


def facts_table(facts: Mapping[str, str]) -> Table:
    """A table of names and values."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None, padding=(0, 1, 0, 0))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


# -------------------------------------------------------------------------------------- progress


def progress_bar() -> Progress:
    """A bar with counts and the remaining time; it disappears when done."""
    columns = TextColumn("{task.description:>12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, speed_estimate_period=LONGEST_EPOCH)


LONGEST_EPOCH = 1e5
"""Seconds; the remaining time is estimated from the epochs of this period."""


def log_as(log: str) -> None:
    """For `--log json`, write JSON objects to standard output, and everything else to standard error."""
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
    """A log handler that stops writing if its reader closes the pipe."""

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
    to, count = logging.getLogger("quasiglobal"), runs
    done: dict[Path, float] = {}                # the fraction of each run; 1 if it diverged
    with progress_bar() as progress:
        over_all = progress.add_task("all runs", total=count, visible=count is not None)
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
            so_far = ""
            if count is not None:
                speed += f" with {sum(run.experiment.resolved.nodes for run in runs)} rows"
                for run, one in zip(runs, records, strict=True):
                    done[run.folder] = 1.0 if number(one, "loss") is None else one["epoch"] / run.experiment.epochs
                whole, total = sum(done.values()), max(count, len(done))
                progress.update(over_all, completed=whole, total=total, description=f"all runs, {speed}")
                left = next(task for task in progress.tasks if task.id == over_all).time_remaining
                so_far = f"; {int(whole + 1e-6)} of {total} runs done"
                so_far += "" if left is None else f", {time_in_words(left)} left"
            if log == "json":
                for run, measured in zip(runs, records, strict=True):
                    to.info("epoch %d", measured["epoch"], extra={"facts": {"run": run.folder.name} | dict(measured)})
            elif not console.is_terminal and tested:
                console.print(f"{_now(timed)}epoch {record['epoch']}: {text}, {speed}{so_far}")

        with _preparing(progress, bar), nullcontext() if log == "json" else _log_lines(to, timed):
            yield watch


@contextmanager
def _log_lines(logger: logging.Logger, timed: bool) -> Iterator[None]:
    """Print the library's log, such as the compilation of a network, above the progress bar."""
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
        line = f"{_now(self.timed)}{self.format(record)}"
        if record.levelno < logging.WARNING:
            console.print(line, soft_wrap=True)
        else:
            print(printable(line), file=sys.stderr)


def _now(shown: bool) -> str:
    """The time before a line of the log, in UTC as in audit.jsonl."""
    return f"{datetime.now(UTC):%Y-%m-%d %H:%M:%SZ} " if shown else ""


@contextmanager
def preparing() -> Iterator[None]:
    """Show the progress of decoding and sharding data."""
    with progress_bar() as progress, _preparing(progress, progress.add_task("", total=None, visible=False)):
        yield


def _preparing(progress: Progress, bar: TaskID) -> AbstractContextManager[None]:
    return showing(lambda what, done, total: progress.update(
        bar, completed=done, total=total, description=what, visible=True
    ))


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
