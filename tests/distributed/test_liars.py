"""`--trust`: one neighbour of eight lies, and honest ones are not taken for liars."""

import logging
import math
from functools import cache
from statistics import fmean

import lies
import pytest
import torch

from quasiglobal.engines.distributed import SUGGESTED

NOTHING = 35.0
"""Accuracy in percent of models that have learned almost nothing; chance is 10."""

COSTS = 3.0
"""Points that a liar may cost."""


@cache
def without_a_liar(topology, spread="iid"):
    return fmean(lies.simulated(topology, math.inf, spread=spread)[0])


def test_a_huge_liar_over_real_edges_is_clipped_and_named_once(caplog):
    with caplog.at_level(logging.WARNING):
        results = lies.in_threads("ring:8", SUGGESTED, 40, "huge")
    assert all(right > 80 for _, right, _ in filter(None, results))
    assert {(k, there) for k, result in enumerate(results) if result for there in result[2]} == {(2, 3), (4, 3)}
    said = [record.getMessage() for record in caplog.records if "clips" in record.getMessage()]
    assert sorted(said) == [f"process {k} clips process 3 from step 1: its model is too far away" for k in (2, 4)]


def test_honest_numbers_are_the_same_bits_with_and_without_trust():
    with_trust, without = (lies.in_threads("ring:8", trust, 20, spread="sorted") for trust in (SUGGESTED, math.inf))
    for ours, theirs in zip(with_trust, without, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert ours[2] == {}


def test_a_node_that_was_away_is_clipped_for_a_few_steps_at_most():
    right, clipped = lies.simulated("ring:8", SUGGESTED, 120, cut=lies.away(20, 90))
    assert max((max(at) for at in clipped.values()), default=0) <= 95
    assert min(right) > 90


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "complete:8"])
@pytest.mark.parametrize("lie", lies.LIES)
def test_a_liar_costs_three_points_at_most(topology, lie):
    right, clipped = lies.simulated(topology, SUGGESTED, lie=lie)
    assert fmean(right) > without_a_liar(topology) - COSTS
    assert {there for _, there in clipped} <= {lies.LIAR} or lie == "copied"


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["huge", "opposite", "noise", "stale", "zeros"])
def test_a_liar_costs_everything_without_trust(lie):
    assert fmean(lies.simulated("ring:8", math.inf, lie=lie)[0]) < NOTHING


@pytest.mark.slow
@pytest.mark.parametrize("lie", ["huge", "opposite", "noise", "stale", "zeros"])
def test_with_sorted_labels_a_liar_costs_what_its_silence_would(lie):
    silent, _ = lies.simulated("ring:8", math.inf, cut=lies.away(1, math.inf), spread="sorted")
    others = silent[: lies.LIAR] + silent[lies.LIAR + 1 :]
    right, _ = lies.simulated("ring:8", SUGGESTED, lie=lie, spread="sorted")
    assert fmean(right) > fmean(others) - COSTS


@pytest.mark.slow
@pytest.mark.parametrize("lie", lies.LIES)
def test_liars_over_real_edges(lie):
    results = lies.in_threads("ring:8", SUGGESTED, 150, lie)
    assert fmean(result[1] for result in results if result) > without_a_liar("ring:8") - COSTS


@pytest.mark.slow
@pytest.mark.parametrize("topology", ["ring:8", "one-peer-exponential:8", "exponential:8"])
@pytest.mark.parametrize("spread", ["iid", "0.1", "sorted"])
@pytest.mark.parametrize(("algorithm", "lr"), [("qg-dsgdm-n", 0.05), ("dsgdm-n", 0.05), ("dsgd", 0.1), ("dadam", 0.002)])
def test_honest_nodes_clip_nothing_even_if_one_is_away_for_20_steps(topology, spread, algorithm, lr):
    for cut in (lies.away(0, 0), lies.away(60, 79)):
        how = {"cut": cut, "spread": spread, "algorithm": algorithm, "lr": lr}
        assert lies.simulated(topology, SUGGESTED, **how)[1] == {}
