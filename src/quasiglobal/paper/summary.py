"""Everything the store has of the paper, beside the paper: its claims in words and its tables, as one report."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from quasiglobal.common.files import replacing
from quasiglobal.paper.claims import (
    CLAIMS,
    TUNING,
    Claim,
    Judged,
    Place,
    momentum_tuning,
    our_scores,
    paper_scores,
    signed,
    tuning_claim,
    verdict,
)
from quasiglobal.paper.comparison import PAPER_SEEDS, Verdict, by_setting, model_and_method, order, to_paper
from quasiglobal.paper.published import NOT_CONVERGED, Score
from quasiglobal.paper.reproduce import Outcome, Which, outcomes
from quasiglobal.paper.tables import DIFFERENCE, TABLES, Scale, Table
from quasiglobal.paper.trained import TRAINED, drawn
from quasiglobal.paper.trained import Place as DrawnAt
from quasiglobal.report.document import Cell, Column, Document, Drawing, Line, Mark, Plot, Row, Section
from quasiglobal.report.drawings import drawing
from quasiglobal.report.latex import latex
from quasiglobal.report.markdown import markdown
from quasiglobal.report.noise import EXPLANATION, Sample
from quasiglobal.report.page import page

FORMATS = {"html": ("index.html", page), "markdown": ("tables.md", markdown), "latex": ("tables.tex", latex)}
"""The file of each format, and who writes it."""


def write(document: Document, folder: Path, formats: Iterable[str] = FORMATS) -> list[Path]:
    """The report in each format, in a folder."""
    paths = []
    for name in formats:
        file, text_of = FORMATS[name]
        with replacing(folder / file) as temporary:
            temporary.write_text(text_of(document), encoding="utf-8")
        paths.append(folder / file)
    return paths


def document(root: Path, scale: Scale = "paper") -> Document:
    """The report of the runs under a folder; what was not run says so."""
    tuning = momentum_tuning(root, scale)
    trained = {name: TRAINED[name].table for name in FIGURES}
    found = _outcomes({**TABLES, TUNING: tuning, **trained}, root, scale)
    claims = _claims([*CLAIMS, tuning_claim(tuning)], our_scores(found), scale)
    sections = (claims, *(_table(table, found[name], scale) for name, table in TABLES.items()))
    says = _introduction([outcome for name in TABLES for outcome in found[name]], scale)
    return Document("Quasi-global momentum: the paper and our runs", says, sections, LEGEND, _figures(found, scale))


def _outcomes(tables: Mapping[str, Table], root: Path, scale: Scale) -> dict[str, list[Outcome]]:
    """The outcomes of each table, as if they were one, so that the store is read once."""
    cells = tuple(cell for table in tables.values() for cell in table.cells)
    every = iter(outcomes(Table("all", "", (), (), cells), root, scale))
    return {name: list(itertools.islice(every, len(table.cells))) for name, table in tables.items()}


def _figures(found: Mapping[str, Sequence[Outcome]], scale: Scale) -> tuple[Drawing, ...]:
    """The paper's figures of training that show more than the tables' curves, where there are runs enough."""
    made = []
    for name in FIGURES:
        if sum(bool(outcome.runs) for outcome in found[name]) >= ENOUGH * len(found[name]):
            title = TRAINED[name].table.title_at(scale)
            figure = drawn(name, found[name], DrawnAt(scale))
            figure.figure.suptitle("")
            says = figure.says.removeprefix(f"{title}. ")
            made.append(drawing(name, f"Figure: {title}", says, figure.figure))
    return tuple(made)


FIGURES = (
    "figure-effective-step", "figure-single-worker", "figure-weight-decay", "figure-momentum-tuning",
    "figure-ring-scales",
)
"""Those that need nothing but the store: others draw partitions too, for which the data must be here."""

ENOUGH = 1 / 4
"""The share of its cells that must have been run for a figure to show anything."""


def _introduction(cells: Sequence[Outcome], scale: Scale) -> tuple[str, ...]:
    done = sum(bool(outcome.runs) for outcome in cells)
    runs = {run.folder for outcome in cells for run in (*outcome.runs, *outcome.trials.values())}
    says: tuple[str, ...] = (
        "Every table of Lin, Karimireddy, Stich and Jaggi, Quasi-Global Momentum (ICML 2021), cell by cell, with the "
        "test accuracy in per cent that the paper reports and the one that our runs reached.",
        f"{done} of {len(cells)} cells were run, with {len(runs)} runs in all, as one can serve several cells. "
        "Nothing here is estimated: a cell without runs says so.",
    )
    if scale in DIFFERENCE:
        says += (f"These are not the paper's experiments: {DIFFERENCE[scale]}. They are not held against its numbers.",)
    return says


LEGEND = (
    "Accuracy is the mean over the nodes' own models on the whole test set after the last epoch, mean ± standard "
    "deviation over the seeds, whose number is in brackets. Best is that of the best epoch tested, which takes the "
    "test set to choose it; averaged is that of the average of all nodes' models after the last epoch.",
    EXPLANATION,
    "The order holds for a method when, of the others of the same model in the same column that were run, those are "
    "below it that are below it in the paper; it is undecided when the exceptions are within the noise of our runs.",
    "A claim holds when every comparison comes out as it says, so far when not all were run, and does not hold when "
    "one is the other way round beyond the noise; in between it is undecided. To hold, a difference need not be "
    "beyond the noise, as few of three seeds are; how many are stands beside it. The paper's own numbers are judged by "
    "the same rule. Of comparisons between equals one in forty is beyond the noise on the wrong side by chance alone.",
    "A learning rate is the best of those tried with seed 0. It counts as tuned when it is inside a grid of at least "
    "three; at an end of the grid, a better one may lie beyond. ⋆: did not converge. Curves are means over seeds; the "
    "band, where few curves meet, is their range.",
    "Rows “as in the text” have the form that the paper's text describes where the authors' released code, which made "
    "the numbers, has another.",
)

# ------------------------------------------------------------------------------------------------ the claims

VERDICTS: Mapping[Verdict, tuple[str, Mark]] = {
    "holds": ("holds", "good"),
    "within noise": ("undecided", "fair"),
    "does not hold": ("does not hold", "bad"),
}
OTHER_SCALE = Cell("other scale", mark="none")
"""In place of a verdict on what are not the paper's experiments."""

