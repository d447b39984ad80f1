"""Commands that list and describe the building blocks: algorithms, topology, data, partition."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from json import dumps
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS, Algorithm, algorithm
from quasiglobal.checks import check_algorithm
from quasiglobal.cli.arguments import File, Folder, Json, Name, call
from quasiglobal.cli.tables import Listing, Values, facts_table, topology_facts, topology_listing, topology_values
from quasiglobal.cli.terminal import console, preparing, print_json, say, say_written
from quasiglobal.common.files import markdown_table
from quasiglobal.data.partition import class_counts, digest_of_parts, heterogeneity, split
from quasiglobal.data.sources import Corpus, available, published_examples, raw
from quasiglobal.engines.costs import COLUMNS, Entry, describe
from quasiglobal.errors import InputError
from quasiglobal.runs import plots
from quasiglobal.topology import parse
from quasiglobal.topology.parsing import given_weights


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
    entries = {one: describe(one) for one in names}
    if markdown and not json:
        print(markdown_table(COLUMNS, [[f"`{entry.name}`", *entry.cells[1:]] for entry in entries.values()]))
        return

    def cell(k: int) -> Callable[[Values], str]:
        return lambda row: entries[row["name"]].cells[k]

    columns = {title: cell(k) for k, title in enumerate(COLUMNS)}
    rows = [_entry_values(entry) for entry in entries.values()]
    Listing(rows, columns, caption=UNITS, folds={"needs of W": 14, "from": 14}).show(json)


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
        weights: How much each node counts, a number for each, as in 1200,340,80; see --weights of `qg train`.
        markdown: Print the list as a Markdown table.
    """
    if parameters < 1:
        raise InputError(f"parameters must be >= 1, got {parameters}")
    if graph is None:
        topologies = topology_listing()
        if markdown and not json:
            print(markdown_table(list(topologies.columns), topologies.texts()))
        else:
            topologies.show(json)
        return
    chosen, numbers = parse(graph), given_weights(weights)
    if weights == "examples":
        raise InputError("only a training knows the numbers of examples; give them, as in --weights 1200,340,80")
    chosen = chosen.weighted(numbers) if numbers else chosen
    sent, values = chosen.bytes_per_step(parameters), topology_values(chosen)
    if json:
        print_json(values | {"parameters": parameters, "sent_bytes_per_step": sent})
    else:
        text = f"{sent / 1e6:.3f} MB a node on average, for {parameters:,} float32 parameters"
        console.print(facts_table(topology_facts(values) | {"sent a step": text}))
    if plot is not None:
        with plots.style():
            figure, (panel,) = plots.panels(1, 1, 5, 5)
            plots.draw_topology(chosen, panel)
            panel.set_title(str(chosen))
        plots.save_as(figure, plot)
        say_written([plot])


def data(name: Name = None, data_dir: Folder | None = None, json: Json = False) -> None:
    """List the known data sets, whether each is installed, and how to get it. With a name, describe one.

    Args:
        name: A data set, such as folder:PATH or csv:PATH. Prints its classes, shape and normalisation as lines
            of a TOML file; all owners of such data have to agree on them.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
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


def _describe(name: str, data_dir: Folder | None, json: bool) -> None:
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
    data_dir: Folder | None = None,
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
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
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
            console.print(_partition_in_words(row), soft_wrap=True)
    if plot is not None:
        plots.save_as(plots.draw_partitions(counts), plot)
        say_written([plot])


def _partition_in_words(row: Values) -> str:
    return (
        f"{row['partition']}, α = {row['alpha']:g}: {row['nodes']} nodes of {row['smallest']} to {row['largest']} "
        f"examples, mean label entropy {row['label_entropy_nats']:.3f} nats (of {row['label_entropy_max_nats']:.3f}), "
        f"total-variation distance {row['total_variation']:.3f}, fingerprint {row['fingerprint']}"
    )


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    if name == "partition":                                 # --kind: the former name of --partition
        words = ["--partition" if word == "--kind" else word for word in words]
    call({"algorithms": algorithms, "topology": topology, "data": data, "partition": partition}, name, words)
