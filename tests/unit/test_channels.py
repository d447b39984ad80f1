"""Messages per edge, pushes, and gradients elsewhere: what `node` promises, on the simulator."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from small_runs import CPU, SHORT, assert_same_run, final, settled, stop_at
from small_runs import Stop as Stopped

import quasiglobal as qg
from quasiglobal.engines.costs import Ledger, traffic
from quasiglobal.engines.draws import Faults, hashed
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.wire import wire_of
from quasiglobal.runs.local import simulate
from quasiglobal.training.program import Program

STAR = qg.topology.star(4)
ONE_WAY = qg.topology.from_matrices([[[0.5, 0, 0.5], [0.5, 0.5, 0], [0.25, 0.25, 0.5]]])


@dataclass(frozen=True, kw_only=True)
class Probe(qg.Algorithm):
    """Calls a function of (x, node) and keeps what it returns."""

    ask: object

    def init(self, x):
        return {}

    def step(self, x, g, state, node):
        found.append(self.ask(x, node))
        return x, state


found = []


def asked(ask, graph, x, engine=None, t=1):
    """What `ask` returns in step t."""
    found.clear()
    graph = qg.topology.parse(graph)
    engine = engine or Simulator(graph)
    engine.step(Probe(ask=ask), x, x, {}, t=t, lr=torch.tensor(1.0), full_gradient=torch.zeros_like)
    return found[0]


def numbered(n, c=2):
    return torch.arange(float(n))[:, None].expand(n, c).clone()


# ------------------------------------------------------------------------------------------------ messages per edge

def test_each_edge_carries_its_own_message():
    """Node i sends 10 i + j to its slot j. The centre of a star has three neighbours, a leaf one."""
    def ask(x, node):
        return node.exchange({j: 10 * x + j for j in range(node.edges.degree)})

    received, came = asked(ask, STAR, numbered(4))
    assert received.shape == (4, 3, 2)
    assert came[:, :, 0].tolist() == [[True] * 3, *[[True, False, False]] * 3]
    assert received[0, :, 0].tolist() == [10, 20, 30]       # what the leaves sent to their only neighbour
    assert received[1:, 0, 0].tolist() == [0, 1, 2]         # what the centre sent to its slots
    assert (received[1:, 1:] == 0).all()


def test_stacked_messages_and_one_message_for_all_are_the_same():
    def ask(x, node):
        degree = node.edges.degree
        ways = (dict.fromkeys(range(degree), x), x[:, None].expand(-1, degree, -1), x[:, None])
        return [node.exchange(one)[0] for one in ways]

    first, *others = asked(ask, "ring:5", numbered(5))
    assert all(other.equal(first) for other in others)
    assert first[0, :, 0].tolist() == [1, 4]


def test_several_messages_travel_together():
    def ask(x, node):
        return node.exchange(x[:, None], x[:, None, :1] + 7)

    (wide, narrow), came = asked(ask, "ring:3", numbered(3))
    assert wide.shape == (3, 2, 2)
    assert narrow.shape == (3, 2, 1)
    assert (narrow == wide[..., :1] + 7).all()
    assert came.all()


def test_links_are_those_of_the_step_or_of_another_one():
    graph = qg.topology.one_peer_exponential(4)             # node i receives from i − 1, then from i − 2

    def ask(x, node):
        return [node.exchange(x[:, None], at=at) for at in (None, 1, 2)]

    now, first, second = asked(ask, graph, numbered(4), t=2)
    assert now[0].equal(second[0])
    for (received, came), back in ((first, 1), (second, 2)):
        assert came.sum() == 4
        assert received.sum(dim=1)[:, 0].tolist() == [(i - back) % 4 for i in range(4)]


def test_directed_links_have_slots_of_their_own():
    """Node 2 receives from 0 and 1, but sends to 0 only."""
    def ask(x, node):
        return node.edges, node.exchange({j: 10 * x + j for j in range(node.edges.degree)})

    edges, (received, came) = asked(ask, ONE_WAY, numbered(3))
    assert edges.senders[:, :, 0].sum(dim=1).tolist() == [1, 1, 2]
    assert edges.receivers[:, :, 0].sum(dim=1).tolist() == [2, 1, 1]
    assert [received[i, :, 0][came[i, :, 0]].tolist() for i in range(3)] == [[20], [0], [1, 10]]


def test_who_was_missing_is_who_lost_a_message():
    engine = Simulator(qg.topology.complete(4), seeds=(0, 1), drop=0.5)
    received, came = asked(lambda x, node: node.exchange(x[:, None] + 1), engine.topology, numbered(8), engine, t=3)
    arrived = Faults(drop=0.5).arrived(torch.tensor([0, 1]), torch.tensor(3), 4)
    others = ~torch.eye(4, dtype=torch.bool)
    assert came[:, :, 0].tolist() == arrived[:, others].view(8, 3).tolist()
    assert (received[~came.expand_as(received)] == 0).all()
    assert (received[came.expand_as(received)] > 0).all()
    assert 0 < came.sum() < came.numel()


def test_columns_that_stay_at_their_node_have_no_neighbours():
    engine = Simulator(STAR, shared=2)

    def ask(x, node):
        return node.edges, node.exchange(x[:, None]), node.push(x, x[:, :1])

    edges, (received, came), (pushed, narrow) = asked(ask, STAR, numbered(4, 3) + 1, engine)
    assert edges.senders.sum(dim=1).tolist() == [[3, 3, 0], *[[1, 1, 0]] * 3]
    assert (came == edges.senders).all()
    assert (received[..., 2] == 0).all()
    assert pushed[:, 2].tolist() == [1, 2, 3, 4]
    assert narrow.flatten().tolist() == pushed[:, 0].tolist()


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (lambda x: {0: x}, "a message for each slot 0 to 1, got 0"),
        (lambda x: x, "of shape \\[4, 2, c\\], or a dict of them, got shape \\[4, 2\\]"),
        (lambda x: x[:, None].expand(4, 3, 2), "got shape \\[4, 3, 2\\]"),
    ],
)
def test_messages_of_another_shape_are_refused(message, sentence):
    with pytest.raises(qg.InputError, match=sentence):
        asked(lambda x, node: node.exchange(message(x)), "ring:4", numbered(4))


@pytest.mark.parametrize(
    ("name", "graph", "sentence"),
    [
        ("relaysgd", "ring:4", "RelaySGD needs a spanning tree, which ring:4 is not; use one, such as tree:4"),
        ("relaysgd", "every:2/star:4", "RelaySGD needs a spanning tree"),
        ("lt-admm", "one-peer-exponential:8", "LTADMM needs an undirected graph"),
        ("relaysgd:base=qg-dsgdm", "star:4", "the base of relaysgd makes the local step"),
        ("sgp:sync=gradient", "star:4", "the base of sgp makes the local step"),
    ],
)
def test_what_does_not_fit_is_refused(name, graph, sentence):
    with pytest.raises(qg.InputError, match=sentence):
        qg.minimize(None, torch.zeros(2), name, graph, 0.1, 1)


# ------------------------------------------------------------------------------------------------------------ pushes

def test_a_push_divides_what_a_node_has_among_its_receivers():
    """Node 0 sends to 1 and 2, node 1 to 2, node 2 to 0."""
    x = torch.tensor([[6.0], [4.0], [2.0]])
    assert asked(lambda x, node: node.push(x), ONE_WAY, x).flatten().tolist() == [2 + 1, 2 + 2, 2 + 2 + 1]


def test_a_push_loses_what_a_lost_message_carries():
    engine = Simulator(qg.topology.ring(6), drop=0.4)
    x = torch.ones(6, 1)
    pushed = asked(lambda x, node: node.push(x), engine.topology, x, engine)
    arrived = Faults(drop=0.4).arrived(torch.tensor([0]), torch.tensor(1), 6)[0]
    expected = [(1 + sum(arrived[i, j].item() for j in ((i - 1) % 6, (i + 1) % 6))) / 3 for i in range(6)]
    np.testing.assert_allclose(pushed.flatten().tolist(), expected, rtol=1e-6)
    assert pushed.sum() < 6


# ------------------------------------------------------------------------------------------------ gradients elsewhere

class Lookahead(qg.Algorithm):
    """Extragradient: the gradient at x − η g is the one to step by."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * node.gradient(x - node.lr * g)), state


