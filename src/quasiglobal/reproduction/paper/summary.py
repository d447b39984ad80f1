"""The report on a run store: the paper's claims and tables next to the results of our runs."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from quasiglobal.algorithms import name_of
from quasiglobal.common.objects import readable
from quasiglobal.reproduction.paper.claims import (
    CLAIMS,
    TUNING,
    Claim,
    Judged,
    momentum_tuning,
    our_scores,
    paper_scores,
    signed,
    tuning_claim,
    verdict,
)
from quasiglobal.reproduction.paper.figures import TRAINED, draw_outcomes, title_of
from quasiglobal.reproduction.paper.outcomes import (
    PAPER_SEEDS,
    Order,
    Outcome,
    Verdict,
    by_model_and_column,
    order,
    outcomes,
    to_paper,
    trial_of,
)
from quasiglobal.reproduction.paper.tables import (
    DIFFERENCE,
    NUMBERS,
    SCALES,
    TABLES,
    CellLabel,
    ColumnLabel,
    PaperTable,
    Scale,
)
from quasiglobal.reproduction.report.document import (
    Agreement,
    Cell,
    Column,
    Document,
    Drawing,
    Finding,
    Line,
    Mark,
    Overview,
    Plot,
    Row,
    Section,
)
from quasiglobal.reproduction.report.noise import EXPLANATION, Gap
from quasiglobal.reproduction.report.page import drawing
from quasiglobal.runs import tuning
from quasiglobal.runs.comparison import NOT_CONVERGED, Score, Setting, compared
from quasiglobal.runs.store import Run, RunStore
from quasiglobal.training.experiment import setting
from quasiglobal.training.metrics import Ranking, number


def summary(store: RunStore, scale: Scale = "paper") -> Document:
    """The report on a run store; cells without runs are marked as not run."""
    tables = _tables(store, scale)
    found = {name: outcomes(table, store, scale) for name, table in tables.items()}
    claims, findings = claims_section([*CLAIMS, tuning_claim(tables[TUNING])], found, scale)
    papers = [table_section(table, found[name], scale) for name, table in TABLES.items()]
    return Document(
        "Quasi-global momentum: the paper and our runs",
        _introduction([outcome for name in TABLES for outcome in found[name]], scale),
        (claims, *own_sections(store, tables.values()), *papers),
        LEGEND + LEGEND_HELD_OUT * any(outcome.held_out for outcomes in found.values() for outcome in outcomes),
        summary_figures(found, scale),
        overview(findings, papers, found, scale),
    )


def left_out(store: RunStore, scale: Scale = "paper") -> list[str]:
    """Sentences on the runs that a report at this scale omits: runs of other scales, and unfinished runs."""
    at = _settings(_tables(store, scale).values())
    says = []
    for other in SCALES:
        count = sum(len(runs) for key, runs in store.ended.items() if key in at[other] - at[scale])
        if count:
            says.append(f"{count} runs of scale {other}; add --scale {other}")
    unfinished = sum(run.summary is None for run in store.runs)
    return [*says, *([f"{unfinished} unfinished runs; `qg runs {store.root}` lists them"] if unfinished else [])]


def _tables(store: RunStore, scale: Scale) -> dict[str, PaperTable]:
    return {**TABLES, TUNING: momentum_tuning(store, scale), **{name: TRAINED[name].table for name in FIGURES}}


def _introduction(cells: Sequence[Outcome], scale: Scale) -> tuple[str, ...]:
    runs = {run.folder for outcome in cells for run in (*outcome.runs, *outcome.trials.values())}
    says: tuple[str, ...] = (
        "Every table of Lin, Karimireddy, Stich and Jaggi, Quasi-Global Momentum (ICML 2021), cell by cell, with the "
        "test accuracy in per cent that the paper reports and the one that our runs reached.",
        f"The cells share {len(runs)} runs. Nothing here is estimated: a cell without runs says so.",
    )
    if scale in DIFFERENCE:
        says += (f"These are not the paper's experiments: {DIFFERENCE[scale]}. They are not held against its numbers.",)
    return says


LEGEND_HELD_OUT = (
    "Rates “held out” were tried on training examples kept back, with a seed that is not reported; the others on the "
    "test set.",
)

LEGEND = (
    "Accuracy is the mean over the nodes' own models on the whole test set after the last epoch, mean ± standard "
    "deviation over the seeds, whose number is in brackets. Best is that of the best epoch tested, which takes the "
    "test set to choose it; averaged is that of the average of all nodes' models after the last epoch.",
    EXPLANATION,
    "The order holds for a method when, of the others of the same model in the same column that were run, those are "
    "below it that are below it in the paper; it is undecided when the exceptions are within the noise of our runs.",
    "A claim holds when every comparison comes out as it says, so far when not all were run, and does not hold when "
    "one is the other way round beyond the noise; in between it is undecided. A side that diverged has lost. To hold, "
    "a difference need not be beyond the noise, as few of three seeds are; how many are stands beside it. The paper's "
    "own numbers are judged by the same rule. Of comparisons between equals one in forty is beyond the noise on the "
    "wrong side by chance alone.",
    "A learning rate is the best of those tried with seed 0. It counts as tuned when it is inside a grid of at least "
    "three; at an end of the grid, a better one may lie beyond. ⋆: did not converge. Curves are means over seeds; the "
    "band, where few curves meet, is their range.",
    "Rows “as in the text” have the form that the paper's text describes where the authors' released code, which made "
    "the numbers, has another.",
)


# ------------------------------------------------------------------------------------------------ claims

VERDICTS: Mapping[Verdict, tuple[str, Mark, str]] = {
    "holds": ("holds", "good", "✓"),
    "within noise": ("undecided", "fair", "?"),
    "does not hold": ("does not hold", "bad", "✗"),
}
"""Text, colour and sign of each verdict."""

OTHER_SCALE = Cell("other scale", mark="none")
"""Shown in place of a verdict at any scale but the paper's."""

