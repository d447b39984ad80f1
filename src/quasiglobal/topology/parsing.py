"""Topologies by name: the registry, and the parser of topologies in settings and on the command line."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import networkx as nx
import numpy as np
from numpy.typing import ArrayLike

from quasiglobal.common.objects import facts_of, imported, is_own, is_path, recall
from quasiglobal.errors import InputError, unknown
from quasiglobal.topology import finite_time, labels, random, static
from quasiglobal.topology.given import SUFFIXES, Neighbours, from_file, from_graph, from_neighbours
from quasiglobal.topology.mixing import Network, from_entries
from quasiglobal.topology.topology import Topology


class Kind(NamedTuple):
    """A constructor that `parse` calls with the numbers of `name:N:…`, and with options `key=value`."""

    make: Callable[..., Topology]
    example: str

    @property
    def summary(self) -> str:
        """The first sentence of the constructor's docstring."""
        return (inspect.getdoc(self.make) or "").partition("\n")[0]


KINDS = {
    "ring": Kind(static.ring, "ring:16"),
    "chain": Kind(static.chain, "chain:16"),
    "torus": Kind(static.torus, "torus:16"),
    "complete": Kind(static.complete, "complete:16"),
    "star": Kind(static.star, "star:16"),
    "tree": Kind(static.tree, "tree:16"),
    "double-trees": Kind(static.double_trees, "double-trees:16"),
    "hypercube": Kind(static.hypercube, "hypercube:16"),
    "exponential": Kind(static.exponential, "exponential:16"),
    "social": Kind(static.social, "social"),
    "erdos-renyi": Kind(static.erdos_renyi, "erdos-renyi:16:0.3"),
    "small-world": Kind(static.small_world, "small-world:16:4:0.1"),
    "k-regular": Kind(static.k_regular, "k-regular:16:4"),
    "one-peer-exponential": Kind(finite_time.one_peer_exponential, "one-peer-exponential:16"),
    "base": Kind(finite_time.base, "base:16:1"),
    "equidyn": Kind(random.equidyn, "equidyn:16"),
    "matching": Kind(random.matching, "matching:16"),
    "epidemic": Kind(random.epidemic, "epidemic:16:4"),
}
"""Topologies by name."""

FROM_LABELS = {
    "stl-fw": Kind(labels.stl_fw, "stl-fw:16:4"),
    "d-cliques": Kind(labels.d_cliques, "d-cliques:16:4"),
}
"""Topologies that need the nodes' label counts; their first number is the number of nodes."""

Graph: TypeAlias = "str | os.PathLike[str] | Topology | Network | Neighbours"
"""A topology as a string or object: see `parse`."""


def parse(text: Graph, counts: ArrayLike | None = None) -> Topology:
    """Parse a topology given as text or path; accept a `Topology`, a networkx graph or a dict of neighbours too.

    A name with its numbers (ring:16, base:16:1, social; `qg topology` lists all) and options (k-regular:16:4:seed=1),
    file:graph.edgelist, every:4/ring:16 (local steps), lazy/ring:16 ((I + W)/2), a CSV or edge-list file by its name,
    or your own as package.module:name, where name is a Topology, a graph, a dict of neighbours, or a function that
    returns one. stl-fw and d-cliques also need `counts`, the nodes' numbers of examples, [n, classes].

    >>> parse("every:4/ring:16")
    <Topology every:4/ring:16: n = 16, period 4>
    """
    if isinstance(text, Topology):
        return text
    if isinstance(text, nx.Graph):
        return from_graph(text)
    if isinstance(text, Mapping):
        return from_neighbours(text)
    if isinstance(text, os.PathLike):
        return from_file(os.fspath(text))
    if not isinstance(text, str):
        kind = type(text).__name__
        raise InputError(f"a topology is a name, a Topology, a graph or a dict, got a {kind}; try 'ring:16'")
    name, _, argument = text.partition(":")
    if is_own(text):
        return _stored(text)
    if text.startswith("lazy/"):
        return parse(text.removeprefix("lazy/"), counts).lazy()
    if name == "file":
        return from_file(argument)
    if name == "every":
        k, _, rest = argument.partition("/")
        return parse(rest, counts).every(_whole(k, text, "every:4/ring:16"))
    if name in KINDS or name in FROM_LABELS:
        return _made(text, counts) if name in FROM_LABELS else _made_once(text)
    if (split := re.fullmatch(r"([a-z-]+?)\(?(\d+)\)?", text)) and split[1] in KINDS:      # ring16, ring(16)
        raise InputError(f"unknown topology {text!r}; write {split[1]}:{split[2]}")
    if text.endswith(SUFFIXES):
        return from_file(text)
    if is_path(text):
        found = imported(text, "topology")
        try:
            found = found() if callable(found) else found
        except TypeError as error:
            raise InputError(f"{text} cannot be called without arguments ({error}); name a function that can") from None
        if not isinstance(found, Topology | nx.Graph | Mapping):
            raise InputError(f"{text} is not a Topology, a graph or a dict, nor a function that returns one")
        return parse(found)
    if name in ("", "lazy"):
        raise InputError(f"a topology is missing in {text!r}; write one, as in ring:16, every:4/ring:16, lazy/ring:16")
    raise unknown("topology", name, [*KINDS, *FROM_LABELS, "file", "every", "lazy"])


