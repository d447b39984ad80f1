"""What a report says, before it is a page, Markdown or LaTeX: sections with a table and curves each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Mark = Literal["good", "fair", "bad", "none", ""]
"""How a cell is coloured: as it should be, undecided, not as it should be, absent, or not at all."""


@dataclass(frozen=True)
class Cell:
    """A text in a table."""

    text: str
    sort: float | None = None
    """What the column is sorted by, where the text itself will not do."""
    mark: Mark = ""
    why: tuple[str, ...] = ()
    """What the text rests on: in a line, and then in all detail for who wants to know."""
    link: str = ""
    """The anchor of what it leads to."""

    @property
    def sentence(self) -> str:
        """The text with what it rests on, in a line."""
        return f"{self.text}: {self.why[0]}" if self.why else self.text


@dataclass(frozen=True)
class Column:
    """The head of a column."""

    title: str
    brief: bool = True
    """Whether it also stands in Markdown and LaTeX, where there is less room."""
    numeric: bool = False
    share: float | None = None
    """Of the width of a page, where it holds sentences."""


@dataclass(frozen=True)
class Row:
    """A line of a table; the page can hide those of other algorithms, and those without a result."""

    cells: tuple[Cell, ...]
    algorithm: str = ""
    known: bool = True


@dataclass(frozen=True)
class Line:
    """A curve: its points from left to right, and how low and high its seeds go."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()
    dots: bool = False
    algorithm: str = ""
    """Gives it its colour."""


@dataclass(frozen=True)
class Plot:
    """Curves in one frame."""

    anchor: str
    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    logarithmic: bool = False
    """Whether the x axis is."""

    @property
    def description(self) -> str:
        """The picture in words, for who does not see it."""
        ends = "; ".join(f"{line.label} ends at {line.points[-1][1]:.1f}" for line in self.lines)
        best = "; ".join(f"{line.label} is highest at {max(line.points, key=_height)[0]:g}" for line in self.lines)
        return f"{self.y} against {self.x}. {best if self.logarithmic else ends}."


@dataclass(frozen=True)
class Section:
    """A table with what is to be said about it."""

    anchor: str
    title: str
    says: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()

    @property
    def known(self) -> bool:
        """Whether there is any result in it."""
        return any(row.known for row in self.rows)


@dataclass(frozen=True)
class Drawing:
    """A picture that is made elsewhere, as SVG, and what it shows."""

    anchor: str
    title: str
    says: str
    svg: str


@dataclass(frozen=True)
class Document:
    """All of a report."""

    title: str
    says: tuple[str, ...]
    sections: tuple[Section, ...]
    legend: tuple[str, ...] = ()
    """How to read the tables."""
    drawings: tuple[Drawing, ...] = ()


def _height(point: tuple[float, float]) -> float:
    return point[1]
