"""Tables that commands print: as text, as lines where a table is too wide for the terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len
from rich.padding import Padding
from rich.table import Column, Table

from quasiglobal.cli.terminal import console, print_json
from quasiglobal.runs.best import kept_in
from quasiglobal.runs.comparison import Setting, compared
from quasiglobal.runs.store import Run
from quasiglobal.topology import Topology
from quasiglobal.topology.parsing import FROM_LABELS, KINDS, parse

Values = dict[str, Any]
"""A row of a table, or another part of a JSON document."""

Text = str | Callable[[Values], str]
"""Text of a column in a row: the row's value under this key, or a function of the row."""

SHORTEST = 24
"""Width to which the first column of a table may be folded."""


@dataclass(frozen=True)
class Listing:
    """A table: `columns` has the text of each column by heading. In JSON the rows are as they are."""

    rows: Sequence[Values]
    columns: Mapping[str, Text]
    title: str = ""
    caption: str = ""
    group: Text = ""
    """Heading above the rows that have it."""
    folds: Mapping[str, int] = field(default_factory=dict)
    """Columns that may be folded, besides the first, and the width that each keeps."""
    brief: Callable[[Values], str] | None = None
    """Text under the first column where a table is too wide; by default `name: value` lines."""

    def show(self, as_json: bool = False) -> None:
        """Print the table as text or JSON."""
        if as_json:
            print_json(self.rows)
            return
        groups: dict[str, list[Values]] = {}
        for row in self.rows:
            groups.setdefault(_text(self.group, row) if self.group else "", []).append(row)
        if self.title:
            console.print(self.title, style="bold")
        widths = self._widths()
        for heading, rows in groups.items():
            if heading:
                console.print(f"\n{heading}", style="bold underline")
            if widths is None:
                self._print_lines(rows)
            else:
                self._print_table(rows, widths)
        if self.caption:
            console.print(f"\n{self.caption}" if self.group else self.caption)

    def texts(self) -> list[list[str]]:
        """The text of each row."""
        return [self._texts(row) for row in self.rows]

    def _texts(self, row: Values) -> list[str]:
        return [_text(text, row) for text in self.columns.values()]

    def _widths(self) -> list[int] | None:
        """Width of each column; None if the table does not fit the terminal."""
        lines = [[name.replace(" ", "\n") for name in self.columns], *self.texts()]
        full = [max(map(cell_len, "\n".join(cells).split("\n"))) for cells in zip(*lines, strict=True)]
        first = next(iter(self.columns))
        least = {first: SHORTEST} | dict(self.folds)
        widths = [min(least.get(name, width), width) for name, width in zip(self.columns, full, strict=True)]
        left = console.width - sum(widths) - 3 * len(widths) - 1
        if left < 0 or len(widths) == 1:
            return None
        for k, width in enumerate(full):
            more = min(left, width - widths[k])
            widths[k], left = widths[k] + more, left - more
        return widths

    def _print_table(self, rows: Sequence[Values], widths: Sequence[int]) -> None:
        sized = zip(self.columns, widths, strict=True)
        table = Table(*(Column(name, width=width, overflow="fold") for name, width in sized))
        for row in rows:
            table.add_row(*self._texts(row))
        console.print(table)

    def _print_lines(self, rows: Sequence[Values]) -> None:
        _, *names = self.columns
        for row in rows:
            first, *others = self._texts(row)
            console.print(first, style="bold")
            if self.brief:
                console.print(Padding(self.brief(row), (0, 0, 0, 2), expand=False))
            else:
                said = {f"  {name}:": text for name, text in zip(names, others, strict=True) if text}
                console.print(facts_table(said))


def _text(text: Text, row: Values) -> str:
    return str(row[text]) if isinstance(text, str) else text(row)


def facts_table(facts: Mapping[str, str]) -> Table:
    """A table of names and values."""
    table = Table(Column(no_wrap=True), Column(overflow="fold"), show_header=False, box=None, padding=(0, 1, 0, 0))
    for name, value in facts.items():
        table.add_row(name, value)
    return table


# -------------------------------------------------------------------------------------------- runs

SCORES = ("score", "best", "worst_node", "averaged_model")
"""Keys of a setting's scores."""


def comparison(runs: Sequence[Run]) -> Listing:
    """One row per setting, mean ± std over its seeds."""
    titles = {run.ranking().title for run in runs}
    title = titles.pop() if len(titles) == 1 else "score"
    best = "best, %" if title.endswith("%") else "best"
    headings = (title, best, "worst node", "averaged model")
    settings = compared(runs)
    rows = [_compared(one) for one in settings]
    texts = {one.label: dict(zip(SCORES, one.scores, strict=True)) for one in settings}

    def text(key: str) -> Callable[[Values], str]:
        return lambda row: texts[row["setting"]][key]

    scores = {heading: text(key) for heading, key in zip(headings, SCORES, strict=True)}
    return Listing(rows, {"setting": "setting", "seeds": "seeds", **scores, "status": "status"})


def models_in_words(run: Run) -> str:
    """Lines about the models of a run besides the last: the best of each node, and where a fetched one is from."""
    lines = []
    for one in kept_in(run.folder):
        score = run.ranking()
        value = "" if one.value is None else f", {score.name} {score.shown(one.value)}{'%' * score.percent}"
        lines.append(f"best model of node {one.node}: epoch {one.epoch}{value}")
    if run.summary and run.summary.fetched:
        lines.append("last model: that of node {node} ({site}), at step {step}".format(**run.summary.fetched))
    return "\n".join(lines)


def _compared(one: Setting) -> Values:
    """A setting as raw values; the scores are null if a seed diverged."""
    values: Values = {"setting": one.label, "seeds": len(one.runs), "metric": one.score.name}
    for key, found in zip(SCORES, one.measured, strict=True):
        values |= {key: found and found.mean, f"{key}_std": found and found.std}
    return values | {"status": one.status, "runs": [str(run.folder) for run in one.runs]}


# -------------------------------------------------------------------------------------- topologies


def topology_values(graph: Topology) -> Values:
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