def test_a_gradient_elsewhere_has_the_weight_decay_of_the_step():
    start = torch.ones(1, dtype=torch.float64)
    x = qg.minimize(lambda x, t: t * x, start, Lookahead(), "complete:2", 0.1, 1, weight_decay=1.0).x
    assert x.flatten().tolist() == pytest.approx([1 - 0.1 * 2 * (1 - 0.1 * 2)] * 2)


class SameGradient(qg.Algorithm):
    """The gradient of the batch, asked for again."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * node.gradient(x)), state


def trained_rows(*names, **settings):
    experiments = [replace(SHORT, algorithm=name, epochs=1, precision="fp64", **settings) for name in names]
    program = Program(task_of(experiments[0]), experiments, CPU)
    program.train_epoch()
    return [program.rows_of(k)["x"] for k in range(len(names))]


def task_of(experiment):
    from quasiglobal.data.sources import load
    from quasiglobal.runs.building import make_task

    return make_task(experiment, load("digits"))


@pytest.mark.slow
def test_in_a_training_it_is_of_the_same_batch():
    """Two bands: each asks for its own rows' part of the batch; the batch is augmented and clipped alike."""
    again, plain = trained_rows("test_channels:SameGradient", "dsgd", clip=0.5)
    torch.testing.assert_close(again, plain, rtol=0, atol=1e-12)


