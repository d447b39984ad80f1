"""Commands that list and describe the building blocks: algorithms, topology, data, partition."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import asdict, fields
from json import dumps
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS, Algorithm, algorithm
from quasiglobal.checks import check_algorithm
from quasiglobal.cli.arguments import DataFolder, File, Json, Name, call
from quasiglobal.cli.terminal import (
    Cells,
    Listing,
    Values,
    console,
    facts_table,
    preparing,
    print_json,
    say,
    say_written,
)
from quasiglobal.data.partition import class_counts, digest_of_parts, heterogeneity, split
from quasiglobal.data.sources import Corpus, available, published_examples, raw
from quasiglobal.engines.costs import COLUMNS, Entry, describe
from quasiglobal.errors import InputError
from quasiglobal.runs import plots
from quasiglobal.topology import Topology
from quasiglobal.topology.parsing import FROM_LABELS, KINDS, given_weights, parse


def algorithms(name: Name = None, markdown: bool = False, check: bool = False, json: Json = False) -> None:
    """List the algorithms with their traffic, memory and requirements on W, or explain one.

    Args:
        name: An algorithm, with or without options, or your own as package.module:Name.
        markdown: Print the list as a Markdown table.
        check: Run the checks on the algorithm; without a name, on all of them.
    """
    names = list(ALGORITHMS) if name is None else [name]
    if check:
        _check(names, json, each=name is None)
        return
    if name is not None:
        _explain(name, json)
        return
    entries = [describe(one) for one in names]
    columns: dict[str, Cells] = dict(zip(COLUMNS, zip(*(one.cells for one in entries), strict=True), strict=True))
    if markdown:
        columns[COLUMNS[0]] = tuple(f"`{name}`" for name in names)
    rows = [_entry_values(entry) for entry in entries]
    Listing(rows, columns, caption=UNITS, folds={"needs of W": 14, "from": 14}).show(json, markdown)


UNITS = (
    "Traffic and memory in multiples of the model: sent to each neighbour, or `to all` for an exact mean. "
    "Lost messages: the effect of `--drop`. `qg algorithms NAME` explains one."
)


def _check(names: Sequence[str], json: bool, each: bool) -> None:
    """Run the checks of algorithms and print their number, or the names of the checks of a single algorithm."""
    rows = []
    for name in names:
        passed = check_algorithm(name if each else algorithm(name))
        rows.append({"name": name, "checks": list(passed)})
        text = f"{name}: {len(passed)} checks passed"
        console.print(text if each else f"{name} passed {len(passed)} checks: {', '.join(passed)}")
    if json:
        print_json(rows if each else rows[0])


def _entry_values(entry: Entry) -> Values:
    """An algorithm's costs as raw values."""
    return {
        "name": entry.name, "traffic_neighbours": float(entry.traffic.neighbours),
        "traffic_all": float(entry.traffic.everybody), "memory": float(entry.memory), "needs": entry.needs,
        "citation": entry.citation, "loss": entry.loss,
    }


def _explain(name: str, json: bool) -> None:
    """Print an algorithm's equations and costs."""
    chosen, entry = algorithm(name), describe(name)
    texts = []
    part: Algorithm | None = chosen
    while part is not None:
        texts.append(inspect.getdoc(type(part)) or "")
        part = getattr(part, "base", None)
    if json:
        options = {one.name: getattr(chosen, one.name) for one in fields(chosen)}
        print_json(_entry_values(entry) | {"options": options, "text": "\n\n".join(texts)})
        return
    for text in (f"{name}  {entry.citation}", repr(chosen), "", "\n\n".join(texts), ""):
        say(text)
    for what, cell in zip(COLUMNS, entry.cells, strict=True):
        if what not in ("algorithm", "from"):
            say(f"{what}: {cell}")


