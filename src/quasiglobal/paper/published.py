"""What the paper reports: every number of its 11 tables, read from published.toml."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

NOT_CONVERGED = "⋆"
"""The paper's mark for a run that did not converge."""


@dataclass(frozen=True)
class Score:
    """Test accuracy in per cent: the mean over seeds, and their standard deviation where there are several.

    >>> print(Score(82.2, 1.27))
    82.20 ± 1.27
    """

    mean: float
    std: float | None = None

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + ("" if self.std is None else f" ± {self.std:.2f}")


@dataclass(frozen=True)
class Published:
    """A table of the paper, a row for each method and a column for each setting."""

    name: str
    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    scores: Mapping[tuple[str, str], Score | None]
    """By row and column, where the paper has a cell; None: did not converge."""
    notes: tuple[str, ...] = ()
    """What a reader should know of its numbers."""


@cache
def published() -> dict[str, Published]:
    """All tables of the paper by name.

    >>> print(published()["cifar10"].scores["ResNet-GN-20: QG-DSGDm-N", "ring 16, α = 0.1"])
    82.78 ± 2.05
    """
    text = resources.files("quasiglobal.paper").joinpath("published.toml").read_text(encoding="utf-8")
    return {name: _table(name, values) for name, values in tomllib.loads(text).items()}


def _table(name: str, values: Mapping[str, Any]) -> Published:
    rows, columns = values["rows"], values["columns"]
    scores = {
        (row, column): _score(cell)
        for row, cells in rows.items()
        for column, cell in zip(columns, cells, strict=True)
        if cell
    }
    return Published(name, values["title"], tuple(rows), tuple(columns), scores, tuple(values.get("notes", ())))


def _score(cell: str) -> Score | None:
    if cell == NOT_CONVERGED:
        return None
    mean, _, std = cell.partition(" ± ")
    return Score(float(mean), float(std) if std else None)