# ---------------------------------------------------------------------------------------------- runs and their costs

@pytest.mark.parametrize(("name", "graph"), [("relaysgd:beta=0.9", "star:4"), ("push-diging:sums=true", "ring:4")])
def test_a_run_with_lost_messages_resumes_bit_for_bit(name, graph, tmp_path):
    experiment = replace(SHORT, algorithm=name, topology=graph, drop=0.3, epochs=2)
    (whole,) = simulate(experiment, settled(tmp_path / "whole"))
    with pytest.raises(Stopped):
        simulate(experiment, settled(tmp_path / "half"), stop_at(1))
    (resumed,) = simulate(experiment, settled(tmp_path / "half"))
    assert_same_run(whole, resumed)
    per_edge = [value for key, value in final(whole).items() if key.startswith("state.") and value.ndim == 3]
    assert per_edge
    assert all(value.shape[:2] == (4, 3 if graph == "star:4" else 2) for value in per_edge)


@pytest.mark.parametrize(
    ("name", "models", "numbers"),
    [("relaysgd", 1, 1), ("lt-admm:tau=4", 0.25, 0), ("sgp", 1, 1), ("qg-sgp", 1, 1), ("push-diging", 2, 1),
     ("ab", 2, 0), ("push-diging:sums=true", 4, 2)],
)
def test_traffic_is_counted_to_the_number(name, models, numbers):
    """Sums travel in float64: twice the bytes."""
    found = traffic(qg.algorithm(name))
    assert (float(found.neighbours), float(found.numbers), found.everybody) == (models, numbers, 0)
    ledger = Ledger(qg.algorithm(name), Simulator(qg.topology.ring(4)), 100)
    assert ledger.per_step() == 2 * 4 * (100 * models + numbers)


# ------------------------------------------------------------------------------------------ schedules of communication

def trained(communication, algorithm="dsgdm", **settings):
    experiment = replace(
        SHORT, algorithm=algorithm, communication=communication, precision="fp64", steps=5, epochs=2, **settings
    )
    program = Program(task_of(experiment), [experiment], CPU)
    program.train_epoch()
    half = program.state.x.clone()
    program.train_epoch()
    return half, program


def spread_of(x):
    return float((x - x.mean(dim=0)).abs().max())


def test_a_merge_at_the_end_replaces_all_models_by_their_mean():
    plain_half, plain = trained("")
    half, program = trained("merge@end")
    assert half.equal(plain_half)
    assert spread_of(program.state.x) == 0 < spread_of(plain.state.x)
    torch.testing.assert_close(program.state.x[0], plain.state.x.mean(dim=0), rtol=0, atol=1e-14)
    sent = program.evaluate()[0]["bytes_sent"][0] - plain.evaluate()[0]["bytes_sent"][0]
    assert sent == 2 * 3 / 4 * 8 * program.layout.size      # one all-reduce over four nodes, in float64


