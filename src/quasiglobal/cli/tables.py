"""Tables that several commands print."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quasiglobal.cli.listing import Listing, Text, Values
from quasiglobal.runs.best import kept_in
from quasiglobal.runs.comparison import Setting, compared
from quasiglobal.runs.store import Run
from quasiglobal.topology import Topology
from quasiglobal.topology.parsing import FROM_LABELS, KINDS, parse

SCORES = ("score", "best", "worst_node", "averaged_model")
"""Keys of a setting's scores."""


def comparison(runs: Sequence[Run]) -> Listing:
    """One row per setting, mean ± std over its seeds."""
    titles = {run.score.title for run in runs}
    title = titles.pop() if len(titles) == 1 else "score"
    best = "best, %" if title.endswith("%") else "best"
    headings = (title, best, "worst node", "averaged model")
    settings = compared(runs)
    rows = [_compared(one) for one in settings]
    texts = {one.label: dict(zip(SCORES, one.scores, strict=True)) for one in settings}

    def text(key: str) -> Any:
        return lambda row: texts[row["setting"]][key]

    scores = {heading: text(key) for heading, key in zip(headings, SCORES, strict=True)}
    return Listing(rows, {"setting": "setting", "seeds": "seeds", **scores, "status": "status"})


def models_in_words(run: Run) -> str:
    """Lines about the models of a run besides the last: the best of each node, and where a fetched one is from."""
    lines = []
    for one in kept_in(run.folder):
        value = "" if one.value is None else f", {run.score.name} {run.score.shown(one.value)}{'%' * run.score.percent}"
        lines.append(f"best model of node {one.node}: epoch {one.epoch}{value}")
    if run.summary and run.summary.fetched:
        lines.append("last model: that of node {node} ({site}), at step {step}".format(**run.summary.fetched))
    return "\n".join(lines)


def _compared(one: Setting) -> dict[str, Any]:
    """A setting as raw values; the scores are null if a seed diverged."""
    values: dict[str, Any] = {"setting": one.label, "seeds": len(one.runs), "metric": one.runs[0].score.name}
    for key, found in zip(SCORES, one.measured, strict=True):
        values |= {key: found and found.mean, f"{key}_std": found and found.std}
    return values | {"status": one.status, "runs": [str(run.folder) for run in one.runs]}


def topology_values(graph: Topology) -> dict[str, Any]:
    """A topology's spectral properties and traffic; null where they are not defined."""
    degrees = [len(graph.neighbours(i)) for i in range(graph.n)]
    return {
        "topology": str(graph),
        "nodes": graph.n,
        "edges": len(graph.edges),
        "neighbours_min": min(degrees),
        "neighbours_max": max(degrees),
        "period": graph.period,
        "symmetric": graph.is_symmetric,
        "doubly_stochastic": graph.is_doubly_stochastic,
        "keeps_mean": graph.keeps_mean,
        "lambda_2": graph.lambda_2,
        "lambda_min": graph.lambda_min,
        "rho": graph.rho,
        "largest_beta": graph.largest_beta,
        "nu": graph.nu,
        "exact_after": graph.exact_after,
        "peers_mean": graph.peers[0],
        "peers_max": graph.peers[1],
        "estimated": graph.period is None,
        "weights": None if graph.shares is None else graph.shares.tolist(),
    }


def topology_facts(values: Values) -> dict[str, str]:
    """`topology_values` as text."""
    def number_or(key: str, otherwise: str) -> str:
        about = "about " if values["estimated"] else ""
        return otherwise if values[key] is None else f"{about}{values[key]:.6g}"

    fewest, most = values["neighbours_min"], values["neighbours_max"]
    stochastic = "no: there are negative weights" if values["keeps_mean"] else "no: the nodes' mean drifts"
    symmetric, keeps = "yes" if values["symmetric"] else "no", "yes" if values["doubly_stochastic"] else stochastic
    if shares := values["weights"]:
        symmetric, keeps = "no, but p_i w_ij = p_j w_ji", "no: it keeps the weighted mean Σ p_i x_i"
    return {
        "topology": values["topology"],
        "nodes n": str(values["nodes"]),
        "edges": f"{values['edges']}, {'undirected' if values['symmetric'] else 'directed'}",
        "neighbours": f"{fewest} to {most}" if fewest < most else str(fewest),
        "peers a step": f"{values['peers_mean']:.6g} on average, at most {values['peers_max']}",
        "period": "none: drawn at random" if values["period"] is None else str(values["period"]),
        "exact average": "never" if values["exact_after"] is None else f"after {_steps(values['exact_after'])}",
        **({"shares p": f"{min(shares):.4g} to {max(shares):.4g}"} if shares else {}),
        "symmetric": symmetric,
        "doubly stochastic": keeps,
        "λ₂": number_or("lambda_2", "only for a fixed symmetric W"),
        "λ_min": number_or("lambda_min", "only for a fixed symmetric W"),
        "ρ": number_or("rho", "only for a doubly stochastic W"),
        "ν": number_or("nu", "only for a doubly stochastic W"),
        "largest β in theory": f"{number_or('largest_beta', 'unknown')}  (β/(1 − β) ≤ ρ/21; practice uses 0.9)",
    }


def topology_listing() -> Listing:
    """One row per topology, with the facts of an example."""
    kinds = {kind.example: kind.summary for kind in (KINDS | FROM_LABELS).values()}
    known = {kind.example for kind in KINDS.values()}
    rows = [
        {"example": example, "summary": summary} | (topology_values(parse(example)) if example in known else {})
        for example, summary in (kinds | FORMS).items()
    ]

    def number(key: str) -> Callable[[Values], str]:
        return lambda row: "" if row.get(key) is None else f"{row[key]:.3g}"

    def peers(row: Values) -> str:
        mean, most = number("peers_mean")(row), number("peers_max")(row)
        return mean if mean == most else f"{mean}, at most {most}"

    facts: dict[str, Callable[[Values], str]] = {
        "peers a step": peers, "ρ": number("rho"), "ν": number("nu"), "exact after": number("exact_after"),
    }

    def brief(row: Values) -> str:
        said = [f"{name} {text}" for name, of in facts.items() if (text := of(row))]
        return "\n".join([row["summary"], *(["; ".join(said)] if said else [])])

    columns: dict[str, Text] = {"topology": "example", **facts, "definition": "summary"}
    return Listing(rows, columns, folds={"definition": 24}, brief=brief)


FORMS = {
    "file:graph.edgelist": "Links from an edge list or CSV file, with or without weights.",
    "every:4/ring:16": "Gossip at every 4th step, local steps in between.",
    "lazy/ring:16": "(I + W)/2: the same neighbours with half the weights.",
    "package.module:name": "Your own Topology, graph or dict of neighbours, or a function that returns one.",
}
"""Topologies that are made of others, or of files and objects."""


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"