def topology(
    graph: Annotated[Positional[str | None], arg(metavar="GRAPH")] = None,
    plot: File | None = None,
    parameters: int = 272_474,
    weights: str = "equal",
    markdown: bool = False,
    json: Json = False,
) -> None:
    """List the topologies, or print one's spectral properties and traffic, and draw it.

    Args:
        graph: A topology such as ring:16, file:graph.edgelist, every:4/ring:16 (gossip every 4th step) or
            lazy/ring:16 ((I + W)/2).
        plot: Draw the graph into this file (.png, .svg or .pdf).
        parameters: Number of model parameters, to compute the traffic; by default a ResNet-20's.
        weights: Weight of each node, one number per node, as in 1200,340,80; see --weights of `qg train`.
        markdown: Print the list as a Markdown table.
    """
    if parameters < 1:
        raise InputError(f"parameters must be >= 1, got {parameters}")
    if graph is None:
        _topologies().show(json, markdown)
        return
    chosen, numbers = parse(graph), given_weights(weights)
    if weights == "examples":
        raise InputError("only a training knows the numbers of examples; give them, as in --weights 1200,340,80")
    chosen = chosen.weighted(numbers) if numbers else chosen
    sent, values = chosen.bytes_per_step(parameters), topology_values(chosen)
    if json:
        print_json(values | {"parameters": parameters, "sent_bytes_per_step": sent})
    else:
        text = f"{sent / 1e6:.3f} MB per node on average, for {parameters:,} float32 parameters"
        console.print(facts_table(topology_facts(values) | {"sent per step": text}))
    if plot is not None:
        with plots.style():
            figure, (panel,) = plots.panels(1, 1, 5, 5)
            plots.draw_topology(chosen, panel)
            panel.set_title(str(chosen))
        plots.save_as(figure, plot)
        say_written([plot])


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
        "peers per step": f"{values['peers_mean']:.6g} on average, at most {values['peers_max']}",
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


def _topologies() -> Listing:
    """One row per topology, with the facts of an example."""
    kinds = {kind.example: kind.summary for kind in (KINDS | FROM_LABELS).values()}
    known = {kind.example for kind in KINDS.values()}
    rows = [
        {"example": example, "summary": summary} | (topology_values(parse(example)) if example in known else {})
        for example, summary in (kinds | FORMS).items()
    ]

    def facts(row: Values) -> dict[str, str]:
        keys = ("peers_mean", "rho", "nu", "exact_after", "peers_max")
        mean, *others, most = ("" if row.get(key) is None else f"{row[key]:.3g}" for key in keys)
        peers = mean if mean == most else f"{mean}, at most {most}"
        return dict(zip(("peers per step", "ρ", "ν", "exact after"), (peers, *others), strict=True))

    def brief(row: Values) -> str:
        said = "; ".join(f"{name} {text}" for name, text in facts(row).items() if text)
        return f"{row['summary']}\n{said}".strip()

    columns: dict[str, Cells] = {name: tuple(facts(row)[name] for row in rows) for name in facts(rows[0])}
    columns = {"topology": "example", **columns, "definition": "summary"}
    return Listing(rows, columns, folds={"definition": 24}, brief=brief)


FORMS = {
    "file:graph.edgelist": "Links from an edge list or CSV file, with or without weights.",
    "every:4/ring:16": "Gossip at every 4th step, local steps in between.",
    "lazy/ring:16": "(I + W)/2: the same neighbours with half the weights.",
    "package.module:name": "Your own Topology, graph or dict of neighbours, or a function that returns one.",
}
"""Topologies made from other topologies, files or Python objects."""


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def data(name: Name = None, data_dir: DataFolder = None, json: Json = False) -> None:
    """List the known data sets, whether each is installed, and how to get it. With a name, describe one.

    Args:
        name: A data set, such as folder:PATH or csv:PATH. Prints its classes, shape and normalisation as lines
            of a TOML file; all owners of such data have to agree on them.
    """
    if name is not None:
        _describe(name, data_dir, json)
        return
    found = available(data_dir)
    if json:
        print_json([asdict(one) for one in found])
        return
    for one in found:
        if one.where is None:
            console.print(f"{one.name}: not found. {one.steps}", soft_wrap=True)
        else:
            missing = f", but without {', '.join(one.missing)}. {one.steps}" if one.missing else ""
            console.print(f"{one.name}: {one.where}{missing}", soft_wrap=True)