def test_a_window_of_full_communication_averages_over_all_nodes_in_its_steps():
    """Ten steps, of which the last three are in the window: the same as a complete graph from then on."""
    half, program = trained("complete@0.7-1.0", "dsgd")
    _, plain = trained("", "dsgd")
    assert half.equal(trained("", "dsgd")[0])
    assert spread_of(program.state.x) < 1e-14 < spread_of(plain.state.x)
    sent = [one.evaluate()[0]["bytes_sent"][0] for one in (plain, program)]
    d = 8 * program.layout.size
    assert sent == [10 * 2 * d, 7 * 2 * d + 3 * 2 * 3 / 4 * d]


def test_a_merge_does_not_suffer_from_faults():
    assert spread_of(trained("merge@end", "lt-admm", drop=0.3)[1].state.x) == 0


@pytest.mark.parametrize(
    ("communication", "settings", "sentence"),
    [
        ("complete@0.9-0.8", {}, "fractions of the run 0 <= FROM < TO <= 1, such as complete@0.9-1.0"),
        ("complete@1..0-2", {}, "got 'complete@1..0-2'"),
        ("merge@0.5", {}, "communication is merge@end, or"),
        ("complete@0.5-1.0", {"algorithm": "lt-admm"}, "lt-admm has messages per edge"),
        ("complete@0.5-1.0", {"algorithm": "d2"}, "D2 needs a fixed W"),
        ("complete@0.5-1.0", {"algorithm": "choco"}, "choco keeps sums of what its neighbours sent; leave out"),
        ("complete@0.5-1.0", {"algorithm": "proxskip"}, "proxskip draws the steps at which it averages; leave out"),
        ("complete@0.5-1.0", {"drop": 0.1}, "exact mean .* needs every node"),
    ],
)
@pytest.mark.filterwarnings("ignore:D2 needs")
def test_a_schedule_of_communication_that_cannot_be_is_refused(communication, settings, sentence):
    with pytest.raises(qg.InputError, match=sentence):
        trained(communication, **settings)


# ------------------------------------------------------------------------------------------------ compressed messages

@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("text", ["topk:0.1", "randk:0.1", "sign", "qsgd:1", "qsgd:4", "qsgd:127"])
def test_what_is_packed_is_restored_bit_for_bit_and_as_large_as_counted(text, dtype):
    wire, c = wire_of(text), 37
    v = torch.randn(2, 3, c, dtype=dtype, generator=torch.Generator().manual_seed(0))
    v[0, 0] = 0
    key = hashed(torch.arange(2)[:, None, None], torch.arange(3)[:, None], torch.arange(c))
    parts = wire.parts(v, key)
    row = wire.packed(parts, c)
    assert row.dtype == torch.uint8
    assert row[0, 0].nbytes == wire.bytes(c, dtype.itemsize)
    q = wire.restored(wire.unpacked(row, c, dtype), c, key)
    assert q.equal(wire(v, key))
    assert (q[0, 0] == 0).all()
    assert (q - v)[1].norm() < v[1].norm()


def test_a_compressed_run_reaches_what_an_uncompressed_run_reaches():
    """The compressed differences vanish, so the fixed point is the same; 20 % of the numbers travel."""
    target = torch.linspace(-1, 1, 80, dtype=torch.float64).view(8, 10)
    ends = [
        qg.minimize(lambda x, t: x - target, torch.zeros_like(target[0]), "choco", "ring:8", 0.05, 400, wire=wire).x
        for wire in ("full", "topk:0.2", "sign")
    ]
    assert all((end - ends[0]).abs().max() < 1e-6 for end in ends[1:])


