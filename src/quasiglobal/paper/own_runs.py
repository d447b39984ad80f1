"""Runs compared by setting, mean ± std over the seeds, and the report's section of runs outside the paper's tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from quasiglobal.algorithms import name_of
from quasiglobal.common.objects import readable
from quasiglobal.paper.cells import SCALES, PaperTable, Scale
from quasiglobal.paper.published import NOT_CONVERGED, Score
from quasiglobal.paper.summary_tables import curve
from quasiglobal.report.document import Cell, Column, Plot, Row, Section
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.training.experiment import Experiment, group_by_seed, setting
from quasiglobal.training.metrics import Ranking, Record, number


@dataclass(frozen=True)
class Setting:
    """Runs that differ only in their seed."""

    label: str
    """The settings that vary between all compared runs."""
    runs: Sequence[Run]
    named: bool = False
    """Whether the score has the metric's name before it."""

    @property
    def measured(self) -> tuple[Score | None, ...]:
        """Last test, best test, worst node and averaged model, mean and std over the seeds, in the records' units.

        None if it was not measured, or if a seed diverged.
        """
        lasts = [run.summary.last for run in self.runs if run.summary]
        bests = [run.summary.best for run in self.runs if run.summary]
        of = self.runs[0].score.name
        found = ((lasts, of), (bests, of), (lasts, f"{of}_worst"), (lasts, f"{of}_averaged"))
        return tuple(None if self.diverged else _mean_std(records, name) for records, name in found)

    @property
    def scores(self) -> tuple[str, ...]:
        """`measured` as text: mean ± std, or ⋆ if a seed diverged."""
        score = self.runs[0].score
        if self.diverged:
            return (NOT_CONVERGED,) * len(self.measured)
        last, *others = (_shown(found, score) for found in self.measured)
        return f"{score.title} {last}" if self.named else last, *others

    @property
    def diverged(self) -> bool:
        """Whether a seed diverged."""
        return any(run.status == "diverged" for run in self.runs)

    @property
    def status(self) -> str:
        """The status of all runs."""
        return ", ".join(sorted({run.status for run in self.runs}))


def by_setting(runs: Sequence[Run], named: bool = False) -> list[Setting]:
    """The settings of the runs, similar experiments next to each other.

    The score has the metric's name before it if the runs have different scores, or with `named`.
    """
    groups = group_by_seed(runs, lambda run: run.experiment)
    named = named or len({run.score for run in runs}) > 1
    return [
        Setting(label, group, named)
        for label, group in sorted(groups.items(), key=lambda item: _order(item[1][0].experiment))
    ]


def _mean_std(records: Sequence[Record | None], name: str) -> Score | None:
    values = [found for record in records if (found := number(record, name)) is not None]
    return Score.of(values) if values else None


def _shown(found: Score | None, score: Ranking) -> str:
    if found is None:
        return "-"
    if score.percent:
        return str(found.times(100))
    return " ± ".join(f"{x:.4g}" for x in (found.mean, found.std) if x is not None)


def _order(one: Experiment) -> tuple[object, ...]:
    """Sort key: similar experiments next to each other, numbers in numeric order."""
    learner = (one.data, one.model, one.norm or "", one.algorithm)
    return *learner, one.topology, one.partition, one.alpha, one.epochs, one.peak_lr


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
        settings, anchor = by_setting(group, named=True), f"own-{k}"
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