CLAIM_COLUMNS = (
    Column("claim", share=0.31), Column("where", share=0.13), Column("in the paper's numbers", share=0.2),
    Column("in our runs", share=0.2), Column("run", numeric=True),
)


def claims_section(
    claims: Sequence[Claim], found: Mapping[str, Sequence[Outcome]], scale: Scale
) -> tuple[Section, list[Finding]]:
    """The section of claims, with a verdict on each that has scores; and a line on each for the overview."""
    papers, ours = paper_scores(), our_scores(found)
    rows, findings = [], []
    for k, claim in enumerate(claims):
        judged, all_of_them = claim.judge(ours), len(claim.comparisons)
        decided = verdict(judged) if scale not in DIFFERENCE else None
        result = OTHER_SCALE if judged and decided is None else _verdict(judged, all_of_them, "not run")
        run = Cell(f"{len(judged)} of {all_of_them}", len(judged) / max(all_of_them, 1))
        by_paper = _verdict(claim.judge(papers), all_of_them, "no numbers")
        cells = (Cell(claim.says), Cell(claim.where), by_paper, result, run)
        rows.append(Row(cells, known=bool(judged), anchor=f"claim-{k}"))
        findings.append(Finding(VERDICTS[decided][2] if decided else "–", claim.says, result, run.text, f"claim-{k}"))
    counts = Counter(one.verdict.text for one in findings)
    says = ", ".join(f"{text}: {counts[text]}" for text in sorted(counts))
    return Section("claims", "What the paper claims", says, CLAIM_COLUMNS, tuple(rows)), findings


def _verdict(judged: Sequence[Judged], all_of_them: int, otherwise: str) -> Cell:
    result = verdict(judged)
    if result is None:
        return Cell(otherwise, mark="none")
    text, mark, _ = VERDICTS[result]
    if result == "holds" and len(judged) < all_of_them:
        text, mark = "holds so far", "fair"
    if len(judged) == 1:
        return Cell(text, mark=mark, why=(str(judged[0]),))
    values = [one.gap.value for one in judged if math.isfinite(one.gap.value)]
    span = f", {signed(min(values))} to {signed(max(values))}" if values else ""
    wrong = [one for kind in ("does not hold", "within noise") for one in judged if one.verdict == kind]
    right = [one for one in judged if one.verdict == "holds"]
    exceptions = f", not so in {len(wrong)}" if wrong else ""
    clear = sum(one.gap.within is False for one in right)
    beyond = f", {clear or 'none'} beyond the noise" if text == "holds so far" else ""
    return Cell(text, mark=mark, why=(f"{len(judged)} comparisons{span}{exceptions}{beyond}", *map(str, wrong + right)))


# ------------------------------------------------------------------------------------------------ tables