def test_compressed_bytes_are_counted():
    def sent(wire):
        experiment = replace(SHORT, algorithm="choco", wire=wire, steps=2, epochs=1)
        program = Program(task_of(experiment), [experiment], CPU)
        program.train_epoch()
        return program.evaluate()[0]["bytes_sent"][0], program.layout.size

    full, d = sent("full")
    assert full == 2 * 2 * 4 * d
    assert sent("sign")[0] == 2 * 2 * wire_of("sign").bytes(d) == 2 * 2 * (4 + -(-d // 8))


def sent_by(algorithm, steps, graph="ring:4", **settings):
    """Bytes that a node has sent, and the number of parameters."""
    experiment = replace(SHORT, algorithm=algorithm, topology=graph, steps=steps, epochs=1, **settings)
    program = Program(task_of(experiment), [experiment], CPU)
    program.train_epoch()
    return program.evaluate()[0]["bytes_sent"][0], program.layout.size


@pytest.mark.parametrize(
    ("name", "gossips", "all_reduces"),
    [("led:tau=7", 2, 0), ("diloco:tau=50", 0, 0), ("diloco:tau=8", 0, 2), ("gossip-pga:tau=7", 18, 2),
     ("momentum-tracking:init=mean", 40, 1), ("lt-admm:tau=6", 3, 0)],
)
def test_bytes_are_those_of_the_steps_that_were_made(name, gossips, all_reduces):
    """Twenty steps on a ring of four: a gossip is a model for each of two neighbours."""
    sent, d = sent_by(name, 20)
    assert sent == 4 * d * (2 * gossips + 2 * 3 / 4 * all_reduces)


def test_bytes_of_proxskip_follow_its_coins():
    sent, d = sent_by("proxskip:p=0.4", 20, seed=3)
    coins = [bool(Simulator(qg.topology.ring(4), seeds=(3,)).coin(0.4, torch.tensor(t))) for t in range(1, 21)]
    assert 0 < sum(coins) < 20
    assert sent == 2 * 4 * d * sum(coins)


def test_bytes_of_random_graphs_are_those_of_the_graphs_that_were_drawn():
    graph = qg.topology.parse("equidyn:6:undirected=true")
    links = [int((graph.weights(t) != 0).sum()) - 6 for t in range(1, 11)]
    assert len(set(links)) > 1
    sent, d = sent_by("dsgd", 10, "equidyn:6:undirected=true")
    assert sent == pytest.approx(4 * d * sum(links) / 6, rel=1e-15)


def test_a_merge_sends_the_statistics_of_batch_norm_too():
    settings = {"model": "cnn", "norm": "bn", "width": 0.25}
    (plain, d), (merged, _) = (sent_by("dsgd", 2, communication=one, **settings) for one in ("", "merge@end"))
    experiment = replace(SHORT, **settings)
    buffers = Program(task_of(experiment), [experiment], CPU).state.buffers
    statistics = sum(value[0].numel() for value in buffers.values() if value.is_floating_point())
    assert statistics > 0
    assert merged - plain == 2 * 3 / 4 * 4 * (d + statistics)
    (plain, _), (merged, _) = (
        sent_by("dsgd", 2, communication=one, bn="local", **settings) for one in ("", "merge@end")
    )
    assert merged - plain == 2 * 3 / 4 * plain / (2 * 2)       # two steps, two neighbours


def test_a_message_to_compress_counts_by_its_width():
    class Narrow(qg.Algorithm):
        compresses = True

        def step(self, x, g, state, node):
            node.tell(x[:, :3])
            return x + 0.0 * node.tell(x)[0], state

    for wire, each in (("full", 4 * 13), ("topk:0.5", 8 * (2 + 5)), ("sign", (4 + 1) + (4 + 2))):
        engine = Simulator(qg.topology.ring(6), wire=wire_of(wire))
        assert float(Ledger(Narrow(), engine, 10).after(5)) == 5 * 2 * each, wire


def test_an_exact_mean_of_a_number_is_an_exact_mean():
    class Normed(qg.Algorithm):
        def step(self, x, g, state, node):
            return node.mix(x - node.lr * g / (1 + node.mean(g.norm(dim=-1, keepdim=True)))), state

    assert traffic(Normed()).means
    assert "consensus" in qg.check_algorithm(Normed())


@pytest.mark.parametrize(
    ("name", "graph", "precision"),
    [("lt-admm:tau=2", "every:2/ring:4", "fp32"), ("noloco:tau=3", "every:2/ring:4", "fp32"),
     ("gossip-pga:tau=3", "every:2/ring:4", "fp32"), ("push-diging:sums=true", "ring:4", "fp64"),
     ("relaysgd", "double-trees:4", "fp32"), ("dsgd", "every:3/matching:4", "fp32")],
)
def test_the_estimated_bytes_are_those_that_are_sent(name, graph, precision):
    experiment = replace(SHORT, algorithm=name, topology=graph, steps=25, epochs=1, precision=precision)
    program = Program(task_of(experiment), [experiment], CPU)
    first, last = (program.bands.bytes_sent(0, steps) for steps in (1, 25))
    assert program.bands.bytes_per_step() == pytest.approx((last - first) / 24, rel=1e-12)


def test_estimated_bytes_of_coins_are_their_expectation():
    ledger = Ledger(qg.algorithm("proxskip:p=0.3"), Simulator(qg.topology.ring(4)), 100)
    assert ledger.per_step() == pytest.approx(0.3 * 2 * 4 * 100, rel=1e-7)


def test_rounded_messages_are_refused_where_they_do_harm():
    with pytest.raises(qg.InputError, match="SGP uses small differences of mixed models"):
        qg.minimize(None, torch.zeros(4, 3), "sgp", "ring:4", 0.1, 1, wire="bf16")


def test_bytes_of_windows_trees_and_local_steps():
    sent, d = sent_by("dsgd", 10, communication="complete@0.5-0.7,complete@0.6-0.8")        # three steps in the union
    assert sent == 4 * d * (7 * 2 + 3 * 2 * 3 / 4)
    sent, d = sent_by("relaysgd", 10, "double-trees:4")                                     # a count for each tree
    assert sent == 4 * (d + 2) * 10 * 2 * 3 / 4
    sent, d = sent_by("dsgd", 10, "every:4/ring:4")
    assert sent == 4 * d * 2 * 2
    sent, d = sent_by("dsgd", 10, precision="fp64")
    assert sent == 8 * d * 10 * 2


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda node, x: node.mix(), r"node.mix takes tensors of one floating-point type, got nothing"),
        (lambda node, x: node.mix(x.long()), r"node.mix takes tensors of one floating-point type, got int64"),
        (lambda node, x: node.mix(x, x.double()), r"node.mix .* got float32 and float64; convert them"),
        (lambda node, x: node.mix(x[:, 0]), r"node.mix takes tensors of shape \[4, c\], a row for each node"),
        (lambda node, x: node.mix(x[:2]), r"a row for each node, got shape \[2, 3\]"),
        (lambda node, x: node.push(x.long()), r"node.push .* got int64"),
        (lambda node, x: node.mean(x.long()), r"node.mean .* got int64"),
        (lambda node, x: node.mean(1.0), r"node.mean takes tensors of shape \[4, c\], .* got a float"),
        (lambda node, x: node.tell(x.long()), r"node.tell .* got int64"),
        (lambda node, x: node.mix_sometimes(2.0, x), r"node.mix_sometimes needs a probability in \[0, 1\], got 2.0"),
        (lambda node, x: node.sample(2.0, node.time), r"node.sample needs a fraction in \(0, 1\], got 2.0"),
        (lambda node, x: node.exchange(), r"node.exchange .* got nothing"),
        (lambda node, x: node.exchange(None), r"node.exchange takes messages of shape \[4, 2, c\], .* got a NoneType"),
        (lambda node, x: node.exchange([x, x]), r"or a dict of them, got a list"),
        (lambda node, x: node.exchange({"a": x, 1: x}), r"a message for each slot 0 to 1, got a, 1"),
        (lambda node, x: node.exchange({0: x, 1: x[:, :1]}), r"messages of one shape \[4, c\], got shape \[4, 1\]"),
        (lambda node, x: node.exchange({0: 1.0, 1: 2.0}), r"messages of one shape \[4, c\], got a float"),
        (lambda node, x: node.exchange(x[:, None], x[:, None].double()), r"node.exchange .* float32 and float64"),
    ],
)
def test_a_wrong_call_of_a_channel_is_one_sentence(call, sentence):
    class Wrong(qg.Algorithm):
        def step(self, x, g, state, node):
            call(node, x)
            return x, state

    with pytest.raises(qg.InputError, match=sentence):
        qg.minimize(None, torch.zeros(4, 3), Wrong(), "ring:4", 0.1, 1)


