"""Published results: every number of the paper's 11 tables, read from published.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from quasiglobal.runs.comparison import Score


@dataclass(frozen=True)
class RowLabel:
    """A row of a table: a method, and the model if the table has several.

    >>> RowLabel.parse("ResNet-GN-20: DSGD"), str(RowLabel("DSGD", "ResNet-GN-20"))
    (RowLabel(method='DSGD', model='ResNet-GN-20'), 'ResNet-GN-20: DSGD')
    """

    method: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> RowLabel:
        """Parse a row label of published.toml or a table spec."""
        model, _, method = text.rpartition(": ")
        return cls(method, model)

    def __str__(self) -> str:
        return f"{self.model}: {self.method}" if self.model else self.method


@dataclass(frozen=True)
class ColumnLabel:
    """A column of a table: a setting, and the graph or data set if the table has several.

    >>> ColumnLabel.parse("ring 16, α = 0.1"), ColumnLabel.parse("iid").group
    (ColumnLabel(setting='α = 0.1', group='ring 16'), '')
    """

    setting: str
    group: str = ""

    @classmethod
    def parse(cls, text: str) -> ColumnLabel:
        """Parse a column label of published.toml or a table spec."""
        group, _, setting = text.rpartition(", ")
        return cls(setting, group)

    def __str__(self) -> str:
        return f"{self.group}, {self.setting}" if self.group else self.setting


CellLabel = tuple[RowLabel, ColumnLabel]


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper: one row per method, one column per setting."""

    name: str
    title: str
    rows: tuple[RowLabel, ...]
    columns: tuple[ColumnLabel, ...]
    scores: Mapping[CellLabel, Score | None]
    """Scores of the cells that the paper has; None: did not converge."""
    notes: tuple[str, ...] = ()
    """Remarks on the numbers."""


@cache
def published() -> dict[str, PublishedTable]:
    """All tables of the paper by name.

    >>> row, column = RowLabel("QG-DSGDm-N", "ResNet-GN-20"), ColumnLabel("α = 0.1", "ring 16")
    >>> print(published()["cifar10"].scores[row, column])
    82.78 ± 2.05
    """
    text = resources.files("quasiglobal.reproduction.paper").joinpath("published.toml").read_text(encoding="utf-8")
    return {name: _table(name, values) for name, values in tomllib.loads(text).items()}


def _table(name: str, values: Mapping[str, Any]) -> PublishedTable:
    rows = {RowLabel.parse(text): cells for text, cells in values["rows"].items()}
    columns = tuple(map(ColumnLabel.parse, values["columns"]))
    scores = {
        (row, column): Score.parse(cell)
        for row, cells in rows.items()
        for column, cell in zip(columns, cells, strict=True)
        if cell
    }
    return PublishedTable(name, values["title"], tuple(rows), columns, scores, tuple(values.get("notes", ())))
