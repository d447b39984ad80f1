"""The paper's tables as sections of the report, cell by cell beside our runs, with learning curves."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from quasiglobal.algorithms import name_of
from quasiglobal.reproduction.paper.cells import DIFFERENCE, PaperTable, Scale
from quasiglobal.reproduction.paper.claims import signed
from quasiglobal.reproduction.paper.comparison import PAPER_SEEDS, Gap, Order, by_model_and_column, order, to_paper
from quasiglobal.reproduction.paper.outcomes import Outcome, Which
from quasiglobal.reproduction.paper.published import CellLabel
from quasiglobal.reproduction.paper.summary_claims import OTHER_SCALE, VERDICTS
from quasiglobal.reproduction.paper.targets import NUMBERS
from quasiglobal.reproduction.report.document import Agreement, Cell, Column, Line, Plot, Row, Section
from quasiglobal.runs import tuning
from quasiglobal.runs.comparison import NOT_CONVERGED, Score
from quasiglobal.runs.store import Run
from quasiglobal.training.metrics import Ranking, number

COLUMNS = (
    Column("method"), Column("setting"), Column("paper", numeric=True), Column("ours", numeric=True),
    Column("best", numeric=True), Column("difference", numeric=True), Column("noise"), Column("order"),
    Column("lr", numeric=True), Column("epochs", numeric=True, brief=False),
    Column("averaged", numeric=True, brief=False),
    Column("curves", brief=False),
)


def table_section(table: PaperTable, found: Sequence[Outcome], scale: Scale) -> Section:
    """A table of the paper, cell by cell, with the learning curves of its runs."""
    groups = by_model_and_column(found)
    curves = {one.cell.label: _beside_paper(one, scale) for one in found}
    plots: list[Plot] = []
    rows, verdicts = [], []
    anchors: dict[CellLabel, str] = {}
    for k, ((model, column), group) in enumerate(groups.items()):
        title = ", ".join(filter(None, (model, str(column))))
        lines = tuple(line for outcome in group if (line := curves[outcome.cell.label]))
        plots += [plot for plot in (_curves(table, k, title, lines), _rates(table, k, title, group)) if plot]
        anchors |= {outcome.cell.label: f"{table.name}-{k}" for outcome in group}
    for k, outcome in enumerate(found):
        label = outcome.cell.label
        judged = Judgement.of(outcome, groups[outcome.cell.row.model, outcome.cell.column], scale)
        row = _row(outcome, judged, anchors[label] if curves[label] else None)
        rows.append(replace(row, anchor=f"{table.name}-cell-{k}", agreement=agreement(outcome, judged)))
        verdicts.append(judged)
    says = _in_words(len(rows), sum(row.known for row in rows), verdicts)
    brief = f"{NUMBERS[table.name]}: {table.title.partition(':')[0]}"
    return Section(table.name, table.title_at(scale), says, COLUMNS, tuple(rows), table.notes, tuple(plots), brief)


def _in_words(cells: int, run: int, verdicts: Sequence[Judgement]) -> str:
    says = f"{run} of {cells} cells run" if run else "not run"
    within = [judged.within for judged in verdicts if judged.within is not None]
    if within:
        says += f", {sum(within)} of {len(within)} within the noise of the paper's"
    orders = [judged.order.verdict for judged in verdicts if judged.order and judged.order.verdict]
    if orders:
        says += f", the order holds for {orders.count('holds')} of {len(orders)}"
    return says


@dataclass(frozen=True)
class Judgement:
    """Comparison of a cell with the paper, made only at the paper's scale."""

    comparable: bool
    gap: Gap | None = None
    """Our score minus the paper's."""
    seeds: int = 0
    order: Order | None = None

    @classmethod
    def of(cls, outcome: Outcome, group: Sequence[Outcome], scale: Scale) -> Judgement:
        """Judge a cell against the paper and the other cells of its model and column."""
        if scale in DIFFERENCE or not outcome.runs:
            return cls(scale not in DIFFERENCE)
        return cls(True, to_paper(outcome), len(outcome.runs), order(outcome, group))

    @property
    def within(self) -> bool | None:
        """Whether the difference is within the noise; None if unknown or if there are too few seeds to tell."""
        if self.gap is None or self.gap.noise is None:
            return None
        if self.gap.within and self.seeds < PAPER_SEEDS:
            return None
        return self.gap.within


def agreement(outcome: Outcome, judged: Judgement) -> Agreement:
    """How our result agrees with the paper's; a side that diverged is below the other."""
    if not outcome.runs:
        return "absent"
    if judged.comparable and judged.gap is None:
        papers = outcome.cell.score is None
        return ("neither" if papers else "below") if outcome.diverged else ("above" if papers else "open")
    if judged.gap is None or judged.within is None:
        return "open"
    if judged.within:
        return "within"
    return "above" if judged.gap.value > 0 else "below"


