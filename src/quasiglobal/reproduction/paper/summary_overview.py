"""The report's overview: how many cells agree with the paper, a line per claim, and the figures of scores."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from quasiglobal.reproduction.paper.cells import Scale
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.paper.published import ColumnLabel
from quasiglobal.reproduction.paper.targets import NUMBERS
from quasiglobal.reproduction.report.document import Agreement, Finding, Line, Overview, Plot, Section


def overview(
    claims: Section, tables: Sequence[Section], found: Mapping[str, Sequence[Outcome]], scale: Scale
) -> Overview:
    """The overview of the sections; at another scale than the paper's, without figures."""
    plots = (*_by_alpha(found["cifar10"]), *_by_size(found["ring-scales"])) if scale == "paper" else ()
    return Overview(_counts(tables), tuple(_findings(claims)), plots)


def _counts(tables: Sequence[Section]) -> str:
    counts = Counter(row.agreement for table in tables for row in table.rows)
    words: dict[Agreement, str] = {
        "within": "within the noise of the paper's number", "above": "above it", "below": "below it",
        "neither": "diverged as in the paper", "open": "without a verdict",
    }
    said = [f"{counts[kind]} {text}" for kind, text in words.items() if counts[kind]]
    run = counts.total() - counts["absent"]
    return f"{run} of {counts.total()} cells run" + (f": {', '.join(said)}." if said else ".")


SIGNS = {"holds": "✓", "holds so far": "✓", "undecided": "?", "does not hold": "✗"}
"""Mark of each verdict, besides its colour."""


def _findings(claims: Section) -> list[Finding]:
    titles = [column.title for column in claims.columns]
    says, verdict, run = (titles.index(title) for title in ("claim", "in our runs", "run"))
    return [
        Finding(
            SIGNS.get(row.cells[verdict].text, "–"), row.cells[says].text, row.cells[verdict], row.cells[run].text,
            row.anchor,
        )
        for row in claims.rows
    ]


# ------------------------------------------------------------------------------------------------ the figures


MOTIVATION = "ResNet-EvoNorm-20"
"""The network of Figure 1."""


def _by_alpha(found: Sequence[Outcome]) -> list[Plot]:
    """Figure 1 for each network and graph: scores against the degree of heterogeneity."""
    here = [one for one in found if not one.cell.text and one.cell.column.setting.startswith("α = ")]
    places = dict.fromkeys((one.cell.row.model, one.cell.column.group) for one in here)
    plots: list[Plot] = []
    for model, graph in sorted(places, key=lambda place: place[0] != MOTIVATION):
        group = [one for one in here if (one.cell.row.model, one.cell.column.group) == (model, graph)]
        number = NUMBERS["motivation" if model == MOTIVATION else "cifar10"]
        title = f"{number}: {model}, {graph}"
        plots.append(_scores(f"scores-{len(plots)}", title, group, "α (smaller: the nodes' data differ more)", _alpha))
    return [plot for plot in plots if _was_run(plot)]


def _by_size(found: Sequence[Outcome]) -> list[Plot]:
    """Figure 6: scores against the size of the ring."""
    plots: list[Plot] = []
    for alpha in ("α = 1", "α = 0.1"):
        group = [one for one in found if one.cell.column.setting in (alpha, "iid")]
        title = f"{NUMBERS['figure-ring-scales']}: rings, {alpha}"
        plots.append(_scores(f"rings-{len(plots)}", title, group, "nodes on the ring", _size))
    return [plot for plot in plots if _was_run(plot)]


def _scores(
    anchor: str, title: str, group: Sequence[Outcome], x: str, place: Callable[[ColumnLabel], float]
) -> Plot:
    """Our scores, filled, over the paper's, hollow: one line per method."""
    lines = []
    for method in dict.fromkeys(one.cell.row.method for one in group):
        here = sorted((one for one in group if one.cell.row.method == method), key=lambda one: place(one.cell.column))
        ours = [(place(one.cell.column), score) for one in here if (score := one.ours())]
        papers = [(place(one.cell.column), score) for one in here if (score := one.cell.score)]
        lines.append(Line(
            method,
            [(at, score.mean) for at, score in ours],
            [(score.mean - (score.std or 0), score.mean + (score.std or 0)) for _, score in ours],
            dots=True,
            algorithm=here[0].cell.experiment.algorithm,
            published=[(at, score.mean, score.std or 0) for at, score in papers],
        ))
    return Plot(anchor, title, tuple(lines), x, "test accuracy, %", logarithmic=True, beside_paper=True)


def _was_run(plot: Plot) -> bool:
    return any(line.points for line in plot.lines)


def _alpha(column: ColumnLabel) -> float:
    return float(column.setting.removeprefix("α = "))


def _size(column: ColumnLabel) -> float:
    return float(column.group.removeprefix("ring "))
