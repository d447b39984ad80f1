"""Properties that hold for any graph, doubly stochastic W, size and learning-rate schedule."""

import warnings

import networkx as nx
import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import quasiglobal as qg
from quasiglobal.checks import OverwritingSimulator
from quasiglobal.engines.simulator import Simulator
from quasiglobal.topology import from_graph, from_matrices

settings.register_profile("ours", deadline=None, max_examples=25, derandomize=True)
settings.load_profile("ours")

seeds = st.integers(0, 2**31)


@st.composite
def graphs(draw, max_n=9):
    """Connected graphs: a random tree with additional edges."""
    n = draw(st.integers(2, max_n))
    graph = nx.random_labeled_tree(n, seed=draw(seeds))
    pairs = [(i, j) for i in range(n) for j in range(i) if not graph.has_edge(i, j)]
    graph.add_edges_from(draw(st.lists(st.sampled_from(pairs), max_size=2 * n)) if pairs else [])
    return from_graph(graph)


@st.composite
def directed(draw, max_n=7):
    """Doubly stochastic, directed, time-varying W: convex combinations of permutations, one of them a cycle."""
    n, period = draw(st.integers(2, max_n)), draw(st.integers(1, 3))
    rng = np.random.default_rng(draw(seeds))

    def matrix():
        shares = rng.dirichlet(np.ones(4))
        turns = [np.roll(np.eye(n), 1, axis=0)] + [np.eye(n)[rng.permutation(n)] for _ in range(3)]
        return sum(share * turn for share, turn in zip(shares, turns, strict=True))

    return from_matrices([matrix() for _ in range(period)])


topologies = st.one_of(graphs(), directed())
names = st.sampled_from([name for name, a in qg.ALGORITHMS.items() if not (a.needs.tree or a.needs.undirected)])
schedules = st.lists(st.sampled_from([0.1, 0.05, 0.01, 0.001]), min_size=3, max_size=12)


def problem(n, d, seed):
    rng = np.random.default_rng(seed)
    centre, x0 = torch.from_numpy(rng.standard_normal((n, d))), torch.from_numpy(rng.standard_normal((n, d)))
    return lambda x, t: x - centre + torch.sin(x * t), x0


def run(gradient, x0, name, graph, rates, **options):
    assume(graph.period == 1 or not qg.ALGORITHMS[name].needs.lazy)     # Exact Diffusion is refused on changing graphs
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # D² is run on any W, on purpose
        return qg.minimize(gradient, x0, name, graph, lambda t: rates[t - 1], len(rates), **options)


def close(a, b):
    # A diverging run amplifies rounding too, hence the relative tolerance.
    torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-9)


@given(topologies)
def test_mixing_equals_the_matrix_product_and_keeps_the_mean(graph):
    v = torch.randn(graph.n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in range(1, graph.period + 1):
        (mixed,) = Simulator(graph).mix(t, (v,))
        torch.testing.assert_close(mixed, torch.from_numpy(graph.weights(t)) @ v)
        torch.testing.assert_close(mixed.mean(dim=0), v.mean(dim=0))


@given(topologies, seeds)
def test_rho_bounds_one_period_of_mixing(graph, seed):
    x = np.random.default_rng(seed).standard_normal((graph.n, 3))
    x -= x.mean(axis=0)
    shrunk = np.mean([np.linalg.norm(graph.weights(t) @ x) ** 2 for t in range(1, graph.period + 1)])
    assert shrunk <= (1 - graph.rho) * np.linalg.norm(x) ** 2 + 1e-9
    assert 0 <= graph.rho <= 1


@given(graphs())
def test_metropolis_weights_are_symmetric_and_respect_the_graph(graph):
    assert graph.is_symmetric
    assert graph.is_doubly_stochastic
    assert graph.lambda_min > -1
    assert graph.lambda_2 < 1
    assert graph.lazy().lambda_min >= -1e-12


@given(names, topologies, st.integers(1, 6), seeds, schedules)
@settings(max_examples=60)
def test_storage_is_the_engines_business(name, graph, d, seed, rates):
    gradient, x0 = problem(graph.n, d, seed)
    plain = run(gradient, x0, name, graph, rates)
    overwritten = run(gradient, x0, name, graph, rates, engine=OverwritingSimulator(graph))
    assert plain.history.equal(overwritten.history)


@given(names, topologies, st.integers(1, 6), seeds, schedules, st.data())
@settings(max_examples=60)
def test_resume_is_bit_exact_wherever_it_stopped(name, graph, d, seed, rates, data):
    gradient, x0 = problem(graph.n, d, seed)
    whole = run(gradient, x0, name, graph, rates)
    stop = data.draw(st.integers(0, len(rates)))
    half = run(gradient, x0, name, graph, rates[:stop])
    assert run(gradient, x0, name, graph, rates, resume=half).history.equal(whole.history)


@given(names, topologies, st.integers(1, 6), seeds, schedules)
@settings(max_examples=60)
def test_renaming_the_nodes_renames_the_result(name, graph, d, seed, rates):
    gradient, x0 = problem(graph.n, d, seed)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(graph.n))
    back = order.argsort()
    index = order.numpy()
    renamed = from_matrices([W[index][:, index] for W in graph.matrices])
    moved = run(lambda x, t: gradient(x[back], t)[order], x0[order], name, renamed, rates)
    close(moved.history[:, back], run(gradient, x0, name, graph, rates).history)


@given(names, topologies, st.integers(1, 6), seeds, schedules)
@settings(max_examples=60)
def test_runs_as_rows_equal_runs_alone(name, graph, d, seed, rates):
    (g1, x1), (g2, x2) = problem(graph.n, d, seed), problem(graph.n, d, seed + 1)
    n = graph.n
    both = run(
        lambda x, t: torch.cat([g1(x[:n], t), g2(x[n:], t)]), torch.cat([x1, x2]), name, graph, rates,
        engine=Simulator(graph, seeds=(0, 0)),
    )
    close(both.history[:, :n], run(g1, x1, name, graph, rates).history)
    close(both.history[:, n:], run(g2, x2, name, graph, rates).history)


@given(names, topologies, st.integers(2, 6), seeds, schedules, st.data())
def test_columns_that_are_not_shared_never_leave_the_node(name, graph, d, seed, rates, data):
    if "adam" in name or name in ("gt-nsgdm", "dsgd-clip", "dfedsam"):
        return      # their norms are over the whole model, shared or not
    shared = data.draw(st.integers(1, d - 1))
    gradient, x0 = problem(graph.n, d, seed)
    together = run(gradient, x0, name, graph, rates, engine=Simulator(graph, shared=shared)).history
    alone = run(gradient, x0, name, graph, rates, engine=Simulator(graph, shared=0)).history
    everybody = run(gradient, x0, name, graph, rates).history
    close(together[:, :, shared:], alone[:, :, shared:])
    close(together[:, :, :shared], everybody[:, :, :shared])


@pytest.mark.parametrize("name", [name for name, a in qg.ALGORITHMS.items() if a.needs.keeps_mean])
@given(graph=topologies, seed=seeds, rates=schedules)
@settings(max_examples=8)
def test_the_mean_stays_without_gradients(name, graph, seed, rates):
    _, x0 = problem(graph.n, 3, seed)
    history = run(None, x0, name, graph, rates).history
    means = history.mean(dim=1)
    largest = max(1.0, float(history.abs().max()))      # a diverging run, as of D² on any W, rounds in proportion
    torch.testing.assert_close(means, means[:1].expand_as(means), rtol=0, atol=1e-9 * largest)
