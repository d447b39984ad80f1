"""Content of a report, independent of the output format: sections, each with a table and curves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from quasiglobal.reproduction.paper.tables import CellLabel

Mark = Literal["good", "fair", "bad", "none", ""]
"""Colour of a cell: as expected, undecided, not as expected, absent, or uncoloured."""

Agreement = Literal["within", "above", "below", "neither", "open", "absent"]
"""A result versus the published one: within the noise, above or below it, neither converged, no verdict, not run."""


@dataclass(frozen=True)
class Cell:
    """A cell of a table."""

    text: str
    sort: float | None = None
    """Sort key in a numeric column, None sorts last; other columns sort by text."""
    mark: Mark = ""
    why: tuple[str, ...] = ()
    """Explanation of the text: a one-line summary, then details that the page shows on a click."""
    link: str = ""
    """Anchor of the link target."""

    @property
    def sentence(self) -> str:
        """The text with its one-line explanation."""
        return f"{self.text}: {self.why[0]}" if self.why else self.text


@dataclass(frozen=True)
class Column:
    """The header of a column."""

    title: str
    brief: bool = True
    """Whether Markdown and LaTeX, which have less room, also show the column."""
    numeric: bool = False
    share: float | None = None
    """Fraction of the page width, for columns of sentences; None: automatic."""


@dataclass(frozen=True)
class Row:
    """A row of a table; the page can hide rows of other algorithms and rows without a result."""

    cells: tuple[Cell, ...]
    algorithm: str = ""
    known: bool = True
    anchor: str = ""
    """Name of the row, for links to it."""
    place: CellLabel | None = None
    """Row and column of its square in the overview; None: it has none."""
    agreement: Agreement | None = None
    """Kind of the square."""


@dataclass(frozen=True)
class Line:
    """A curve: points from left to right, and a band of (lowest, highest) over the seeds."""

    label: str
    points: Sequence[tuple[float, float]]
    band: Sequence[tuple[float, float]] = ()
    dots: bool = False
    """Whether to mark the points, with the band as bars."""
    algorithm: str = ""
    """Determines the colour."""
    published: Sequence[tuple[float, float, float]] = ()
    """Published scores: place, mean and standard deviation; drawn hollow."""


@dataclass(frozen=True)
class Plot:
    """Curves in one set of axes."""

    anchor: str
    title: str
    lines: tuple[Line, ...]
    x: str
    y: str
    logarithmic: bool = False
    """Whether the x axis is logarithmic, with ticks at the points."""
    beside_paper: bool = False
    """Whether it compares our scores with the published ones, point by point."""

    @property
    def description(self) -> str:
        """Text alternative of the plot, for screen readers."""
        return f"{self.y} against {self.x}. {'; '.join(map(self._in_words, self.lines))}."

    def _in_words(self, line: Line) -> str:
        if self.beside_paper:
            both = ([f"{y:.1f} at {x:g}" for x, y, *_ in points] for points in (line.points, line.published))
            ours, papers = map(", ".join, both)
            return f"{line.label}: ours {ours or 'not run'}, the paper's {papers}"
        if self.logarithmic:
            return f"{line.label} is highest at {max(line.points, key=itemgetter(1))[0]:g}"
        papers = "".join(f", the paper's at {mean:.1f}" for _, mean, _ in line.published)
        return f"{line.label} ends at {line.points[-1][1]:.1f}{papers}"


@dataclass(frozen=True)
class Section:
    """A table with its summary, notes and plots."""

    anchor: str
    title: str
    says: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    brief: str = ""
    """Short title, for the overview."""

    @property
    def known(self) -> bool:
        """Whether any row has a result."""
        return any(row.known for row in self.rows)


@dataclass(frozen=True)
class Drawing:
    """A finished figure as SVG, with a description."""

    anchor: str
    title: str
    says: str
    svg: str


@dataclass(frozen=True)
class Finding:
    """A claim in one line, with its verdict."""

    sign: str
    """Mark of the verdict, readable without colour."""
    says: str
    verdict: Cell
    extent: str
    """How much of it was tested."""
    link: str
    """Anchor of the details."""


@dataclass(frozen=True)
class Overview:
    """Summary of a report, to be read in a minute; its grid shows the rows of the sections that have an agreement."""

    says: str
    findings: tuple[Finding, ...]
    plots: tuple[Plot, ...] = ()


@dataclass(frozen=True)
class Document:
    """A whole report."""

    title: str
    says: tuple[str, ...]
    sections: tuple[Section, ...]
    legend: tuple[str, ...] = ()
    """How to read the tables."""
    drawings: tuple[Drawing, ...] = ()
    overview: Overview | None = None
