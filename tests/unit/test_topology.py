import networkx as nx
import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.topology import from_graph, from_matrices, parse
from quasiglobal.topology.parsing import FROM_LABELS, KINDS

NAMES = [
    "ring:3", "ring:16", "torus:9", "torus:16", "complete:1", "complete:4", "star:2", "star:5", "social",
    "one-peer-exponential:2", "one-peer-exponential:6", "one-peer-exponential:16", "every:4/ring:16",
    "lazy/torus:16", "every:3/one-peer-exponential:4", "chain:2", "tree:6", "double-trees:6", "hypercube:8",
    "exponential:6", "erdos-renyi:12:0.4", "erdos-renyi:12:0.4:seed=3", "small-world:12:4:0.2", "k-regular:9:4",
    "base:7:2",
]


@pytest.mark.parametrize("name", NAMES)
def test_a_topology_has_its_name_and_doubly_stochastic_weights(name):
    graph = parse(name)
    assert str(graph) == name
    assert graph.is_doubly_stochastic
    for t in range(1, 2 * graph.period + 1):
        W = graph.weights(t)
        np.testing.assert_allclose(W.sum(axis=1), 1, atol=1e-12)
        np.testing.assert_array_equal(W, graph.weights(t + graph.period))


@pytest.mark.parametrize("name", KINDS | FROM_LABELS)
def test_a_kind_of_topology_is_public_under_its_name(name):
    constructor = name.replace("-", "_")
    assert constructor in topology.__all__
    assert getattr(topology, constructor) is (KINDS | FROM_LABELS)[name].make


def test_ring_and_torus_weigh_neighbours_and_self_alike():
    assert set(topology.ring(5).weights()[0].round(12)) == {0, round(1 / 3, 12)}
    torus = topology.torus(16).weights()
    assert ((torus > 0).sum(axis=1) == 5).all()
    np.testing.assert_allclose(torus[torus > 0], 1 / 5)


def test_complete_and_star():
    np.testing.assert_allclose(topology.complete(4).weights(), 1 / 4)
    star = topology.star(5)
    assert star.neighbours(0) == (1, 2, 3, 4)
    assert star.neighbours(3) == (0,)
    np.testing.assert_allclose(star.weights()[3, [0, 3]], [1 / 5, 4 / 5])


def test_social_network_is_the_papers():
    graph = topology.social()
    assert (graph.n, len(graph.edges)) == (32, 89)
    assert graph.lambda_2 == pytest.approx(0.918, abs=5e-4)
    assert graph.lambda_min == pytest.approx(-0.434, abs=5e-4)


@pytest.mark.parametrize("n", [2, 5, 8, 16])
def test_one_peer_exponential_hears_from_the_node_two_to_the_k_behind(n):
    graph = topology.one_peer_exponential(n)
    assert graph.period == int(np.ceil(np.log2(n)))
    for t in range(1, 2 * graph.period + 1):
        hop = 2 ** ((t - 1) % graph.period)
        for i in range(n):
            assert graph.neighbours(i, t) == ((i - hop) % n,)
            assert graph.weights(t)[i, i] == graph.weights(t)[i, (i - hop) % n] == 0.5


def test_one_peer_exponential_of_a_power_of_two_averages_exactly_in_a_period():
    graph = topology.one_peer_exponential(8)
    product = np.linalg.multi_dot([graph.weights(t) for t in (3, 2, 1)])
    np.testing.assert_allclose(product, 1 / 8)


def test_spectral_facts():
    assert topology.ring(16).lambda_min == pytest.approx(-1 / 3)
    assert topology.torus(16).lambda_min == pytest.approx(-3 / 5)
    assert topology.one_peer_exponential(8).rho == pytest.approx(1 / 3)
    assert topology.complete(7).rho == pytest.approx(1)
    assert topology.ring(16).rho == pytest.approx(1 - topology.ring(16).lambda_2 ** 2)
    assert topology.ring(16).largest_beta == pytest.approx(0.0047, abs=5e-5)
    beta = topology.social().largest_beta
    assert beta / (1 - beta) == pytest.approx(topology.social().rho / 21)
    assert parse("every:4/ring:16").rho == pytest.approx(topology.ring(16).rho / 4)