@pytest.mark.parametrize("result", [lambda x: (x[:1], {}), lambda x: (x, None), lambda x: (None, {})])
def test_a_step_returns_models_like_those_before_and_a_state(result):
    class Wrong(qg.Algorithm):
        def step(self, x, g, state, node):
            return result(x)

    with pytest.raises(qg.InputError, match=r"step of Wrong has to return x, a tensor of shape \[4, 3\] as before"):
        qg.minimize(None, torch.zeros(4, 3), Wrong(), "ring:4", 0.1, 1)


def test_a_window_without_a_step_warns():
    with pytest.warns(UserWarning, match="a window of full communication has no step in a run of 7; widen it"):
        sent_by("dsgd", 7, communication="complete@0.99-1.0")


def test_a_fraction_keeps_no_number_too_many():
    """0.07 · 100 is 7.000000000000001 in floating-point numbers."""
    assert [wire_of(f"topk:{part}").bytes(100) for part in (0.07, 0.28, 0.55)] == [8 * 7, 8 * 28, 8 * 55]


@pytest.mark.parametrize("wire", ["topk", "topk:0", "topk:2", "qsgd:0.5", "qsgd:500", "half"])
def test_an_unknown_wire_is_refused(wire):
    with pytest.raises(qg.InputError, match=r"wire is one of full, bf16, topk:0\.01"):
        replace(SHORT, wire=wire)


