"""Commands that describe data sets and their partitions: data, partition."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from json import dumps
from typing import Annotated

from tyro.conf import Positional, arg

from quasiglobal.cli.arguments import File, Folder, Json, Name, call
from quasiglobal.cli.listing import Values
from quasiglobal.cli.terminal import console, preparing, print_json, say_written
from quasiglobal.data.partition import class_counts, digest_of_parts, heterogeneity, split
from quasiglobal.data.sources import Corpus, available, published_examples, raw
from quasiglobal.errors import InputError
from quasiglobal.runs import plots


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
    call({"data": data, "partition": partition}, name, words)
