"""Graphs that average exactly, graphs that are drawn at each step, and graphs from label counts."""

import warnings
from dataclasses import replace

import networkx as nx
import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.api.naming import experiment_of
from quasiglobal.data.partition import class_counts
from quasiglobal.data.sources import load
from quasiglobal.engines.simulator import Simulator
from quasiglobal.runs.building import make_task
from quasiglobal.topology.mixing import lasting_noise
from quasiglobal.topology.parsing import count_nodes, parse
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program

LENGTHS = {
    1: (5, 4, 5, 3, 4, 6, 9, 5, 11, 6),
    2: (3, 2, 4, 3, 4, 4, 6, 5, 6, 6),
    4: (1, 2, 3, 2, 2, 3, 2, 3, 5, 3),
}
"""Lengths of the authors' Base-(k + 1) graphs for 5, 6, 7, 8, 16, 24, 25, 32, 33 and 64 nodes, by k."""

RANDOM = ("equidyn:9", "equidyn:8:undirected=true", "matching:8", "matching:7", "epidemic:8:3", "lazy/equidyn:6:seed=2")

EQUIDYN, MATCHING, EPIDEMIC = [13, 8, 4, 7, 13, 13, 15, 13], [6, 3, 6, 1, 4, 5, 7, 4], [(5, 7), (5,), (4,)]
DRAWN_ONCE = {
    "erdos-renyi:12:0.4": (1, 2, 7, 10, 11), "erdos-renyi:12:0.4:seed=3": (1, 2, 3, 4, 7, 8),
    "small-world:12:4:0.5": (2, 5, 8, 11), "k-regular:12:4": (1, 4, 8, 10),
}
"""Neighbours of node 0, at the first steps of random graphs and in graphs that are drawn once."""

EXPERIMENT = Experiment(model="mlp", topology="stl-fw:6:3", alpha=0.1, epochs=1, steps=2, batch=8, lr=0.1)


# ------------------------------------------------------------------------------------------------------ exact averages


@pytest.mark.parametrize("peers", LENGTHS)
def test_base_graphs_average_exactly_after_as_many_steps_as_the_authors(peers):
    for n, length in zip((5, 6, 7, 8, 16, 24, 25, 32, 33, 64), LENGTHS[peers], strict=True):
        graph = topology.base(n, peers)
        assert graph.period == graph.exact_after == length, n
        assert graph.peers[1] <= peers
        assert graph.is_symmetric
        assert graph.is_doubly_stochastic


@pytest.mark.parametrize("n", [2, 3, 9, 11, 15, 22, 26, 47, 58])
def test_base_graphs_do_for_other_numbers_of_nodes(n):
    for peers in range(1, 5):
        graph = topology.base(n, peers)
        product = np.eye(n)
        for W in graph.matrices:
            assert ((W != 0).sum(axis=1) <= peers + 1).all()
            product = W @ product
        np.testing.assert_allclose(product, 1 / n, atol=1e-12)


def test_the_step_after_which_a_graph_has_averaged_exactly():
    for name, steps in {"complete:5": 1, "one-peer-exponential:8": 3, "every:2/base:6:1": 8}.items():
        assert parse(name).exact_after == steps
    for name in ("ring:5", "one-peer-exponential:6", "lazy/base:4:1", "matching:2"):
        assert parse(name).exact_after is None


# ------------------------------------------------------------------------------------------------------ noise, traffic


def test_nu_is_the_papers_sum_over_the_spectrum_and_the_variance_that_noise_leaves():
    ring = topology.ring(16)
    squares = np.linalg.eigvalsh(ring.weights())[:-1] ** 2
    assert ring.nu == pytest.approx((squares / (1 - squares)).sum() / 16)
    assert lasting_noise(ring.matrices) == pytest.approx(ring.nu)
    for name in ("one-peer-exponential:6", "every:2/base:6:1", "exponential:5"):
        graph = parse(name)
        total = 0.0
        for first in range(graph.period):
            product = np.eye(graph.n)
            for back in range(400):
                product = product @ graph.weights(1 + (first - back) % graph.period)
                total += np.square(product - 1 / graph.n).sum() / (graph.n * graph.period)
        assert graph.nu == pytest.approx(total), name
    assert topology.from_matrices([[[0, 1], [1, 0]]]).nu == float("inf")