def test_only_algorithms_that_hold_the_error_compress():
    sentence = "does not hold the error of compressed messages itself; use choco, adagossip, beer or motef with sign"
    with pytest.raises(qg.InputError, match=sentence):
        qg.minimize(None, torch.zeros(2), "dsgd", "ring:4", 0.1, 1, wire="sign")
    with pytest.raises(qg.InputError, match=sentence):
        trained("", algorithm="dsgd", wire="sign")


def test_counting_bytes_elsewhere_leaves_the_seeds_of_a_captured_step_in_place():
    """A CUDA graph reads the tensor that it was recorded with."""
    engine = Simulator(qg.topology.ring(4), seeds=(0, 1))
    recorded = engine.seeds_on(torch.device("cpu"))
    engine.seeds_on(torch.device("meta"))
    assert engine.seeds_on(torch.device("cpu")) is recorded


def test_a_gradient_elsewhere_is_asked_for_all_models():
    with pytest.raises(qg.InputError, match=r"takes models like x, of shape \[4, 2\], got shape \[1, 2\]"):
        asked(lambda x, node: node.gradient(x[:1]), "star:4", numbered(4))


def test_minimize_loses_the_messages_that_a_simulator_loses():
    graph, x0 = qg.topology.ring(5), numbered(5).double()
    chosen = {"algorithm": "lt-admm:tau=1", "topology": graph, "lr": 0.1, "steps": 20}
    ours = qg.minimize(lambda x, t: x, x0, **chosen, seed=3, drop=0.3, churn=0.2)
    other = qg.minimize(lambda x, t: x, x0, **chosen, engine=Simulator(graph, seeds=(3,), drop=0.3, churn=0.2))
    assert ours.history.equal(other.history)
    assert not ours.history.equal(qg.minimize(lambda x, t: x, x0, **chosen).history)
    with pytest.raises(qg.InputError, match="drop must be a probability"):
        qg.minimize(lambda x, t: x, x0, **chosen, drop=1.5)
    with pytest.raises(qg.InputError, match="are the engine's; leave them out"):
        qg.minimize(lambda x, t: x, x0, **chosen, drop=0.1, engine=Simulator(graph))


@pytest.mark.parametrize("name", ["sgdm-n", "slowmo:tau=5", "gossip-pga:tau=3", "proxskip", "dsgd"])
@pytest.mark.parametrize("graph", ["ring:5", "star:7", "epidemic:7:2"])
def test_a_resumed_run_counts_the_same_bytes(name, graph):
    """Bit for bit: it adds up the steps before the resume at once."""
    whole, resumed = (Ledger(qg.algorithm(name), Simulator(qg.topology.parse(graph)), 4810) for _ in range(2))
    counts = [float(whole.after(23 * epoch)) for epoch in range(1, 400)]
    for epoch in (57, 250, 399):
        assert float(resumed.after(23 * epoch)) == counts[epoch - 1]
