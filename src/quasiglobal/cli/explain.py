"""Commands that list and describe the building blocks: algorithms, topology."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Annotated, Any

from tyro.conf import Positional, arg

from quasiglobal.algorithms import ALGORITHMS, Algorithm, algorithm
from quasiglobal.checks import check_algorithm
from quasiglobal.cli.arguments import File, Json, Name, call
from quasiglobal.cli.listing import Listing, Values, facts_table
from quasiglobal.cli.tables import topology_facts, topology_listing, topology_values
from quasiglobal.cli.terminal import console, print_json, say, say_written
from quasiglobal.common.files import markdown_table
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


def _entry_values(entry: Entry) -> dict[str, Any]:
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


def run(name: str, words: Sequence[str]) -> None:
    """Run one of these commands."""
    call({"algorithms": algorithms, "topology": topology}, name, words)
