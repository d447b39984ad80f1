"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from quasiglobal.paper.published import NOT_CONVERGED, Score
from quasiglobal.runs.store import Run
from quasiglobal.topology import Topology
from quasiglobal.training.experiment import Experiment, group_by_seed
from quasiglobal.training.metrics import Ranking, number


def columns(runs: Sequence[Run]) -> tuple[str, ...]:
    """Headings of a comparison of runs."""
    titles = {run.score.title for run in runs}
    title = titles.pop() if len(titles) == 1 else "score"
    best = "best, %" if title.endswith("%") else "best"
    return "setting", "seeds", title, best, "worst node", "averaged model", "status"


def comparison(runs: Sequence[Run]) -> Table:
    """One row per setting, mean ± std over its seeds."""
    first, *others = columns(runs)
    table = Table(Column(first, overflow="fold"), *others)
    for row in compared(runs):
        table.add_row(*row)
    return table


def compared(runs: Sequence[Run]) -> list[list[str]]:
    """Mean ± std over seeds of the last and of the best test; if a seed diverged, the cell is ⋆, as in the paper."""
    rows = []
    groups = group_by_seed(runs, lambda run: run.experiment)
    for label, group in sorted(groups.items(), key=lambda item: _order(item[1][0].experiment)):
        lasts = [run.summary.last for run in group if run.summary and run.summary.last]
        bests = [run.summary.best for run in group if run.summary and run.summary.best]
        score = group[0].score
        of = score.name
        shown = ((lasts, of), (bests, of), (lasts, f"{of}_worst"), (lasts, f"{of}_averaged"))
        cells = [
            _mean_std([found for record in records if (found := number(record, name)) is not None], score)
            for records, name in shown
        ]
        if any(run.status == "diverged" for run in group):
            cells = [NOT_CONVERGED] * len(cells)
        rows.append([label, str(len(group)), *cells, ", ".join(sorted({run.status for run in group}))])
    return rows


def _order(one: Experiment) -> tuple[object, ...]:
    """Sort key: similar experiments next to each other, numbers in numeric order."""
    learner = (one.data, one.model, one.norm or "", one.algorithm)
    return *learner, one.topology, one.partition, one.alpha, one.epochs, one.peak_lr


def _mean_std(values: Sequence[float], score: Ranking) -> str:
    if not values:
        return "-"
    found = Score.of([score.factor * value for value in values])
    return str(found) if score.percent else " ± ".join(f"{x:.4g}" for x in (found.mean, found.std) if x is not None)


def facts_table(facts: dict[str, str]) -> Table:
    """A table of names and values."""
    table = Table(show_header=False, box=None)
    for name, value in facts.items():
        table.add_row(name, value)
    return table


def topology_facts(graph: Topology) -> dict[str, str]:
    """A topology's spectral properties."""
    def number_or(value: float | None, otherwise: str) -> str:
        return otherwise if value is None else f"{value:.6g}"

    beta = number_or(graph.largest_beta, "unknown")
    degrees = [len(graph.neighbours(i)) for i in range(graph.n)]
    symmetric = "only for a fixed symmetric W"
    return {
        "topology": str(graph),
        "nodes n": str(graph.n),
        "edges": f"{len(graph.edges)}, {'undirected' if graph.is_symmetric else 'directed'}",
        "neighbours": f"{min(degrees)} to {max(degrees)}" if len(set(degrees)) > 1 else str(degrees[0]),
        "period": str(graph.period),
        "symmetric": "yes" if graph.is_symmetric else "no",
        "doubly stochastic": _stochastic(graph),
        "λ₂": number_or(graph.lambda_2, symmetric),
        "λ_min": number_or(graph.lambda_min, symmetric),
        "ρ": number_or(graph.rho, "only for a doubly stochastic W"),
        "largest β in theory": f"{beta}  (β/(1 − β) ≤ ρ/21; practice uses 0.9)",
    }


def _stochastic(graph: Topology) -> str:
    if graph.is_doubly_stochastic:
        return "yes"
    return "no: there are negative weights" if graph.keeps_mean else "no: the nodes' mean drifts"