@pytest.mark.parametrize("name", ["equidyn:6", "every:3/matching:6"])
def test_nu_of_random_graphs_is_the_variance_that_noise_leaves(name):
    graph, apart = parse(name), np.eye(6) - 1 / 6
    C, total, steps = np.zeros((6, 6)), 0.0, 3000
    for t in range(1, steps + 1):
        W = graph.weights(t)
        C = W @ (C + apart) @ W.T
        total += np.trace(C) / (6 * steps)
    assert graph.nu == pytest.approx(total, rel=0.05)


def test_rho_of_one_random_peer():
    assert topology.equidyn(16).rho == pytest.approx(1 - (0.5 - 0.5 / 15))
    assert parse("every:4/equidyn:16").rho == pytest.approx(topology.equidyn(16).rho / 4)
    assert topology.matching(16).rho == pytest.approx(1 - (8 - 1) / 15, abs=0.05)


def test_double_trees_are_a_tree_and_its_mirror_image():
    """The parent of node i is node i // 2, as in the authors' code; all nodes but the roots have up to two children."""
    graph = parse("double-trees:16")
    first, second = (nx.from_numpy_array(graph.links(t)) for t in (1, 2))
    assert {tuple(sorted(edge)) for edge in first.edges} == {(i // 2, i) for i in range(1, 16)}
    assert {tuple(sorted(edge)) for edge in second.edges} == {(15 - i, 15 - i // 2) for i in range(1, 16)}
    assert nx.is_tree(first)
    assert nx.is_tree(second)


def test_peers_a_step():
    assert topology.star(5).peers == (1.6, 4)
    assert parse("every:2/epidemic:8:3").peers == (1.5, 3)
    assert topology.equidyn(8).bytes_per_step(100) == 4 * 100


# ------------------------------------------------------------------------------------------------------- random graphs


@pytest.mark.parametrize("name", RANDOM)
def test_random_weights_are_a_function_of_the_seed_and_the_step(name):
    graph = parse(name)
    topology.parsing._made_once.cache_clear()
    again = parse(name)
    assert graph == again
    assert graph is not again
    assert str(graph) == name
    assert graph != parse(f"{name.removesuffix(':seed=2')}:seed=5")
    drawn = [graph.weights(t) for t in range(1, 30)]
    for t in (17, 3, 29):
        np.testing.assert_array_equal(again.weights(t), drawn[t - 1])
    assert any((drawn[0] != W).any() for W in drawn)
    for W in drawn:
        np.testing.assert_allclose(W.sum(axis=1), 1)
        assert graph.keeps_mean == (name[0] != "e" or name[1] != "p")
        assert not graph.keeps_mean or np.allclose(W.sum(axis=0), 1)


def test_the_draws_are_the_same_on_all_machines():
    """Trainings that are compared or resumed elsewhere, with other versions of NumPy and networkx, have one graph."""
    assert [parse("equidyn:16").neighbours(0, t)[0] for t in range(1, 9)] == EQUIDYN
    assert [parse("matching:8").neighbours(0, t)[0] for t in range(1, 9)] == MATCHING
    assert [parse("epidemic:8:2").neighbours(0, t) for t in range(1, 4)] == EPIDEMIC
    for name, neighbours in DRAWN_ONCE.items():
        assert parse(name).neighbours(0) == neighbours, name


def test_what_each_random_graph_draws():
    hops = set()
    for t in range(1, 60):
        (peer,) = topology.equidyn(6).neighbours(0, t)
        hops.add(peer)
        assert all(topology.equidyn(6).neighbours(i, t) == ((i + peer) % 6,) for i in range(6))
        for pairs in (topology.matching(6), topology.equidyn(6, undirected=True)):
            W = pairs.weights(t)
            np.testing.assert_array_equal(W, W.T)
            assert set(W[W > 0]) <= {0.5, 1.0}
        assert ((topology.matching(6).weights(t) > 0).sum(axis=0) == 2).all()
        assert ((topology.epidemic(6, 2).weights(t) > 0).sum(axis=0) == 3).all()
    assert hops == {1, 2, 3, 4, 5}


def test_local_steps_between_random_gossips():
    graph, base = parse("every:3/matching:6"), topology.matching(6)
    for t in (1, 2, 4):
        np.testing.assert_array_equal(graph.weights(t), np.eye(6))
    np.testing.assert_array_equal(graph.weights(6), base.weights(2))
    assert graph != base
    assert graph != parse("every:2/matching:6")


def test_the_simulator_mixes_by_the_weights_of_each_step():
    graph = topology.epidemic(5, 2)
    engine = Simulator(graph, seeds=(0, 1))
    x = torch.randn(10, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (1, 2, 200, 3, 64, 65):
        (mixed,) = engine.mix(t, (x,))
        W = torch.from_numpy(graph.weights(t))
        torch.testing.assert_close(mixed, torch.cat([W @ x[:5], W @ x[5:]]), rtol=0, atol=1e-12)


def test_a_recorded_step_finds_the_weights_of_the_next_one():
    graph = parse("every:2/matching:4")
    engine, x = Simulator(graph), torch.zeros(4, 1)
    held = engine.drawn(2, x)
    for t in (3, 4, 5, 6):
        engine.refresh(t)
        assert held.equal(torch.from_numpy(graph.weights(t - t % 2)).float() - torch.eye(4))


@pytest.mark.filterwarnings("ignore:W of .*epidemic")
def test_a_run_on_a_random_graph_resumes_exactly():
    for name in ("equidyn:5", "every:2/epidemic:5:2"):
        def run(steps, graph=name, **how):
            return qg.minimize(lambda x, t: x - torch.arange(5.0)[:, None], torch.zeros(5, 2), "qg-dsgdm-n", graph,
                               lr=0.1, steps=steps, **how)
        assert run(20, resume=run(7)).x.equal(run(20).x)


def test_methods_that_keep_an_exact_mean_refuse_a_graph_that_moves_it():
    def run(name):
        qg.minimize(lambda x, t: x, torch.zeros(2), name, "epidemic:4:1", lr=0.1, steps=1)

    with pytest.raises(qg.InputError, match=r"needs a doubly stochastic W, but that of epidemic:4:1 .* use matching:4"):
        run("dsgd-gt")
    with pytest.warns(UserWarning, match="use matching:4 or equidyn:4"):
        run("dsgd")


def test_a_push_on_a_random_graph_is_that_of_its_matrices_also_after_lost_messages():
    graph = topology.equidyn(5)
    listed = topology.from_matrices([graph.weights(t) for t in range(1, 11)])

    def run(on, drop):
        target, engine = torch.arange(5.0, dtype=torch.float64)[:, None], Simulator(on, drop=drop)
        start = torch.zeros(5, 2, dtype=torch.float64)
        return qg.minimize(lambda x, t: x - target, start, "sgp", on, lr=0.1, steps=10, engine=engine).x

    for drop in (0.0, 0.3):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)        # lost messages harm it
            torch.testing.assert_close(run(graph, drop), run(listed, drop), rtol=0, atol=1e-12)


def test_messages_per_edge_need_edges_that_stay():
    def run(name, graph):
        qg.minimize(lambda x, t: x, torch.zeros(2), name, graph, lr=0.1, steps=1)

    for name, instead in (("lt-admm", "ring"), ("push-diging:sums=true", "one-peer-exponential"), ("relaysgd", "tree")):
        with pytest.raises(qg.InputError, match=rf"edges that stay, but matching:4 is drawn .* such as {instead}:4"):
            run(name, "matching:4")
        run(name, f"{instead}:4")
    with pytest.raises(qg.InputError, match="needs a doubly stochastic W, which epidemic:4:1 has not; use equidyn:4"):
        run("sgp", "epidemic:4:1")


@pytest.mark.parametrize(
    ("graph", "rho"), [("matching:16", 8 / 15), ("matching:1000", 500 / 999), ("equidyn:162", 81 / 161)]
)
def test_rho_of_random_pairs_is_exact(graph, rho):
    """Each pair meets alike: the mean of WᵀW has 1/2 on its diagonal, and 1/(2(n − 1)) beside it."""
    assert topology.parse(graph).rho == pytest.approx(rho, abs=1e-12)


def test_rho_of_pairs_in_a_random_rotation_is_that_of_all_draws():
    """All hops and first nodes, one by one."""
    n = 6
    found = {}
    for t in range(1, 2000):
        W = topology.equidyn(n, undirected=True).weights(t)
        found[W.tobytes()] = W
    graph = topology.equidyn(n, undirected=True)
    draws = [np.roll(W, (first, first), axis=(0, 1)) for W in graph.matrices for first in range(n)]
    assert {W.tobytes() for W in draws} == set(found)
    mean = np.mean([(W - 1 / n).T @ (W - 1 / n) for W in draws], axis=0)
    assert graph.rho == pytest.approx(1 - np.linalg.eigvalsh(mean)[-1], abs=1e-12)


def test_a_function_of_the_step_is_a_topology_that_trainings_take():
    graph = topology.from_function(lambda t: topology.matching(4).weights(2 * t), name="twice")
    np.testing.assert_array_equal(graph.weights(3), topology.matching(4).weights(6))
    data = (torch.randn(16, 3), torch.randn(16, 1))
    task = qg.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    one = experiment_of(task, "dsgd", graph, {"epochs": 1, "lr": 0.1})
    assert one.topology.startswith("own:twice@")
    assert parse(one.topology) is graph
    assert count_nodes(one.topology) == 4
    with pytest.raises(qg.InputError, match="each row of W must sum to 1"):
        topology.from_function(lambda t: np.zeros((2, 2)))


# -------------------------------------------------------------------------------------------------- from label counts


def bias(graph, counts):
    """Mean squared distance between the label mixes of the neighbourhoods and of all nodes."""
    shares = counts / counts.sum(axis=1, keepdims=True)
    return np.square(graph.weights() @ shares - shares.mean(axis=0)).sum() / len(counts)


def test_neighbourhoods_from_label_counts_have_the_mix_of_all_nodes():
    rng = np.random.default_rng(0)
    counts = np.stack([rng.multinomial(1000, rng.dirichlet(np.full(10, 0.1))) for _ in range(16)])
    learned = {peers: topology.stl_fw(counts, peers) for peers in (2, 4)}
    for peers, graph in learned.items():
        assert graph.is_doubly_stochastic
        assert graph.peers[1] <= peers
    cliques = topology.d_cliques(counts, 4)
    assert cliques.is_symmetric
    assert cliques.peers[0] == (4 * 12 + 2 * 4) / 16, "four cliques of four nodes, joined by four links"
    assert bias(learned[4], counts) < 0.4 * bias(learned[2], counts) < 0.4 * bias(topology.ring(16), counts)
    assert bias(cliques, counts) < bias(topology.d_cliques(np.ones((16, 2)), 4), counts)


def test_an_experiment_makes_the_graph_from_its_partition_and_says_what_it_reveals():
    data = load("digits")
    experiments = [EXPERIMENT.with_seed(seed) for seed in (0, 1)]
    with pytest.warns(UserWarning, match="would have to reveal these label counts"):
        program = Program(make_task(EXPERIMENT, data), experiments, torch.device("cpu"))
    for one, band in zip(experiments, program.bands.bands, strict=True):
        counts = class_counts(one.resolved.partition(data), data.train.y.numpy(), 10)
        assert band.engine.topology == topology.stl_fw(counts, 3)
    assert count_nodes("every:2/d-cliques:6:3") == 6
    with pytest.raises(qg.InputError, match="needs the label counts of all nodes"):
        replace(EXPERIMENT, partition="whole").resolved.topology_on(data)
    with pytest.raises(qg.InputError, match="needs a whole number, as in stl-fw:16:4"):
        count_nodes("stl-fw")


def test_bad_label_counts():
    for counts, words in (([1, 2], "of each node and class"), ([[1, 2], [0, 0]], "node 1 has none")):
        with pytest.raises(qg.InputError, match=words):
            topology.stl_fw(counts, 1)
    with pytest.raises(qg.InputError, match=r"stl-fw:4:1 is not connected for these label counts; use more peers"):
        topology.stl_fw([[1, 0], [1, 0], [0, 1], [0, 1]], 1)
    with pytest.raises(qg.InputError, match="has 5 nodes, but there are label counts of 4"):
        parse("d-cliques:5:2", np.eye(4))