def test_rho_of_a_matrix_that_is_not_symmetric_uses_the_singular_value():
    W = (np.eye(5) + np.roll(np.eye(5), 1, axis=0)) / 2
    assert from_matrices([W]).rho == pytest.approx(1 - np.linalg.svd(W)[1][1] ** 2)
    assert from_matrices([W]).lambda_min is None


def test_eigenvalues_and_rho_are_absent_where_they_are_not_defined():
    changing = topology.one_peer_exponential(4)
    assert changing.lambda_2 is None
    assert changing.lambda_min is None
    rows_only = from_matrices([[[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0.5, 0, 0.5]]])
    assert not rows_only.is_doubly_stochastic
    assert rows_only.rho is None
    assert rows_only.largest_beta is None


def test_bytes_a_step():
    assert topology.ring(16).bytes_per_step(100) == 2 * 4 * 100
    assert topology.one_peer_exponential(16).bytes_per_step(100) == 4 * 100
    assert parse("every:4/ring:16").bytes_per_step(100) == 2 * 4 * 100 / 4
    assert topology.social().bytes_per_step(1) == pytest.approx(4 * 2 * 89 / 32)
    assert topology.ring(16).bytes_per_step(100, bytes_per_number=2) == 2 * 2 * 100


def test_every_gossips_each_kth_step():
    graph = parse("every:3/ring:4")
    for t in (1, 2, 4, 5):
        np.testing.assert_array_equal(graph.weights(t), np.eye(4))
    for t in (3, 6):
        np.testing.assert_array_equal(graph.weights(t), topology.ring(4).weights())


def test_every_of_a_changing_topology_goes_through_all_its_matrices():
    graph, base = parse("every:2/one-peer-exponential:8"), topology.one_peer_exponential(8)
    for k in (1, 2, 3):
        np.testing.assert_array_equal(graph.weights(2 * k), base.weights(k))


def test_lazy_has_no_negative_eigenvalue():
    W = topology.ring(16).weights()
    np.testing.assert_allclose(parse("lazy/ring:16").weights(), (np.eye(16) + W) / 2)
    assert parse("lazy/social").lambda_min > 0


def test_weights_are_the_callers_own():
    graph = topology.ring(4)
    graph.weights()[0, 0] = 7
    assert graph.weights()[0, 0] == pytest.approx(1 / 3)


def test_from_graph_gives_metropolis_weights_in_the_graphs_order():
    graph = nx.Graph([("b", "a"), ("b", "c"), ("b", "d")])
    W = from_graph(graph).weights()
    np.testing.assert_allclose(W[0], [1 / 4, 1 / 4, 1 / 4, 1 / 4])
    np.testing.assert_allclose(W[1], [1 / 4, 3 / 4, 0, 0])


def test_from_directed_graph_takes_given_weights():
    graph = nx.DiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.3), (1, 2, 0.4), (2, 0, 0.5)])
    W = from_graph(graph).weights()
    np.testing.assert_allclose(W, [[0.5, 0, 0.5], [0.3, 0.7, 0], [0, 0.4, 0.6]])


def test_edge_list_file(tmp_path):
    path = tmp_path / "graph.edgelist"
    path.write_text("# a path of twelve\n" + "".join(f"{i} {i + 1}\n" for i in range(11)))
    graph = parse(f"file:{path}")
    assert graph.n == 12
    assert graph.neighbours(10) == (9, 11)
    path.write_bytes("\ufeff0 1\n2 1 # the last\n".encode())
    assert parse(f"file:{path}").neighbours(1) == (0, 2)
    path.write_text("a b 0.5\nb c 0.25\n")
    np.testing.assert_allclose(
        parse(f"file:{path}").weights(), [[0.5, 0.5, 0], [0.5, 0.25, 0.25], [0, 0.25, 0.75]]
    )


