"""A finished figure, and its output files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from quasiglobal.common.files import write_csv
from quasiglobal.runs.plots import save

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Reproduced:
    """A figure, the numbers in it, and a sentence on what it shows."""

    figure: Figure
    rows: list[dict[str, object]]
    says: str


def write_figure(made: Reproduced, name: str, folder: Path) -> list[Path]:
    """Write the figure as PNG and SVG, and its numbers as CSV."""
    paths = save(made.figure, folder, name)
    write_csv(folder / f"{name}.csv", made.rows)
    return [*paths, folder / f"{name}.csv"]
