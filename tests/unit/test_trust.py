"""`Trust` and `Guard`: what counts of a neighbour's model."""

import math
import statistics

import pytest
import torch

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.distributed.trust import Guard, Trust
from quasiglobal.errors import InputError
from quasiglobal.runs.agreement import trust_of
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment


def test_a_model_within_the_radius_counts_whole_and_one_beyond_is_clipped_to_it():
    trust = Trust(3.0)
    assert trust.shares({1: 1.0, 2: 1.0, 3: 2.9}, 0.0, 10.0) == {1: 1, 2: 1, 3: 1}
    shares = trust.shares({1: 1.0, 2: 1.0, 3: 6.0}, 0.0, 10.0)
    assert shares == {1: 1, 2: 1, 3: 3.0 * 1.0 / 6.0}


def test_the_first_exchange_compares_the_neighbours_with_each_other():
    assert Trust(4.0).shares({1: 2.0, 2: 1e30}, 0.0, 10.0) == {1: 1, 2: 4.0 * 2.0 / 1e30}


def test_a_distance_is_remembered_as_it_counted():
    trust = Trust(2.0)
    for _ in range(20):
        trust.shares({1: 1.0, 2: 1e30}, 0.0, 10.0)
    assert trust.shares({1: 5.0}, 0.0, 10.0) == {1: 2.0 * 2.0 / 5.0}      # the radius of 1 is 2 · 2, not 2 · 1e30


def test_a_neighbour_that_is_always_beyond_moves_a_node_by_twice_the_radius_at_most():
    trust = Trust(5.0)
    pulls = [trust.shares({1: 1.0, 2: 1.0, 3: 1e6}, 0.0, 10.0)[3] * 1e6 for _ in range(100)]
    assert pulls[0] == pytest.approx(5.0)
    assert sum(pulls) == pytest.approx(10.0)
    assert trust.shares({1: 1.0, 2: 1.0, 3: 1.0}, 0.0, 10.0)[3] == 1      # believed again as soon as it is near
    assert trust.shares({1: 1.0, 2: 1.0, 3: 10.0}, 0.0, 10.0)[3] == 0.5


def test_equal_neighbours_do_not_make_the_radius_zero():
    trust = Trust(2.0)
    assert trust.shares({1: 0.0, 2: 0.0}, 0.0, 10.0) == {1: 1, 2: 1}
    assert trust.shares({1: 0.0, 2: 0.3}, 0.2, 10.0) == {1: 1, 2: 1}      # the node's own step is the floor


def test_a_single_neighbour_is_compared_with_itself_and_at_first_with_the_length_of_the_own_model():
    trust = Trust(2.0)
    assert trust.shares({1: 1e30}, 0.0, 10.0)[1] == pytest.approx(10.0 / 1e30)
    trust = Trust(2.0)
    for distance in (1.0, 1.5, 2.0):
        assert trust.shares({1: distance}, 0.0, 10.0) == {1: 1}
    assert trust.shares({1: 6.0}, 0.0, 10.0) == {1: 2.0 * statistics.median([1.0, 1.5, 2.0]) / 6.0}


def test_rows_that_are_not_clipped_are_the_same_objects_and_others_lie_at_the_radius():
    reports = []
    guard = Guard(3.0, reports.append)
    own = [torch.zeros(2, 1, 4)]
    near = torch.tensor([[[1.0, 0, 0, 0], [0, 2.0, 0, 0]]])
    far = torch.tensor([[[0, 0, 1.0, 0], [0, 0, 0, 1e9]]])                # of the second run alone
    sent = far.clone()
    counted = guard.clipped(0, own, {4: near, 7: far})
    assert counted[4] is near
    assert torch.equal(counted[7], torch.tensor([[[0, 0, 1.0, 0], [0, 0, 0, 6.0]]]))
    assert torch.equal(far, sent)
    assert reports == [7]


def test_numbers_near_the_largest_do_not_overflow():
    guard = Guard(3.0, lambda there: None)
    counted = guard.clipped(0, [torch.ones(1, 1, 4)], {1: torch.full((1, 1, 4), 1e18), 2: torch.full((1, 1, 4), 1.5)})
    assert torch.allclose(counted[1], torch.full((1, 1, 4), 1 + 3 * 0.5))


def test_algorithms_that_bear_clipping():
    bear = {name for name, one in ALGORITHMS.items() if one.bears_clipping}
    assert bear >= {"dsgd", "dsgdm-n", "qg-dsgdm-n", "qg-dadam", "dadam", "dmsgd", "dfedavgm", "dsgd-clip"}
    sums = {"dsgd-gt", "momentum-tracking", "gt-nsgdm", "k-gt", "d2", "ed", "sgp", "push-diging", "lt-admm", "choco"}
    assert not bear & (sums | {"ab", "relaysgd", "decentlam", "led", "proxskip"})


@pytest.mark.parametrize("name", ["dsgd-gt", "sgp", "lt-admm", "relaysgd", "choco", "slowmo"])
def test_a_finite_ratio_is_refused_where_messages_have_to_count_whole(name):
    experiment = Experiment(algorithm=name)
    assert trust_of(experiment, None) == trust_of(experiment, math.inf) == math.inf
    with pytest.raises(InputError, match=rf"^{name} relies on messages that count whole.* leave out --trust"):
        trust_of(experiment, 6.0)


def test_the_ratio_of_an_algorithm_that_averages_models():
    assert trust_of(Experiment(), None) == math.inf
    assert trust_of(Experiment(), 9.0) == 9.0


def test_bad_options_get_one_sentence():
    with pytest.raises(InputError, match="trust must be >= 1, got "):
        Options(trust=0.5, engine="distributed")
    with pytest.raises(InputError, match="use it with --engine distributed"):
        Options(trust=5.0)
