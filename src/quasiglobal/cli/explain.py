"""Commands that list and describe the building blocks: algorithms, topology, data, partition."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from typing import Annotated

from rich.table import Table
from tyro.conf import Positional, arg

from quasiglobal.algorithms import Algorithm, algorithm
from quasiglobal.checks import check_algorithm
from quasiglobal.cli.arguments import File, Folder, Name, call
from quasiglobal.cli.tables import facts_table, topology_facts
from quasiglobal.cli.terminal import console, say_written
from quasiglobal.data.partition import class_counts, fingerprint, heterogeneity, split
from quasiglobal.data.sources import Corpus, available, published_examples, raw
from quasiglobal.engines.costs import COLUMNS, catalogue, describe
from quasiglobal.errors import InputError
from quasiglobal.report import plots
from quasiglobal.report.markdown import table as markdown_table
from quasiglobal.topology import parse


def algorithms(name: Name = None, markdown: bool = False, check: bool = False) -> None:
    """List the algorithms with their traffic, memory and requirements on W, or explain one.

    Args:
        name: An algorithm, with or without options, or your own as package.module:Name.
        markdown: Print the list as a Markdown table.
        check: Run the checks on the algorithm; without a name, on all of them.
    """
    if name is not None:
        _explain(name, check)
        return
    entries = catalogue()
    if check:
        for entry in entries:
            console.print(f"{entry.name}: {len(check_algorithm(entry.name))} checks passed")
    elif markdown:
        print(markdown_table(COLUMNS, [[f"`{entry.name}`", *entry.cells[1:]] for entry in entries]))
    else:
        table = Table(*COLUMNS, caption=UNITS)
        for entry in entries:
            table.add_row(*entry.cells)
        console.print(table)


UNITS = (
    "Traffic and memory in multiples of the model: sent to each neighbour, or `to all` for an exact mean. "
    "`qg algorithms NAME` explains one."
)


def _explain(name: str, check: bool) -> None:
    """Print an algorithm's equations and costs, or run its checks and print their names."""
    chosen = algorithm(name)
    if check:
        passed = check_algorithm(chosen)
        console.print(f"{name} passed {len(passed)} checks: {', '.join(passed)}")
        return
    entry = describe(name)
    print(f"{name}  {entry.citation}\n{chosen!r}")
    part: Algorithm | None = chosen
    while part is not None:
        print(f"\n{inspect.getdoc(type(part))}")
        part = getattr(part, "base", None)
    print()
    for what, cell in zip(COLUMNS[1:4], entry.cells[1:4], strict=True):
        print(f"{what}: {cell}")


def topology(
    graph: Annotated[Positional[str], arg(metavar="GRAPH")], plot: File | None = None, parameters: int = 272_474
) -> None:
    """Print a topology's spectral properties and traffic, and draw it.

    Args:
        graph: ring:16, torus:16, complete:4, star:5, social, one-peer-exponential:16, file:graph.edgelist,
            every:4/ring:16 (gossip every 4th step), lazy/ring:16 ((I + W)/2).
        plot: Draw the graph into this file (.png, .svg or .pdf).
        parameters: Number of model parameters, to compute the traffic; by default a ResNet-20's.
    """
    if parameters < 1:
        raise InputError(f"parameters must be >= 1, got {parameters}")
    chosen = parse(graph)
    sent = f"{chosen.bytes_per_step(parameters) / 1e6:.3f} MB a node on average, for {parameters:,} float32 parameters"
    console.print(facts_table(topology_facts(chosen) | {"sent a step": sent}))
    if plot is not None:
        with plots.style():
            figure, (panel,) = plots.panels(1, 1, 5, 5)
            plots.draw_topology(chosen, panel)
            panel.set_title(str(chosen))
        plots.save_as(figure, plot)
        say_written([plot])


def data(name: Name = None, data_dir: Folder | None = None) -> None:
    """List the known data sets, whether each is installed, and how to get it. With a name, describe one.

    Args:
        name: A data set, such as folder:PATH or csv:PATH. Prints its classes, shape and normalisation as lines
            of a TOML file; all owners of such data have to agree on them.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
    """
    if name is not None:
        _describe(name, data_dir)
        return
    for found in available(data_dir):
        if found.where is None:
            console.print(f"{found.name}: not found. {found.steps}", soft_wrap=True)
        else:
            missing = f", but without {', '.join(found.missing)}. {found.steps}" if found.missing else ""
            console.print(f"{found.name}: {found.where}{missing}", soft_wrap=True)


def _describe(name: str, data_dir: Folder | None) -> None:
    """Print the size of a data set and the settings that its owners have to agree on."""
    one = raw(name, data_dir)
    published, there = published_examples(name), len(one.train) + len(one.test)
    subset = f", a subset of the {published:,} published" if there < published else ""
    print(f"# {one.name}: {len(one.train):,} training examples and {len(one.test):,} to test{subset}")
    if isinstance(one, Corpus):
        words = sorted(len(text.split()) for text in one.train.texts)
        print(f"# words per text: median {words[len(words) // 2]}, maximum {words[-1]}; shape is in tokens")
    for key, value in one.terms().items():
        print(f"{key} = {json.dumps(value)}")


def partition(
    name: Annotated[Positional[str], arg(metavar="DATA")],
    nodes: int = 16,
    alpha: tuple[float, ...] = (0.1,),
    kind: str = "dirichlet",
    seed: int = 0,
    data_dir: Folder | None = None,
    plot: File | None = None,
) -> None:
    """Show how a partition splits the data: mean label entropy, total-variation distance, and a dot plot.

    Args:
        name: A data set, such as digits, folder:PATH or csv:PATH (see `qg data`).
        nodes: Number of nodes.
        alpha: Concentration of the Dirichlet distribution; several values are drawn side by side.
        kind: dirichlet, dirichlet-plain, iid, shards:K or by:COLUMN.
        seed: The partition's seed.
        data_dir: The folder of the data sets; by default $QG_DATA or ./data.
        plot: Draw the dot plot into this file (.png, .svg or .pdf).
    """
    dataset = raw(name, data_dir)
    labels = dataset.train.y.numpy()
    counts = {}
    for value in alpha:
        parts = split(labels, nodes, kind, value, seed, dataset.train.columns)
        table = counts[f"{name}, n = {nodes}, α = {value:g}"] = class_counts(parts, labels, len(dataset.classes))
        entropy, distance = heterogeneity(table)
        console.print(
            f"{kind}, α = {value:g}: {nodes} nodes of {min(map(len, parts))} to {max(map(len, parts))} examples, "
            f"mean label entropy {entropy:.3f} nats (of {math.log(len(dataset.classes)):.3f}), "
            f"total-variation distance {distance:.3f}, fingerprint {fingerprint(parts)}",
            soft_wrap=True,
        )
    if plot is not None:
        plots.save_as(plots.draw_partitions(counts), plot)
        say_written([plot])


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    call({"algorithms": algorithms, "topology": topology, "data": data, "partition": partition}, name, words)