CLAIM_COLUMNS = (
    Column("claim", share=0.31), Column("where", share=0.13), Column("in the paper's numbers", share=0.2),
    Column("in our runs", share=0.2), Column("run", numeric=True),
)


def _claims(claims: Sequence[Claim], ours: Mapping[Place, Sample], scale: Scale) -> Section:
    papers = paper_scores()
    rows, counts = [], Counter[str]()
    for claim in claims:
        judged, all_of_them = claim.judge(ours), len(claim.comparisons)
        found = _verdict(judged, all_of_them, "not run") if scale not in DIFFERENCE or not judged else OTHER_SCALE
        counts[found.text] += 1
        rows.append(Row((
            Cell(claim.says),
            Cell(claim.where),
            _verdict(claim.judge(papers), all_of_them, "no numbers"),
            found,
            Cell(f"{len(judged)} of {all_of_them}", len(judged) / max(all_of_them, 1)),
        ), known=bool(judged)))
    says = ", ".join(f"{text}: {counts[text]}" for text in sorted(counts))
    return Section("claims", "What the paper claims", says, CLAIM_COLUMNS, tuple(rows))


def _verdict(judged: Sequence[Judged], all_of_them: int, otherwise: str) -> Cell:
    result = verdict(judged)
    if result is None:
        return Cell(otherwise, mark="none")
    text, mark = VERDICTS[result]
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


# ------------------------------------------------------------------------------------------------ the tables

COLUMNS = (
    Column("method"), Column("setting"), Column("paper", numeric=True), Column("ours", numeric=True),
    Column("difference", numeric=True), Column("noise"), Column("order"),
    Column("lr", numeric=True), Column("epochs", numeric=True, brief=False),
    Column("best", numeric=True, brief=False), Column("averaged", numeric=True, brief=False),
    Column("curves", brief=False),
)


def _table(table: Table, found: Sequence[Outcome], scale: Scale) -> Section:
    groups = by_setting(found)
    rows, plots = [], []
    counts = Counter[str]()
    curves = {id(outcome): _curve(outcome) for outcome in found}
    for k, ((model, column), group) in enumerate(groups.items()):
        title = ", ".join(filter(None, (model, column)))
        lines = tuple(line for outcome in group if (line := curves[id(outcome)]))
        plots += [plot for plot in (_curves(table, k, title, lines), _rates(table, k, title, group)) if plot]
    anchors = {id(outcome): f"{table.name}-{k}" for k, group in enumerate(groups.values()) for outcome in group}
    for outcome in found:
        group = groups[model_and_method(outcome.cell.row)[0], outcome.cell.column]
        row = _row(outcome, group, anchors[id(outcome)] if curves[id(outcome)] else None, scale)
        rows.append(row)
        counts.update(cell.text.split()[0] for cell in row.cells[5:6] if cell.mark in ("good", "bad"))
        counts.update(f"order {cell.text}" for cell in row.cells[6:7] if cell.mark in ("good", "fair", "bad"))
    done = sum(row.known for row in rows)
    says = f"{done} of {len(rows)} cells run" if done else "not run"
    if compared := counts["within"] + counts["beyond"]:
        says += f", {counts['within']} of {compared} within the noise of the paper's"
    if ordered := sum(counts[f"order {name}"] for name, _ in VERDICTS.values()):
        says += f", the order holds for {counts['order holds']} of {ordered}"
    return Section(table.name, table.title_at(scale), says, COLUMNS, tuple(rows), table.notes, tuple(plots))