TABLE_COLUMNS = (
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
        judged = _judged(outcome, groups[outcome.cell.row.model, outcome.cell.column], scale)
        row = _row(outcome, judged, anchors[label] if curves[label] else "")
        anchor = f"{table.name}-cell-{k}"
        rows.append(replace(row, anchor=anchor, place=label, agreement=agreement(outcome, judged)))
        verdicts += [judged] if judged else []
    says = _in_words(len(rows), sum(row.known for row in rows), verdicts)
    brief = f"{NUMBERS[table.name]}: {table.title.partition(':')[0]}"
    return Section(
        table.name, table.title_at(scale), says, TABLE_COLUMNS, tuple(rows), table.notes, tuple(plots), brief
    )


@dataclass(frozen=True)
class Judgement:
    """Comparison of a cell's runs with the paper."""

    gap: Gap | None
    """Our score minus the paper's."""
    within: bool | None
    """Whether the difference is within the noise; None if unknown or if there are too few seeds to tell."""
    order: Order


def _judged(outcome: Outcome, group: Sequence[Outcome], scale: Scale) -> Judgement | None:
    """Judge a cell against the paper and the other cells of its model and column; only at the paper's scale."""
    if scale in DIFFERENCE or not outcome.runs:
        return None
    found = to_paper(outcome)
    within = found.within if found else None
    few = len(outcome.runs) < PAPER_SEEDS
    return Judgement(found, None if within and few else within, order(outcome, group))


def _in_words(cells: int, run: int, verdicts: Sequence[Judgement]) -> str:
    says = f"{run} of {cells} cells run" if run else "not run"
    within = [judged.within for judged in verdicts if judged.within is not None]
    if within:
        says += f", {sum(within)} of {len(within)} within the noise of the paper's"
    orders = [judged.order.verdict for judged in verdicts if judged.order.verdict]
    if orders:
        says += f", the order holds for {orders.count('holds')} of {len(orders)}"
    return says


def agreement(outcome: Outcome, judged: Judgement | None) -> Agreement:
    """How our result agrees with the paper's; a side that diverged is below the other."""
    if not outcome.runs:
        return "absent"
    if judged is None:
        return "open"
    if judged.gap is None:
        papers = outcome.cell.score is None
        return ("neither" if papers else "below") if outcome.diverged else ("above" if papers else "open")
    if judged.within is None:
        return "open"
    return "within" if judged.within else "above" if judged.gap.value > 0 else "below"


def _row(outcome: Outcome, judged: Judgement | None, anchor: str) -> Row:
    cell, experiment = outcome.cell, outcome.experiment
    paper = _score(cell.score) if cell.score else Cell(NOT_CONVERGED)
    start = (Cell(str(cell.row)), Cell(str(cell.column)), paper)
    name = name_of(experiment.algorithm)
    if not outcome.runs:
        return Row((*start, Cell("not run", mark="none"), *[Cell("")] * (len(TABLE_COLUMNS) - 4)), name, known=False)
    return Row((
        *start,
        _ours(outcome),
        _score(outcome.ours("best")),
        *_difference(outcome, judged),
        _order(judged),
        Cell(f"{experiment.peak_lr:g}", experiment.peak_lr, why=(outcome.how,)),
        Cell(str(experiment.epochs), experiment.epochs),
        _score(outcome.ours("averaged")),
        Cell("curves" if anchor else "", link=anchor),
    ), name)


def _score(score: Score | None) -> Cell:
    return Cell(str(score), score.mean) if score else Cell("")


def _ours(outcome: Outcome) -> Cell:
    seeds = f"({len(outcome.runs)})"
    score = outcome.ours()
    if score is None:
        gone = sum(run.status == "diverged" for run in outcome.runs)
        return Cell(f"{NOT_CONVERGED} {seeds}", mark="bad", why=(f"{gone} of {len(outcome.runs)} diverged",))
    return Cell(f"{score} {seeds}", score.mean)


def _difference(outcome: Outcome, judged: Judgement | None) -> tuple[Cell, Cell]:
    """The difference to the paper, and whether it is within the noise."""
    if judged is None:
        return Cell(""), OTHER_SCALE
    found = judged.gap
    if found is None:
        if not outcome.diverged:
            return Cell(""), Cell("the paper's diverged", mark="fair")
        both = outcome.cell.score is None
        return Cell(""), Cell("neither converged", mark="good") if both else Cell("ours diverged", mark="bad")
    value = Cell(signed(found.value), found.value)
    if found.noise is None:
        return value, Cell("unknown", mark="none", why=("no standard deviation",))
    if judged.within is None:
        return value, Cell("too few seeds", mark="none", why=(f"±{found.noise:.2f}",))
    if not judged.within:
        return value, Cell(f"beyond ±{found.noise:.2f}", mark="bad")
    return value, Cell(f"within ±{found.noise:.2f}", mark="good")


def _order(judged: Judgement | None) -> Cell:
    if judged is None:
        return OTHER_SCALE
    if judged.order.verdict is None:
        return Cell("")
    text, mark, _ = VERDICTS[judged.order.verdict]
    methods = judged.order.methods
    against = [*methods.get("does not hold", ()), *methods.get("within noise", ())]
    return Cell(text, mark=mark, why=(f"not with {', '.join(against)}",) if against else ())


# ------------------------------------------------------------------------------------------------ curves


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
    points = [(epoch, statistics.fmean(tests[epoch])) for epoch in sorted(tests)]
    band = [(min(tests[epoch]), max(tests[epoch])) for epoch in sorted(tests)] if len(runs) > 1 else []
    return Line(label, points, band, dots=len(points) == 1, algorithm=runs[0].experiment.algorithm)


def _rates(table: PaperTable, k: int, title: str, group: Sequence[Outcome]) -> Plot | None:
    """Plot of the score at every learning rate tried."""
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
    held_out = any(outcome.held_out for outcome in group)
    name, y = f"{table.name}-{k}-rates", "accuracy of the trial, %" if held_out else "test accuracy of seed 0, %"
    return Plot(name, title, tuple(lines), "learning rate", y, logarithmic=True)


# ------------------------------------------------------------------------------------------------ figures


def summary_figures(found: Mapping[str, Sequence[Outcome]], scale: Scale) -> tuple[Drawing, ...]:
    """The paper's training figures that show more than the tables' curves, if enough of their cells were run."""
    made = []
    for name in FIGURES:
        if sum(bool(outcome.runs) for outcome in found[name]) >= ENOUGH * len(found[name]):
            figure = draw_outcomes(name, found[name], scale)
            figure.figure.suptitle("")
            made.append(drawing(name, f"Figure: {title_of(name, scale)}", figure.says, figure.figure))
    return tuple(made)


FIGURES = (
    "figure-effective-step", "figure-single-worker", "figure-weight-decay", "figure-momentum-tuning",
)
"""Figures that need only the store. Others repeat the overview or the tables' curves, or need the data sets."""

ENOUGH = 1 / 4
"""Fraction of a figure's cells that must have been run for the figure to be included."""


# ------------------------------------------------------------------------------------------------ overview


def overview(
    findings: Sequence[Finding], tables: Sequence[Section], found: Mapping[str, Sequence[Outcome]], scale: Scale
) -> Overview:
    """The overview of the sections; at another scale than the paper's, without figures."""
    plots = [*_by_alpha(found["cifar10"]), *_by_size(found["ring-scales"])] if scale == "paper" else []
    run = tuple(plot for plot in plots if any(line.points for line in plot.lines))
    return Overview(_counts(tables), tuple(findings), run)


def _counts(tables: Sequence[Section]) -> str:
    counts = Counter(row.agreement for table in tables for row in table.rows)
    words: dict[Agreement, str] = {
        "within": "within the noise of the paper's number", "above": "above it", "below": "below it",
        "neither": "diverged as in the paper", "open": "without a verdict",
    }
    said = [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    run = counts.total() - counts["absent"]
    return f"{run} of {counts.total()} cells run" + (f": {', '.join(said)}." if said else ".")


# ------------------------------------------------------------------------------------------------ scores


MOTIVATION = "ResNet-EvoNorm-20"
"""The network of Figure 1."""


def _by_alpha(found: Sequence[Outcome]) -> list[Plot]:
    """Figure 1 for each network and graph: scores against the degree of heterogeneity."""
    here = [one for one in found if not one.cell.text and one.cell.experiment.uses_alpha]
    places = dict.fromkeys((one.cell.row.model, one.cell.column.group) for one in here)
    plots: list[Plot] = []
    for model, graph in sorted(places, key=lambda place: place[0] != MOTIVATION):
        group = [one for one in here if (one.cell.row.model, one.cell.column.group) == (model, graph)]
        number = NUMBERS["motivation" if model == MOTIVATION else "cifar10"]
        at = {one.cell.column: one.cell.experiment.alpha for one in group}
        x = "α (smaller: the nodes' data differ more)"
        plots.append(_scores(f"scores-{len(plots)}", f"{number}: {model}, {graph}", group, x, at))
    return plots


def _by_size(found: Sequence[Outcome]) -> list[Plot]:
    """Figure 6: scores against the size of the ring."""
    plots: list[Plot] = []
    for alpha in ("α = 1", "α = 0.1"):
        group = [one for one in found if one.cell.column.setting in (alpha, "iid")]
        at = {one.cell.column: float(one.cell.experiment.resolved.nodes) for one in group}
        title = f"{NUMBERS['figure-ring-scales']}: rings, {alpha}"
        plots.append(_scores(f"rings-{len(plots)}", title, group, "nodes on the ring", at))
    return plots


def _scores(
    anchor: str, title: str, group: Sequence[Outcome], x: str, at: Mapping[ColumnLabel, float]
) -> Plot:
    """Our scores, filled, over the paper's, hollow: one line per method; `at` has the places of the columns."""
    lines = []
    for method in dict.fromkeys(one.cell.row.method for one in group):
        here = sorted((one for one in group if one.cell.row.method == method), key=lambda one: at[one.cell.column])
        ours = [(at[one.cell.column], score) for one in here if (score := one.ours())]
        papers = [(at[one.cell.column], score) for one in here if (score := one.cell.score)]
        lines.append(Line(
            method,
            [(place, score.mean) for place, score in ours],
            [(score.mean - (score.std or 0), score.mean + (score.std or 0)) for _, score in ours],
            dots=True,
            algorithm=here[0].cell.experiment.algorithm,
            published=[(place, score.mean, score.std or 0) for place, score in papers],
        ))
    return Plot(anchor, title, tuple(lines), x, "test accuracy, %", logarithmic=True, beside_paper=True)


# ------------------------------------------------------------------------------------------------ own runs


def own_sections(store: RunStore, tables: Iterable[PaperTable]) -> list[Section]:
    """A section of the ended runs that belong to no cell of the tables, at any scale, if there are any."""
    cells = set[str]().union(*_settings(tables).values())
    found = [run for key, runs in store.ended.items() if key not in cells for run in runs]
    if not found:
        return []
    groups: dict[tuple[str, str, Ranking], list[Run]] = {}
    for run in found:
        one = run.experiment
        groups.setdefault((readable(one.model), readable(one.data), run.ranking()), []).append(run)
    rows: list[Row] = []
    plots: list[Plot] = []
    for k, ((model, data, score), group) in enumerate(groups.items()):
        settings, anchor = compared(group, named=True), f"own-{k}"
        drawn = [curve(one.label, one.runs, score) for one in settings]
        rows += [_own_row(one, anchor if line else "") for one, line in zip(settings, drawn, strict=True)]
        if lines := tuple(line for line in drawn if line):
            plots.append(Plot(anchor, f"{model} on {data}", lines, "epoch", f"test {score.title}"))
    says = f"runs outside the paper's tables: {len(found)}, settings: {len(rows)}"
    return [Section("own", "Own experiments", says, OWN_COLUMNS, tuple(rows), plots=tuple(plots))]


def _settings(tables: Iterable[PaperTable]) -> dict[Scale, set[str]]:
    """The settings of the tables' cells at each scale."""
    cells = [cell for table in tables for cell in table.cells]
    return {
        scale: {setting(run) for cell in cells for one in cell.experiments(scale) for run in (one, trial_of(one))}
        for scale in SCALES
    }


OWN_COLUMNS = (
    Column("model"), Column("data"), Column("setting"), Column("seeds", numeric=True), Column("score", numeric=True),
    Column("best", numeric=True), Column("worst node", numeric=True), Column("averaged", numeric=True),
    Column("status"), Column("curves", brief=False),
)


def _own_row(one: Setting, anchor: str) -> Row:
    experiment = one.runs[0].experiment
    lasts = [number(run.summary.last, one.score.name) if run.summary else None for run in one.runs]
    last = next((value for value in lasts if value is not None), None)
    return Row((
        Cell(readable(experiment.model)), Cell(readable(experiment.data)), Cell(one.label), Cell(str(len(one.runs))),
        Cell(one.scores[0], last), *map(Cell, one.scores[1:]), Cell(one.status),
        Cell("curves" if anchor else "", link=anchor),
    ), name_of(experiment.algorithm))
