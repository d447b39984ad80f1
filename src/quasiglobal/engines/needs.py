"""Warnings and refusals where a topology, its links or the data do not meet an algorithm's needs."""

from __future__ import annotations

import logging
import math
import warnings

import networkx as nx
import numpy as np

from quasiglobal.algorithms import Algorithm
from quasiglobal.engines.costs import LONGEST, gossip_steps, traffic
from quasiglobal.engines.draws import Faults
from quasiglobal.engines.links import misfit, no_edges
from quasiglobal.engines.simulator import NO_MEAN
from quasiglobal.errors import InputError
from quasiglobal.topology import Topology

log = logging.getLogger("quasiglobal")

HARMED = (
    "{} loses its exactness when messages are lost in one direction, and its error may grow without bound; use an "
    "algorithm that tolerates loss (see `qg algorithms`)"
)

CUT_OFF = (
    "{} misses the minimum, or diverges, when a node is cut off for many steps; use an algorithm that tolerates absent "
    "nodes, such as qg-dsgdm-n or lt-admm"
)


def check_needs(algorithm: Algorithm, topology: Topology, faults: Faults | None = None, alike: bool = True) -> None:
    """Warn if the algorithm does not fit W, links with faults, or data that differ from node to node (not `alike`).

    Raise `InputError` if it does not work on such a graph, or with such faults, at all.
    """
    _check_w(algorithm, topology)
    _check_rounds(algorithm, topology)
    _check_links(algorithm, faults or Faults())
    if algorithm.needs.alike_data and not alike:
        _warn(
            f"{type(algorithm).__name__} is meant for data that are alike at all nodes: on heterogeneous data the "
            "nodes drift apart as the learning rate decays; use partition iid, or another algorithm"
        )


def _check_w(algorithm: Algorithm, topology: Topology) -> None:
    needs, name = algorithm.needs, type(algorithm).__name__
    if topology.period is None and traffic(algorithm).per_edge:
        raise InputError(no_edges(topology, needs))
    if topology.shares is not None and ((sent := traffic(algorithm)).per_edge or sent.pushes):
        raise InputError(
            f"{name} adds up what neighbours send, so that all nodes count alike; leave out weights, or use an "
            "algorithm that averages models, such as qg-dsgdm-n or dsgd-gt"
        )
    if (wrong := misfit(needs, topology)) is not None:
        raise InputError(f"{name} {wrong}")
    if needs.doubly_stochastic and not topology.is_doubly_stochastic:
        effect = "has negative weights" if topology.keeps_mean else "makes the nodes' mean drift to a weighted mean"
        other = "use Metropolis weights, as from_graph does"
        if not topology.is_symmetric:
            other = "use an algorithm for directed graphs: qg-sgp, push-diging or ab"
        if topology.period is None:
            other = f"use matching:{topology.n} or equidyn:{topology.n}"
        if needs.fixed or needs.lambda_min_above is not None:
            other = f"use a fixed undirected graph with Metropolis weights, such as ring:{topology.n}"
        if needs.refuses_drift and not topology.keeps_mean:
            raise InputError(f"{name} needs a doubly stochastic W, but that of {topology} {effect}; {other}")
        _warn(f"W of {topology} is not doubly stochastic: it {effect}; {other}")
    bound = needs.lambda_min_above
    fixed, symmetric = (asked or bound is not None for asked in (needs.fixed, needs.symmetric))
    if (fixed and topology.period != 1) or (symmetric and not topology.is_symmetric):
        what = " ".join(word for word, asked in (("fixed", fixed), ("symmetric", symmetric)) if asked)
        _warn(f"{name} needs a {what} W, which {topology} is not: it may diverge; use a fixed undirected graph")
    elif bound is None or needs.allow(topology.lambda_min):
        return
    elif needs.lazy:
        log.info(f"{name} mixes with (I + W)/2, since λ_min of {topology} is {topology.lambda_min:.4g}")
    else:
        _warn(
            f"{name} needs every eigenvalue of W above {bound:.4g}, but λ_min of {topology} is "
            f"{topology.lambda_min:.4g}: it may diverge; use (I + W)/2, the topology lazy/{topology}"
        )


def _check_rounds(algorithm: Algorithm, topology: Topology) -> None:
    """Check that an algorithm with rounds meets enough graphs of a changing topology to connect all nodes."""
    tau, period = getattr(algorithm, "tau", 1), topology.period
    if period is None or period == 1 or tau == 1 or (cycle := math.lcm(tau, period)) > LONGEST:
        return
    used = {topology.position(t) for t in gossip_steps(algorithm, 1 + cycle)}
    links = np.any([topology.matrices[at] != 0 for at in sorted(used)], axis=0) if used else np.ones((1, 1))
    if not nx.is_strongly_connected(nx.from_numpy_array(links, create_using=nx.DiGraph)):
        _warn(
            f"{type(algorithm).__name__} with tau = {tau} meets only some of the {period} graphs of "
            f"{topology}, which do not connect all nodes; use a tau without a common factor with {period}"
        )


def _check_links(algorithm: Algorithm, faults: Faults) -> None:
    """Check faults. An absent node leaves W doubly stochastic, so methods that only `mix` keep their sums."""
    name, loss = type(algorithm).__name__, algorithm.needs.loss
    if faults and traffic(algorithm).means:
        raise InputError(NO_MEAN)
    if faults and loss == "refused":
        raise InputError(f"{name} collapses when messages are lost; use it without drop and churn, or use qg-dsgdm-n")
    if faults.drop and loss == "harmed":
        _warn(HARMED.format(name))
    if faults.churn and algorithm.needs.absence == "harmed":
        _warn(CUT_OFF.format(name))


def _warn(sentence: str) -> None:
    warnings.warn(sentence, stacklevel=5)