BAD = {
    "ring:2": "ring needs n >= 3, got 2; use complete(2)",
    "ring:-1": "ring needs n >= 3, got -1; use ring(3)",
    "torus:15": "torus needs n = side * side with side >= 3, got 15; use torus(16)",
    "torus:4": "got 4; use torus(9)",
    "complete:0": "complete needs n >= 1, got 0",
    "star:1": "use complete(1)",
    "one-peer-exponential:1": "use complete(1)",
    "rign:16": "did you mean 'ring'?",
    "": "a topology is missing in ''",
    "every:2": "a topology is missing in ''",
    "lazy/": "a topology is missing in ''",
    "lazy:ring:4": "a topology is missing in 'lazy:ring:4'",
    "social:3": "social has its own 32 nodes, got 'social:3'; write social",
    "ring:1000000": "ring has at most 10000 nodes here, got 1000000",
    "torus:1000000000000": "torus has at most 10000 nodes",
    "every:1000000/ring:16": "at most 10000 in a period, got 1000000",
    "ring": "needs a whole number",
    "ring:many": "needs a whole number",
    "every:0/ring:4": "every needs a whole number of steps >= 1, and at most 10000 in a period, got 0",
    "every:x/ring:4": "needs a whole number",
    "hypercube:12": "hypercube needs n = 2^p, got 12; use hypercube(16)",
    "base:16": "topology 'base:16' needs a whole number of nodes and its other numbers; write base:16:1",
    "base:4:0": "base needs a number of peers, a whole number from 1 to 3000, got 0",
    "ring:16:2": "ring takes 1 number, got 'ring:16:2'; write ring:16",
    "k-regular:15:3": "k-regular needs an even number n * peers, got 15 * 3; use one peer or node more",
    "small-world:16:3:0.1": "small-world needs an even number of peers, got 3; use 2",
    "erdos-renyi:16:0.01": "is not connected in any of 1000 draws; use a larger probability, such as 0.35",
    "erdos-renyi:16:p": "topology 'erdos-renyi:16:p' needs a number for chance, as in erdos-renyi:16:0.3",
    "epidemic:4:9": "epidemic needs a number of peers, a whole number from 1 to 3, got 9",
    "equidyn:8:sed=1": "unknown option of equidyn 'sed'; did you mean 'seed'?",
    "equidyn:8:undirected=yes": "undirected must be true or false, got 'yes'",
    "matching:8:seed=-1": "matching needs a seed",
    "every:0/matching:8": "every needs a whole number of steps >= 1, got 0",
    "stl-fw:16:4": "stl-fw:16:4 is made from the nodes' label counts, which only a training knows; use it in qg train",
    "file:/nowhere/graph": "cannot read the edge list /nowhere/graph: No such file",
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_name_is_one_sentence_with_the_remedy(name):
    with pytest.raises(qg.InputError) as caught:
        parse(name)
    assert BAD[name] in str(caught.value)
    assert "\n" not in str(caught.value)


def bad_matrix_cases():
    return {
        "each row of W must sum to 1, but row 1 sums to 0.9": [[[0.5, 0.5], [0.4, 0.5]]],
        "falls into 2 parts": [np.eye(2)],
        "square": [[[0.5, 0.5]]],
        "one size": [np.full((2, 2), 0.5), np.full((3, 3), 1 / 3)],
        "not a number": [[[np.nan, 1], [0.5, 0.5]]],
        "square matrix, got shape \\[\\]": [1.0],
        "at least one W": [],
        "array of numbers": [[["a", "b"], ["c", "d"]]],
    }


@pytest.mark.parametrize("words", bad_matrix_cases())
def test_a_bad_matrix_is_one_sentence(words):
    with pytest.raises(qg.InputError, match=words):
        from_matrices(bad_matrix_cases()[words])


def test_senders_of_a_directed_graph_without_weights_count_alike():
    """Node 0 receives from 2, node 1 from 0, node 2 from 1 and 0; a push shares a node's value among its receivers."""
    graph = from_graph(nx.DiGraph([(0, 1), (1, 2), (2, 0), (0, 2), (0, 0)]))
    expected = [[1 / 2, 0, 1 / 2], [1 / 2, 1 / 2, 0], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(graph.weights(), expected)
    target = torch.tensor([[0.0], [3.0], [9.0]], dtype=torch.float64)
    result = qg.minimize(lambda x, t: x - target, target[0], "push-diging", graph, lr=0.05, steps=2000)
    torch.testing.assert_close(result.x, torch.full_like(target, 4.0))


def test_one_way_streets_are_not_connected():
    with pytest.raises(qg.InputError, match="not connected"):
        from_matrices([[[1, 0], [0.5, 0.5]]])


def test_bad_graphs():
    with pytest.raises(qg.InputError, match="all edges need a weight: edge 0 -> 1 of graph has no 'weight'"):
        from_graph(nx.DiGraph([(0, 1), (1, 0, {"weight": 0.5})]))
    with pytest.raises(qg.InputError, match="falls into 2 parts"):
        from_graph(nx.Graph([(0, 1), (2, 3)]))
    with pytest.raises(qg.InputError, match="no nodes"):
        from_graph(nx.Graph())


def test_float32_weights_are_mended_on_the_diagonal():
    W = topology.social().weights().astype(np.float32)
    np.testing.assert_allclose(from_matrices([W]).weights(), topology.social().weights(), atol=1e-6)
    np.testing.assert_allclose(from_matrices(W).weights().sum(axis=1), 1, atol=1e-15)


def test_parallel_edges_add_up_and_self_loops_count_once():
    graph = nx.MultiDiGraph()
    graph.add_weighted_edges_from([(0, 1, 0.2), (0, 1, 0.3), (1, 0, 0.5)])
    np.testing.assert_allclose(from_graph(graph).weights(), 0.5)
    loop = nx.Graph([(0, 1, {"weight": 0.25}), (0, 0, {"weight": 0.75})])
    np.testing.assert_allclose(from_graph(loop, "weight").weights(), [[0.75, 0.25], [0.25, 0.75]])


def test_negative_weights_keep_the_mean_but_are_not_doubly_stochastic(tmp_path):
    path = tmp_path / "heavy"
    path.write_text("0 1 1\n1 2 1\n")
    graph = parse(f"file:{path}")
    assert graph.keeps_mean
    assert not graph.is_doubly_stochastic
    for n in (21, 22):
        W = (np.ones((n, n)) - np.eye(n)) / (n - 1)
        assert from_matrices([W + np.diag(1 - W.sum(axis=1))]).is_doubly_stochastic


def test_your_own_by_its_path():
    assert parse("quasiglobal.topology:social").n == 32
    with pytest.raises(qg.InputError, match="is not a Topology"):
        parse("quasiglobal.topology.mixing:TOLERANCE")


def test_a_graph_is_a_topology():
    assert parse(nx.path_graph(5)).n == 5
    for wrong in (None, 4, topology.ring):
        with pytest.raises(qg.InputError, match="a topology is a name"):
            parse(wrong)
    for make in (topology.ring, topology.torus, topology.complete, topology.star, topology.one_peer_exponential):
        with pytest.raises(qg.InputError, match="whole number of nodes"):
            make(9.0)


MALFORMED = ["0\n", "0 1\n2\n", "0,1,2,3\n", "0 1 2 3 4\n", "0 1 heavy\n", "0 1 .2\n1 0 .4", "\x00\xff\n", ""]


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_edge_list_is_one_sentence(tmp_path, text):
    path = tmp_path / "graph"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(qg.InputError, match=str(path)):
        parse(f"file:{path}")


def test_steps_count_from_one():
    with pytest.raises(qg.InputError, match="steps count from 1"):
        topology.ring(4).weights(0)


def test_topologies_are_compared_by_their_matrices():
    given = topology.from_matrices([topology.ring(4).weights()])
    assert given == topology.from_matrices([topology.ring(4).weights()] * 3)
    assert given == topology.ring(4)
    assert len({given, topology.ring(4), topology.parse("every:1/ring:4")}) == 1
    assert given != topology.from_matrices([topology.ring(4).lazy().weights()])
    assert topology.ring(4) != topology.parse("every:2/ring:4")
    assert topology.ring(4) != "ring:4"