def _row(outcome: Outcome, group: Sequence[Outcome], anchor: str | None, scale: Scale) -> Row:
    cell, experiment = outcome.cell, outcome.experiment
    paper = Cell(NOT_CONVERGED) if cell.score is None else _score(cell.score)
    start = (Cell(cell.row), Cell(cell.column), paper)
    name = experiment.algorithm.partition(":")[0]
    if not outcome.runs:
        return Row((*start, Cell("not run", mark="none"), *[Cell("")] * (len(COLUMNS) - 4)), name, known=False)
    return Row((
        *start,
        _ours(outcome),
        *_difference(outcome, scale),
        _order(outcome, group, scale),
        _learning_rate(outcome),
        Cell(str(experiment.epochs), experiment.epochs),
        *(_score(score) if (score := outcome.ours(which)) else Cell("") for which in OTHERS),
        Cell("curves", link=anchor) if anchor else Cell(""),
    ), name)


OTHERS: tuple[Which, ...] = ("best", "averaged")


def _score(score: Score) -> Cell:
    return Cell(str(score), score.mean)


def _ours(outcome: Outcome) -> Cell:
    seeds = f"({len(outcome.runs)})"
    score = outcome.ours()
    if score is None:
        gone = sum(run.status == "diverged" for run in outcome.runs)
        return Cell(f"{NOT_CONVERGED} {seeds}", mark="bad", why=(f"{gone} of {len(outcome.runs)} diverged",))
    return Cell(f"{score} {seeds}", score.mean)


def _difference(outcome: Outcome, scale: Scale) -> tuple[Cell, Cell]:
    """The difference to the paper, and whether it is within the noise."""
    if scale in DIFFERENCE:
        return Cell(""), OTHER_SCALE
    found = to_paper(outcome)
    if found is None:
        return Cell(""), _not_converged(outcome.diverged, outcome.cell.score is None)
    value = Cell(signed(found.value), found.value)
    if found.noise is None:
        return value, Cell("unknown", mark="none", why=("no standard deviation",))
    if not found.within:
        return value, Cell(f"beyond ±{found.noise:.2f}", mark="bad")
    if len(outcome.runs) < PAPER_SEEDS:
        return value, Cell("too few seeds", mark="none", why=(f"±{found.noise:.2f}",))
    return value, Cell(f"within ±{found.noise:.2f}", mark="good")


def _not_converged(ours: bool, papers: bool) -> Cell:
    if ours and papers:
        return Cell("neither converged", mark="good")
    return Cell("ours diverged", mark="bad") if ours else Cell("the paper's diverged", mark="fair")


def _order(outcome: Outcome, group: Sequence[Outcome], scale: Scale) -> Cell:
    found = order(outcome, group)
    if found.verdict is None:
        return Cell("")
    if scale in DIFFERENCE:
        return OTHER_SCALE
    text, mark = VERDICTS[found.verdict]
    against = [*found.reversed, *found.unclear]
    return Cell(text, mark=mark, why=(f"not with {', '.join(against)}",) if against else ())


def _learning_rate(outcome: Outcome) -> Cell:
    rate = outcome.experiment.peak_lr
    return Cell(f"{rate:g}", rate, why=(outcome.how,))


# ------------------------------------------------------------------------------------------------ the curves


MOST_BANDS = 5
"""With more curves in a frame than this, their bands hide each other."""


def _curves(table: Table, k: int, title: str, lines: tuple[Line, ...]) -> Plot | None:
    if len(lines) > MOST_BANDS:
        lines = tuple(replace(line, band=()) for line in lines)
    return Plot(f"{table.name}-{k}", title, lines, "epoch", "test accuracy, %") if lines else None


def _tests(outcome: Outcome) -> dict[int, list[float]]:
    """The seeds' accuracies in per cent, by epoch."""
    tests: dict[int, list[float]] = {}
    for run in outcome.runs:
        for record in run.records:
            if record.get("accuracy") is not None:
                tests.setdefault(record["epoch"], []).append(100 * record["accuracy"])
    return dict(sorted(tests.items()))


def _curve(outcome: Outcome) -> Line | None:
    """The mean over the seeds, None where nothing was tested."""
    tests = _tests(outcome)
    if not tests:
        return None
    points = [(epoch, statistics.fmean(values)) for epoch, values in tests.items()]
    band = [(min(values), max(values)) for values in tests.values()] if len(outcome.runs) > 1 else []
    label = model_and_method(outcome.cell.row)[1]
    return Line(label, points, band, dots=len(points) == 1, algorithm=outcome.experiment.algorithm)


def _rates(table: Table, k: int, title: str, group: Sequence[Outcome]) -> Plot | None:
    """Seed 0 at every learning rate tried."""
    lines = []
    for outcome in group:
        points = [
            (rate, 100 * summary["last"]["accuracy"])
            for rate, run in outcome.trials.items()
            if run.status == "finished" and (summary := run.summary)
        ]
        if len(points) > 1:
            label = model_and_method(outcome.cell.row)[1] + (", short runs" if outcome.tuned_short else "")
            lines.append(Line(label, points, dots=True, algorithm=outcome.experiment.algorithm))
    if not lines:
        return None
    name, y = f"{table.name}-{k}-rates", "test accuracy of seed 0, %"
    return Plot(name, title, tuple(lines), "learning rate", y, logarithmic=True)