def needs_counts(text: str) -> bool:
    """Whether a topology is made from the nodes' label counts.

    >>> needs_counts("lazy/stl-fw:16:4"), needs_counts("ring:16")
    (True, False)
    """
    return _core(text).partition(":")[0] in FROM_LABELS


def count_nodes(text: str) -> int:
    """Number of nodes of a topology given as text."""
    if needs_counts(text):
        name, *numbers = _core(text).split(":")
        return _whole(numbers[0] if numbers else "", text, FROM_LABELS[name].example)
    if is_own(text) and "n" in facts_of(text):
        return int(facts_of(text)["n"])
    return parse(text).n


def pairs_of(text: str) -> list[tuple[int, int]]:
    """All pairs of nodes that are neighbours at some step; all pairs if the graph depends on the data."""
    n = count_nodes(text)
    if needs_counts(text):
        return [(i, j) for i in range(n) for j in range(i)]
    links = parse(text).links()
    return [(i, j) for i in range(n) for j in range(i) if links[i, j] or links[j, i]]


def given_weights(text: str) -> list[float]:
    """The numbers of the setting `weights`; empty if it is equal or examples.

    >>> given_weights("1200,340,80"), given_weights("examples")
    ([1200.0, 340.0, 80.0], [])
    """
    if text in ("equal", "examples"):
        return []
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        example = "write equal, examples, or a number for each node, as in 1200,340,80"
        raise InputError(f"unknown weights {text!r}; {example}") from None


def weights_text(weights: ArrayLike) -> str:
    """The string for weights given as numbers."""
    try:
        return ",".join(f"{float(weight):.17g}" for weight in np.ravel(np.asarray(weights)))
    except (TypeError, ValueError):
        raise InputError(f"weights must be a string, or a number for each node, got {weights!r}") from None


def is_external(text: str) -> bool:
    """Whether a text refers to a file or to Python code, which may change while the text does not.

    >>> is_external("lazy/file:graph.edgelist"), is_external("every:4/ring:16")
    (True, False)
    """
    text = _core(text)
    name = text.partition(":")[0]
    return name == "file" or text.endswith(SUFFIXES) or (name not in KINDS | FROM_LABELS and is_path(text))


def _core(text: str) -> str:
    """The text without lazy/ and every:K/."""
    while text.startswith(("lazy/", "every:")):
        text = text.partition("/")[2]
    return text


def _stored(text: str) -> Topology:
    """A topology given from Python, or its stored weights."""
    facts = facts_of(text)
    if "weights" not in facts:
        found: Topology = recall(text, "topology")
        return found
    return Topology(text, tuple(from_entries(found, facts["n"]) for found in facts["weights"]))


@lru_cache(maxsize=16)
def _made_once(text: str) -> Topology:
    return _made(text, None)


def _made(text: str, counts: ArrayLike | None) -> Topology:
    """Make the topology name:N:…:option=value, by the types of the constructor's parameters."""
    name, _, argument = text.partition(":")
    kind = (KINDS | FROM_LABELS)[name]
    parameters = list(inspect.signature(kind.make).parameters.values())
    words = argument.split(":") if argument else []
    numbers = [word for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    wanted = [one for one in parameters if one.kind is one.POSITIONAL_OR_KEYWORD]
    known = {one.name: one for one in parameters if one.kind is one.KEYWORD_ONLY}
    if len(numbers) < len(wanted):
        raise InputError(f"topology {text!r} needs a whole number of nodes and its other numbers; write {kind.example}")
    if len(numbers) > len(wanted):
        at_all = "has its own 32 nodes" if name == "social" else f"takes {len(wanted)} number{'s' * (len(wanted) > 1)}"
        raise InputError(f"{name} {at_all}, got {text!r}; write {kind.example}")
    if wrong := options.keys() - known.keys():
        raise unknown(f"option of {name}", min(wrong), known)
    given = [_value(one, word, text, kind.example) for one, word in zip(wanted, numbers, strict=True)]
    others = {key: _value(known[key], word, text, kind.example) for key, word in options.items()}
    if name not in FROM_LABELS:
        return kind.make(*given, **others)
    if counts is None:
        raise InputError(
            f"{text} is made from the nodes' label counts, which only a training knows; use it in qg train, or "
            f"qg.topology.{kind.make.__name__}(counts, …)"
        )
    made = kind.make(counts, *given[1:], **others)
    if made.n != given[0]:
        raise InputError(f"{text} has {given[0]} nodes, but there are label counts of {made.n}; make them equal")
    return made


def _value(parameter: inspect.Parameter, word: str, text: str, example: str) -> float | bool:
    """Parse a number or a switch by the type of the parameter; for label counts, the number of nodes is given."""
    if parameter.annotation == "bool":
        if word not in ("true", "false"):
            raise InputError(f"{parameter.name} must be true or false, got {word!r} in the topology {text!r}")
        return word == "true"
    if parameter.annotation == "float":
        try:
            return float(word)
        except ValueError:
            raise InputError(f"topology {text!r} needs a number for {parameter.name}, as in {example}") from None
    return _whole(word, text, example)


def _whole(digits: str, text: str, example: str) -> int:
    try:
        return int(digits)
    except ValueError:
        raise InputError(f"topology {text!r} needs a whole number, as in {example}") from None
