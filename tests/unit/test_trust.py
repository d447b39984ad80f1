"""`Trust` and `Guard`: what counts of a neighbour's model."""

import math

import pytest
import torch

from quasiglobal.algorithms import ALGORITHMS, algorithm
from quasiglobal.engines.costs import sends_model_first
from quasiglobal.engines.trust import FAR, REPEATED, Guard, Trust, guard_of
from quasiglobal.errors import InputError
from quasiglobal.runs.agreement import trust_of
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment


def test_a_model_within_the_radius_counts_whole_and_one_beyond_at_the_usual_distance():
    trust = Trust(3.0)
    assert trust.shares({1: 1.0, 2: 1.0, 3: 2.9}, 0.0, 10.0) == {1: 1, 2: 1, 3: 1}
    assert trust.shares({1: 1.0, 2: 1.0, 3: 6.0}, 0.0, 10.0) == {1: 1, 2: 1, 3: 1.0 / 6.0}


def test_the_first_exchange_compares_the_neighbours_with_each_other():
    assert Trust(4.0).shares({1: 2.0, 2: 1e30}, 0.0, 10.0) == {1: 1, 2: 2.0 / 1e30}


def test_a_distance_is_remembered_as_the_radius_at_most():
    trust = Trust(2.0)
    for _ in range(20):
        trust.shares({1: 1.0, 2: 1e30}, 0.0, 10.0)
    assert trust.shares({1: 3.9}, 0.0, 10.0) == {1: 1}                    # the radius of 1 is 2 · 2, not 2 · 1e30
    trust.shares({2: 1.0}, 0.0, 10.0)
    assert trust.shares({1: 4.1}, 0.0, 10.0) == {1: 2.0 / 4.1}


def test_a_neighbour_that_is_always_beyond_pulls_by_less_and_less_but_not_to_nothing():
    trust = Trust(5.0)
    pulls = [trust.shares({1: 1.0, 2: 1.0, 3: 1e6}, 1.0, 10.0)[3] * 1e6 for _ in range(50)]
    assert pulls[:5] == pytest.approx([1.0, 0.5, 0.25, 0.125, 0.125])
    assert pulls[-1] == pytest.approx(0.125)
    assert trust.shares({1: 1.0, 2: 1.0, 3: 1.0}, 0.0, 10.0)[3] == 1      # believed again as soon as it is near
    assert trust.shares({1: 1.0, 2: 1.0, 3: 10.0}, 0.0, 10.0)[3] == 0.1


def test_equal_neighbours_do_not_make_the_radius_zero():
    trust = Trust(2.0)
    assert trust.shares({1: 0.0, 2: 0.0}, 0.0, 10.0) == {1: 1, 2: 1}
    assert trust.shares({1: 0.0, 2: 0.3}, 0.2, 10.0) == {1: 1, 2: 1}      # the node's own step is the floor


def test_the_radius_of_a_neighbour_that_was_away_grows_with_the_last_8_own_steps():
    trust = Trust(2.0)
    trust.shares({1: 0.1, 2: 0.1}, 0.1, 10.0)
    for _ in range(20):
        trust.shares({1: 0.1}, 0.1, 10.0)
    far = 2.0 * 8 * 0.1
    assert trust.shares({1: 0.1, 2: far + 0.01}, 0.1, 10.0)[2] == pytest.approx(far / 2 / (far + 0.01))
    for _ in range(20):
        trust.shares({1: 0.1}, 0.1, 10.0)
    assert trust.shares({1: 0.1, 2: far - 0.01}, 0.1, 10.0)[2] == 1
    assert trust.shares({1: 0.1, 2: far - 0.01}, 0.1, 10.0)[2] < 1        # it is in step again


def test_models_within_three_quarters_of_the_own_way_from_the_start_count_whole():
    shares = [Trust(2.0).shares({1: 0.1, 2: 7.5}, 0.1, 20.0, travelled)[2] for travelled in (10.0, 9.9)]
    assert shares == [1, 0.1 / 7.5]
    sent = {1: torch.full((1, 1, 4), 0.1), 2: torch.full((1, 1, 4), 3.7)}
    for start, whole in ((-5.0, True), (-4.7, False)):                    # 10 and 9.4 away from the first exchange
        guard = Guard(2.0, lambda there, why: None)
        guard.begin(torch.full((1, 4), start))
        assert (guard.clipped(0, torch.zeros(1, 1, 4), sent, [0.2, 0.2])[2] is sent[2]) == whole


def test_a_node_that_was_away_itself_believes_neighbours_that_are_all_far():
    trust = Trust(2.0)
    for _ in range(10):
        trust.shares({1: 1.0, 2: 1.0}, 0.1, 100.0)
    assert trust.shares({1: 50.0, 2: 60.0}, 0.1, 100.0) == {1: 1, 2: 1}
    assert trust.shares({1: 50.0, 2: 1e30}, 0.1, 100.0) == {1: 1, 2: 50.0 / 1e30}


def test_a_single_neighbour_is_compared_with_itself_and_at_first_with_the_length_of_the_own_model():
    trust = Trust(2.0)
    assert trust.shares({1: 1e30}, 0.0, 10.0)[1] == pytest.approx(5.0 / 1e30)
    trust = Trust(2.0)
    for distance in (1.0, 1.5, 2.0):
        assert trust.shares({1: distance}, 0.0, 10.0) == {1: 1}
    assert trust.shares({1: 6.0}, 0.0, 10.0) == {1: 1.5 / 6.0}