def _row(outcome: Outcome, judged: Judgement, anchor: str | None) -> Row:
    cell, experiment = outcome.cell, outcome.experiment
    paper = Cell(NOT_CONVERGED) if cell.score is None else _score(cell.score)
    start = (Cell(str(cell.row)), Cell(str(cell.column)), paper)
    name = name_of(experiment.algorithm)
    if not outcome.runs:
        return Row((*start, Cell("not run", mark="none"), *[Cell("")] * (len(COLUMNS) - 4)), name, known=False)
    return Row((
        *start,
        _ours(outcome),
        _other(outcome, "best"),
        *_difference(outcome, judged),
        _order(judged),
        _learning_rate(outcome),
        Cell(str(experiment.epochs), experiment.epochs),
        _other(outcome, "averaged"),
        Cell("curves", link=anchor) if anchor else Cell(""),
    ), name)


def _other(outcome: Outcome, which: Which) -> Cell:
    """The score of each run's best test, or of its averaged model."""
    score = outcome.ours(which)
    return _score(score) if score else Cell("")


def _score(score: Score) -> Cell:
    return Cell(str(score), score.mean)


def _ours(outcome: Outcome) -> Cell:
    seeds = f"({len(outcome.runs)})"
    score = outcome.ours()
    if score is None:
        gone = sum(run.status == "diverged" for run in outcome.runs)
        return Cell(f"{NOT_CONVERGED} {seeds}", mark="bad", why=(f"{gone} of {len(outcome.runs)} diverged",))
    return Cell(f"{score} {seeds}", score.mean)


def _difference(outcome: Outcome, judged: Judgement) -> tuple[Cell, Cell]:
    """The difference to the paper, and whether it is within the noise."""
    if not judged.comparable:
        return Cell(""), OTHER_SCALE
    found = judged.gap
    if found is None:
        return Cell(""), _not_converged(outcome.diverged, outcome.cell.score is None)
    value = Cell(signed(found.value), found.value)
    if found.noise is None:
        return value, Cell("unknown", mark="none", why=("no standard deviation",))
    if judged.within is None:
        return value, Cell("too few seeds", mark="none", why=(f"±{found.noise:.2f}",))
    if not judged.within:
        return value, Cell(f"beyond ±{found.noise:.2f}", mark="bad")
    return value, Cell(f"within ±{found.noise:.2f}", mark="good")


def _not_converged(ours: bool, papers: bool) -> Cell:
    if ours and papers:
        return Cell("neither converged", mark="good")
    return Cell("ours diverged", mark="bad") if ours else Cell("the paper's diverged", mark="fair")


def _order(judged: Judgement) -> Cell:
    found = judged.order
    if not judged.comparable:
        return OTHER_SCALE
    if found is None or found.verdict is None:
        return Cell("")
    text, mark = VERDICTS[found.verdict]
    against = [*found.reversed, *found.unclear]
    return Cell(text, mark=mark, why=(f"not with {', '.join(against)}",) if against else ())


def _learning_rate(outcome: Outcome) -> Cell:
    rate = outcome.experiment.peak_lr
    return Cell(f"{rate:g}", rate, why=(outcome.how,))


# ------------------------------------------------------------------------------------------------ the curves


MOST_BANDS = 5
"""Maximum number of curves with bands in a plot; more bands would hide each other."""


def _curves(table: PaperTable, k: int, title: str, lines: tuple[Line, ...]) -> Plot | None:
    if len(lines) > MOST_BANDS:
        lines = tuple(replace(line, band=()) for line in lines)
    return Plot(f"{table.name}-{k}", title, lines, "epoch", "test accuracy, %") if lines else None


def _beside_paper(one: Outcome, scale: Scale) -> Line | None:
    """The curve of a cell, with the paper's score at the last epoch."""
    line, score = curve(one.cell.row.method, one.runs, Ranking()), one.cell.score
    if line is None or score is None or scale in DIFFERENCE:
        return line
    return replace(line, published=[(one.experiment.epochs, score.mean, score.std or 0.0)])


def curve(label: str, runs: Sequence[Run], score: Ranking) -> Line | None:
    """Curve of the mean over the seeds, with a band over their range; None if nothing was tested."""
    tests: dict[int, list[float]] = {}
    for run in runs:
        for record in run.records():
            if (reached := number(record, score.name)) is not None:
                tests.setdefault(record["epoch"], []).append(score.factor * reached)
    if not tests:
        return None
    tests = dict(sorted(tests.items()))
    points = [(epoch, statistics.fmean(values)) for epoch, values in tests.items()]
    band = [(min(values), max(values)) for values in tests.values()] if len(runs) > 1 else []
    return Line(label, points, band, dots=len(points) == 1, algorithm=runs[0].experiment.algorithm)


def _rates(table: PaperTable, k: int, title: str, group: Sequence[Outcome]) -> Plot | None:
    """Plot of seed 0's score at every learning rate tried."""
    lines = []
    for outcome in group:
        points = [
            (rate, 100 * tuning.score(run)) for rate, run in outcome.trials.items() if run.status == "finished"
        ]
        if len(points) > 1:
            label = outcome.cell.row.method + (", short runs" if outcome.tuned_short else "")
            lines.append(Line(label, points, dots=True, algorithm=outcome.experiment.algorithm))
    if not lines:
        return None
    name, y = f"{table.name}-{k}-rates", "test accuracy of seed 0, %"
    return Plot(name, title, tuple(lines), "learning rate", y, logarithmic=True)
