"""Rows of raw values, shown as a table, as lines where a table is too wide for the terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Column, Table

from quasiglobal.cli.terminal import console, print_json

Values = Mapping[str, Any]
Text = str | Callable[[Values], str]
"""Text of a column in a row: the row's value under this key, or a function of the row."""

SHORTEST = 24
"""Width to which the first column of a table may be folded."""


@dataclass(frozen=True)
class Listing:
    """A table: `columns` has the text of each column by heading. In JSON the rows are as they are."""

    rows: Sequence[Values]
    columns: Mapping[str, Text]
    title: str = ""
    caption: str = ""
    group: Text = ""
    """Heading above the rows that have it."""
    folds: Mapping[str, int] = field(default_factory=dict)
    """Columns that may be folded, besides the first, and the width that each keeps."""
    brief: Callable[[Values], str] | None = None
    """Text under the first column where a table is too wide; by default `name: value` lines."""

    def show(self, as_json: bool = False) -> None:
        """Print the table as text or JSON."""
        if as_json:
            print_json(self.rows)
            return
        groups: dict[str, list[Values]] = {}
        for row in self.rows:
            groups.setdefault(_text(self.group, row) if self.group else "", []).append(row)
        if self.title:
            console.print(self.title, style="bold")
        widths = self._widths()
        for heading, rows in groups.items():
            if heading:
                console.print(f"\n{heading}", style="bold underline")
            if widths is None:
                self._print_lines(rows)
            else:
                self._print_table(rows, widths)
        if self.caption:
            console.print(f"\n{self.caption}" if self.group else self.caption)

    def texts(self) -> list[list[str]]:
        """The text of each row."""
        return [self._texts(row) for row in self.rows]

    def _texts(self, row: Values) -> list[str]:
        return [_text(text, row) for text in self.columns.values()]

    def _widths(self) -> list[int] | None:
        """Width of each column; None if the table does not fit the terminal."""
        lines = [[name.replace(" ", "\n") for name in self.columns], *self.texts()]
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

    def _print_table(self, rows: Sequence[Values], widths: Sequence[int]) -> None:
        sized = zip(self.columns, widths, strict=True)
        table = Table(*(Column(name, width=width, overflow="fold") for name, width in sized))
        for row in rows:
            table.add_row(*self._texts(row))
        console.print(table)

    def _print_lines(self, rows: Sequence[Values]) -> None:
        _, *names = self.columns
        for row in rows:
            first, *others = self._texts(row)
            console.print(first, style="bold")
            if self.brief:
                console.print(Padding(self.brief(row), (0, 0, 0, 2), expand=False))
            else:
                said = {f"  {name}:": text for name, text in zip(names, others, strict=True) if text}
                console.print(facts_table(said))


def _text(text: Text, row: Values) -> str:
    return str(row[text]) if isinstance(text, str) else text(row)


def facts_table(facts: Mapping[str, str]) -> Table:
    """A table of names and values."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None, padding=(0, 1, 0, 0))
    for name, value in facts.items():
        table.add_row(name, value)
    return table