def _describe(name: str, data_dir: DataFolder, json: bool) -> None:
    """Print the size of a data set and the settings that its owners have to agree on."""
    with preparing():
        one = raw(name, data_dir)
    published, there = published_examples(name), len(one.train) + len(one.test)
    if json:
        sizes = {"train": len(one.train), "test": len(one.test), "published": published or None}
        print_json({"name": one.name} | sizes | one.terms())
        return
    subset = f", a subset of the {published:,} published" if there < published else ""
    print(f"# {one.name}: {len(one.train):,} training examples and {len(one.test):,} to test{subset}")
    if isinstance(one, Corpus):
        words = sorted(len(text.split()) for text in one.train.texts)
        print(f"# words per text: median {words[len(words) // 2]}, maximum {words[-1]}; shape is in tokens")
    for key, value in one.terms().items():
        print(f"{key} = {dumps(value)}")


def partition(
    name: Annotated[Positional[str], arg(metavar="DATA")],
    nodes: int = 16,
    alpha: tuple[float, ...] = (0.1,),
    partition: str = "dirichlet",
    seed: int = 0,
    data_dir: DataFolder = None,
    plot: File | None = None,
    json: Json = False,
) -> None:
    """Show how a partition splits the data: mean label entropy, total-variation distance, and a dot plot.

    Args:
        name: A data set, such as digits, folder:PATH or csv:PATH (see `qg data`).
        nodes: Number of nodes.
        alpha: Concentration of the Dirichlet distribution; several values are drawn side by side.
        partition: dirichlet, dirichlet-plain, iid, shards:K or by:COLUMN.
        seed: The partition's seed.
        plot: Draw the dot plot into this file (.png, .svg or .pdf).
    """
    if not alpha:
        raise InputError("--alpha needs a number, as in --alpha 0.1 1")
    if seed < 0:
        raise InputError(f"seed must be >= 0, got {seed}")
    with preparing():
        dataset = raw(name, data_dir)
    labels = dataset.train.y.numpy()
    counts, rows = {}, []
    for value in alpha:
        parts = split(labels, nodes, partition, value, seed, dataset.train.columns)
        table = counts[f"{name}, n = {nodes}, α = {value:g}"] = class_counts(parts, labels, len(dataset.classes))
        entropy, distance = heterogeneity(table)
        rows.append({
            "partition": partition, "alpha": value, "nodes": nodes, "smallest": min(map(len, parts)),
            "largest": max(map(len, parts)), "label_entropy_nats": entropy,
            "label_entropy_max_nats": math.log(len(dataset.classes)), "total_variation": distance,
            "fingerprint": digest_of_parts(parts), "class_counts": table.tolist(),
        })
    if json:
        print_json(rows)
    else:
        for row in rows:
            console.print(
                f"{partition}, α = {row['alpha']:g}: {nodes} nodes of {row['smallest']} to {row['largest']} examples, "
                f"mean label entropy {row['label_entropy_nats']:.3f} nats (of {row['label_entropy_max_nats']:.3f}), "
                f"total-variation distance {row['total_variation']:.3f}, fingerprint {row['fingerprint']}",
                soft_wrap=True,
            )
    if plot is not None:
        plots.save_as(plots.draw_partitions(counts), plot)
        say_written([plot])


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "partition":                                 # --kind: the former name of --partition
        words = ["--partition" if word == "--kind" else word for word in words]
    call({"algorithms": algorithms, "topology": topology, "data": data, "partition": partition}, name, words)