def test_rows_that_are_not_clipped_are_the_same_objects_and_others_lie_at_the_usual_distance():
    reports = []
    guard = Guard(3.0, lambda there, why: reports.append((there, why)))
    own = torch.zeros(1, 2, 4)
    near = torch.tensor([[[1.0, 0, 0, 0], [0, 2.0, 0, 0]]])
    far = torch.tensor([[[0, 0, 1.0, 0], [0, 0, 0, 1e9]]])                # of the second run alone
    sent = far.clone()
    counted = guard.clipped(0, own, {4: near, 7: far}, [0.25, 0.25])
    assert counted[4] is near
    assert torch.equal(counted[7], torch.tensor([[[0, 0, 1.0, 0], [0, 0, 0, 2.0]]]))
    assert torch.equal(far, sent)
    assert reports == [(4, ""), (7, FAR)]


def test_numbers_near_the_largest_do_not_overflow():
    guard = Guard(3.0, lambda there, why: None)
    sent = {1: torch.full((1, 1, 4), 1e18), 2: torch.full((1, 1, 4), 1.5)}
    assert torch.allclose(guard.clipped(0, torch.ones(1, 1, 4), sent, [0.3, 0.3])[1], torch.full((1, 1, 4), 1.5))


def test_a_model_that_was_sent_before_does_not_count_unless_it_is_the_own_one():
    reports = []
    guard = Guard(8.0, lambda there, why: reports.append(why))
    for step in range(3):
        own = torch.full((1, 1, 4), float(step))
        sent = {1: torch.full((1, 1, 4), 0.5), 2: own + 0.5}
        counted = guard.clipped(0, own, sent, [0.3, 0.3])
        assert torch.equal(counted[1], sent[1] if step == 0 else own)
        assert counted[2] is sent[2]
    assert reports == ["", "", REPEATED, "", REPEATED, ""]
    guard = Guard(8.0, lambda there, why: reports.append(why))
    same = {1: torch.ones(1, 1, 4)}
    assert all(guard.clipped(0, torch.ones(1, 1, 4), same, [0.5])[1] is same[1] for _ in range(3))


def test_the_local_step_does_not_include_what_neighbours_pulled():
    guard = Guard(2.0, lambda there, why: None)
    guard.clipped(0, torch.zeros(1, 1, 1), {1: torch.ones(1, 1, 1), 2: torch.ones(1, 1, 1)}, [0.25, 0.25])
    own = torch.full((1, 1, 1), 0.5)                                      # where the average was: no local step
    sent = {1: own + 0.0, 2: own + 0.0}
    guard.clipped(0, own, sent, [0.25, 0.25])
    assert [*guard._trust[0, 0, 0]._steps] == [0.0, 0.0]


def test_several_nodes_in_a_process_are_refused_with_the_remedy():
    assert guard_of(math.inf, [(0, 1), (2,)], lambda there, why: None) is None
    with pytest.raises(InputError, match="trust needs one node per process; start 3 processes, or leave it out"):
        guard_of(8.0, [(0, 1), (2,)], lambda there, why: None)


@pytest.mark.parametrize(
    ("name", "first"),
    [("dsgd", True), ("qg-dsgdm-n", True), ("dadam", True), ("dmsgd", True), ("dsgdm:sync=gradient", False)],
)
def test_only_models_are_measured_from_the_model_at_the_start(name, first):
    assert sends_model_first(algorithm(name)) == first


def test_a_start_of_another_width_is_not_that_of_a_message():
    guard = Guard(8.0, lambda there, why: None)
    guard.begin(torch.zeros(1, 4))
    own = torch.ones(1, 1, 5)
    assert guard.clipped(0, own, {1: 1.1 * own}, [0.5])[1].equal(1.1 * own)


def test_algorithms_that_bear_clipping():
    bear = {name for name, one in ALGORITHMS.items() if one.needs.bears_clipping}
    assert bear >= {"dsgd", "dsgdm-n", "qg-dsgdm-n", "qg-dadam", "dadam", "dmsgd", "dfedavgm", "dsgd-clip"}
    sums = {"dsgd-gt", "momentum-tracking", "gt-nsgdm", "k-gt", "d2", "ed", "sgp", "push-diging", "lt-admm", "choco"}
    assert not bear & (sums | {"ab", "relaysgd", "decentlam", "led", "proxskip"})


@pytest.mark.parametrize(("name", "why"), [
    ("dsgd-gt", "keeps sums over all nodes"), ("edm", "keeps sums over all nodes"),
    ("sgp", "keeps a state that has to"), ("lt-admm", "keeps a state that has to"),
    ("relaysgd", "keeps a state that has to"),
    ("choco", "sends compressed differences"), ("slowmo", "averages over all nodes at once"),
])
def test_a_finite_ratio_is_refused_where_messages_have_to_count_whole(name, why):
    experiment = Experiment(algorithm=name)
    assert trust_of(experiment, None, 8.0) == trust_of(experiment, math.inf, 8.0) == math.inf
    with pytest.raises(InputError, match=rf"^{name} {why}.* cannot be clipped; leave out --trust"):
        trust_of(experiment, 6.0)


def test_the_ratio_of_an_algorithm_that_averages_models():
    assert trust_of(Experiment(), None) == math.inf
    assert trust_of(Experiment(), None, 8.0) == 8.0
    assert trust_of(Experiment(), math.inf, 8.0) == math.inf
    assert trust_of(Experiment(), 9.0) == 9.0


def test_bad_options_get_one_sentence():
    with pytest.raises(InputError, match="trust must be >= 1, got "):
        Options(trust=0.5, engine="distributed")
    with pytest.raises(InputError, match="use it with --engine distributed"):
        Options(trust=5.0)
