"""The report's section of runs outside the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable

from quasiglobal.algorithms import name_of
from quasiglobal.common.objects import readable
from quasiglobal.reproduction.paper.cells import SCALES, PaperTable, Scale
from quasiglobal.reproduction.paper.summary_tables import curve
from quasiglobal.reproduction.report.document import Cell, Column, Plot, Row, Section
from quasiglobal.runs.comparison import Setting, compared
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.training.experiment import setting
from quasiglobal.training.metrics import Ranking, number


def own_section(store: RunStore, tables: Iterable[PaperTable]) -> Section | None:
    """The ended runs that belong to no cell of the tables, at any scale; None if there are none."""
    cells = set[str]().union(*_settings(tables).values())
    found = [run for key, runs in store.ended.items() if key not in cells for run in runs]
    if not found:
        return None
    groups: dict[tuple[str, str, Ranking], list[Run]] = {}
    for run in found:
        groups.setdefault((readable(run.experiment.model), readable(run.experiment.data), run.score), []).append(run)
    rows: list[Row] = []
    plots: list[Plot] = []
    for k, ((model, data, score), group) in enumerate(groups.items()):
        settings, anchor = compared(group, named=True), f"own-{k}"
        drawn = [curve(one.label, one.runs, score) for one in settings]
        rows += [_row(one, anchor if line else "") for one, line in zip(settings, drawn, strict=True)]
        if lines := tuple(line for line in drawn if line):
            plots.append(Plot(anchor, f"{model} on {data}", lines, "epoch", f"test {score.title}"))
    says = f"runs outside the paper's tables: {len(found)}, settings: {len(rows)}"
    return Section("own", "Own experiments", says, COLUMNS, tuple(rows), plots=tuple(plots))


def not_shown(store: RunStore, tables: Iterable[PaperTable], scale: Scale) -> list[str]:
    """Sentences on the runs that a report at this scale leaves out: those of other scales, and unfinished ones."""
    at = _settings(tables)
    says = []
    for other in SCALES:
        count = sum(len(runs) for key, runs in store.ended.items() if key in at[other] - at[scale])
        if count and other != scale:
            says.append(f"{count} runs of scale {other}; add --scale {other}")
    unfinished = sum(run.summary is None for run in store.runs)
    return [*says, *([f"{unfinished} unfinished runs; `qg runs {store.root}` lists them"] if unfinished else [])]


def _settings(tables: Iterable[PaperTable]) -> dict[Scale, set[str]]:
    """The settings of the tables' cells at each scale."""
    cells = [cell for table in tables for cell in table.cells]
    return {scale: {setting(one) for cell in cells for one in cell.experiments(scale)} for scale in SCALES}


COLUMNS = (
    Column("model"), Column("data"), Column("setting"), Column("seeds", numeric=True), Column("score", numeric=True),
    Column("best", numeric=True), Column("worst node", numeric=True), Column("averaged", numeric=True),
    Column("status"), Column("curves", brief=False),
)


def _row(one: Setting, anchor: str) -> Row:
    experiment, score = one.runs[0].experiment, one.runs[0].score
    lasts = [number(run.summary.last, score.name) if run.summary else None for run in one.runs]
    last = next((value for value in lasts if value is not None), None)
    return Row((
        Cell(readable(experiment.model)), Cell(readable(experiment.data)), Cell(one.label), Cell(str(len(one.runs))),
        Cell(one.scores[0], last), *map(Cell, one.scores[1:]), Cell(one.status),
        Cell("curves", link=anchor) if anchor else Cell(""),
    ), name_of(experiment.algorithm))
