"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Column, Table

from quasiglobal.paper.own_runs import by_setting
from quasiglobal.runs.store import Run
from quasiglobal.topology import Topology


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
    """The rows of a comparison of runs."""
    return [[one.label, str(len(one.runs)), *one.scores, one.status] for one in by_setting(runs)]


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
