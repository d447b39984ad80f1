"""The report on a run store: the paper's claims and tables beside the results of our runs."""

from __future__ import annotations

from collections.abc import Sequence

from quasiglobal.reproduction.paper.cells import DIFFERENCE, PaperTable, Scale
from quasiglobal.reproduction.paper.claim_list import CLAIMS, TUNING, momentum_tuning, tuning_claim
from quasiglobal.reproduction.paper.outcomes import Outcome, outcomes
from quasiglobal.reproduction.paper.own_runs import not_shown, own_section
from quasiglobal.reproduction.paper.summary_claims import claims_section
from quasiglobal.reproduction.paper.summary_figures import FIGURE_TABLES, summary_figures
from quasiglobal.reproduction.paper.summary_overview import overview
from quasiglobal.reproduction.paper.summary_tables import table_section
from quasiglobal.reproduction.paper.tables import TABLES
from quasiglobal.reproduction.report.document import Document
from quasiglobal.reproduction.report.noise import EXPLANATION
from quasiglobal.runs.store import RunStore


def summary(store: RunStore, scale: Scale = "paper") -> Document:
    """The report on a run store; cells without runs are marked as not run."""
    tables = _tables(store, scale)
    found = {name: outcomes(table, store, scale) for name, table in tables.items()}
    claims = claims_section([*CLAIMS, tuning_claim(tables[TUNING])], found, scale)
    own = own_section(store, tables.values())
    papers = [table_section(table, found[name], scale) for name, table in TABLES.items()]
    sections = (claims, *([own] if own else []), *papers)
    says = _introduction([outcome for name in TABLES for outcome in found[name]], scale)
    figures, brief = summary_figures(found, scale), overview(claims, papers, found, scale)
    return Document("Quasi-global momentum: the paper and our runs", says, sections, LEGEND, figures, brief)


def left_out(store: RunStore, scale: Scale = "paper") -> list[str]:
    """Sentences on the runs in the store that the report at this scale does not show."""
    return not_shown(store, _tables(store, scale).values(), scale)


def _tables(store: RunStore, scale: Scale) -> dict[str, PaperTable]:
    return {**TABLES, TUNING: momentum_tuning(store, scale), **FIGURE_TABLES}


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
