"""`--trust`: one neighbour of eight lies, and honest ones are not taken for liars. The edges are real."""

import logging
import math
from functools import cache
from statistics import fmean

import lies
import pytest
import torch

from quasiglobal.engines.distributed import SUGGESTED, Distributed

EVERYTHING = 35.0
"""Accuracy in percent of models that have learned almost nothing."""


@cache
def without_a_liar(topology, steps):
    return mean_accuracy(lies.in_threads(topology, math.inf, steps))


def mean_accuracy(results):
    return fmean(result[1] for result in results if result is not None)


def clipped(results):
    """Who was clipped by whom."""
    return {(k, int(there)) for k, result in enumerate(results) if result for there in result[2]}


def test_a_huge_liar_among_eight_costs_almost_nothing(caplog):
    with caplog.at_level(logging.WARNING):
        results = lies.in_threads("ring:8", SUGGESTED, 40, "huge")
    assert mean_accuracy(results) > without_a_liar("ring:8", 40) - 3
    assert mean_accuracy(lies.in_threads("ring:8", math.inf, 40, "huge")) < EVERYTHING
    assert clipped(results) == {(2, 3), (4, 3)}
    said = [record.getMessage() for record in caplog.records if "clipped" in record.getMessage()]
    assert sorted(said) == sorted(
        f"process {k}: process 3 {what}" for k in (2, 4)
        for what in ("is clipped from step 1: its model is too far away to be trusted", "was clipped 10 times")
    )


def test_honest_numbers_are_the_same_bits_with_and_without_trust():
    with_trust, without = (lies.in_threads("ring:8", trust, 20, spread="sorted") for trust in (SUGGESTED, math.inf))
    for ours, theirs in zip(with_trust, without, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[2] == {}


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "complete:8"])
@pytest.mark.parametrize("lie", ["huge", "opposite", "noise", "zeros"])
def test_a_liar_costs_everything_without_trust_and_three_points_at_most_with_it(topology, lie):
    assert mean_accuracy(lies.in_threads(topology, math.inf, 150, lie)) < EVERYTHING
    results = lies.in_threads(topology, SUGGESTED, 150, lie)
    assert mean_accuracy(results) > without_a_liar(topology, 150) - 3
    assert {there for _, there in clipped(results)} == {lies.LIAR}


@pytest.mark.slow
def test_a_stale_liar_needs_a_stricter_ratio_and_more_neighbours():
    assert mean_accuracy(lies.in_threads("complete:8", math.inf, 150, "stale")) < EVERYTHING
    assert mean_accuracy(lies.in_threads("complete:8", 4.0, 150, "stale")) > without_a_liar("complete:8", 150) - 3


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "complete:8"])
@pytest.mark.parametrize("trust", [math.inf, SUGGESTED])
def test_a_copied_model_does_no_harm(topology, trust):
    assert mean_accuracy(lies.in_threads(topology, trust, 150, "copied")) > without_a_liar(topology, 150) - 3


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "complete:8"])
@pytest.mark.parametrize(("algorithm", "lr"), [("qg-dsgdm-n", 0.05), ("dsgd", 0.1)])
@pytest.mark.parametrize("honest", [Distributed, lies.Interrupted])
def test_honest_nodes_with_sorted_labels_clip_nothing(topology, algorithm, lr, honest):
    how = {"spread": "sorted", "algorithm": algorithm, "lr": lr, "honest": honest}
    assert clipped(lies.in_threads(topology, SUGGESTED, 150, **how)) == set()
