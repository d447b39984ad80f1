"""Nodes that count unequally: Σ p_i f_i is minimised, by matrices that keep Σ p_i x_i."""

import numpy as np
import pytest
import torch
from own_tasks import Pairs

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.links import misfit
from quasiglobal.engines.simulator import Simulator
from quasiglobal.runs.agreement import agreement
from quasiglobal.runs.export import export
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import read_run
from quasiglobal.training.experiment import Experiment, from_mapping
from quasiglobal.training.metrics import average, consensus_distance

WEIGHTS = np.array([3, 1, 2, 1])
COPIES = np.repeat(np.arange(4), WEIGHTS)

ADD_UP = {"relaysgd", "lt-admm", "sgp", "qg-sgp", "push-diging", "ab"}
"""Algorithms that are refused."""


class Quadratics:
    """f_i(x) = a_i ‖x − b_i‖²/2 at four nodes, or at a node's copies."""

    generator = torch.Generator().manual_seed(0)
    x0 = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    b = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    a = 1 + torch.rand(4, 1, generator=generator, dtype=torch.float64)

    def gradient(self, x, t):
        of = slice(None) if len(x) == 4 else COPIES
        return self.a[of] * (x - self.b[of])

    def minimum(self, weights):
        c = torch.tensor(weights, dtype=torch.float64)[:, None] * self.a
        return (c * self.b).sum(dim=0) / c.sum()


@pytest.mark.parametrize(
    "name", ["ring:6", "star:5", "complete:4", "base:6:1", "matching:7", "every:3/lazy/torus:9", "social"]
)
def test_mixing_keeps_the_weighted_mean_and_forgets_the_rest(name):
    graph = topology.parse(name)
    weights = np.random.default_rng(0).integers(1, 30, graph.n)
    weighted, p = graph.weighted(weights), weights / weights.sum()
    product = np.eye(graph.n)
    for t in range(1, 4000):
        W = weighted.weights(t)
        assert np.abs(p @ W - p).max() < 1e-14
        assert np.abs(p[:, None] * W - (p[:, None] * W).T).max() < 1e-14
        assert W.min() >= 0
        assert ((W != 0) <= (graph.weights(t) != 0) | np.eye(graph.n, dtype=bool)).all()
        product = W @ product
        if np.abs(product - p).max() < 1e-9:
            break
    assert np.abs(product - p).max() < 1e-9
    equal = graph.weighted(np.full(graph.n, 7.0))
    assert all(np.abs(equal.weights(t) - graph.weights(t)).max() < 1e-15 for t in range(1, 10))


def test_a_topology_knows_its_weighted_properties():
    graph = topology.ring(6).weighted([5, 1, 1, 2, 9, 1])
    W, p = graph.weights(), graph.shares
    eigenvalues = np.sort(np.linalg.eigvals(W).real)
    assert (graph.lambda_min, graph.lambda_2) == pytest.approx((eigenvalues[0], eigenvalues[-2]))
    x = np.random.default_rng(0).normal(size=(6, 1000))
    ratio = [(p[:, None] * (v - p @ v) ** 2).sum(axis=0) for v in (W @ x, x)]
    assert (ratio[0] <= (1 - graph.rho) * ratio[1] + 1e-12).all()
    assert (ratio[0] / ratio[1]).max() > 0.8 * (1 - graph.rho)
    assert graph.is_doubly_stochastic
    assert graph.nu is None
    assert topology.complete(3).weighted([1, 2, 3]).exact_after == 1
    assert graph.lazy().every(2).shares is graph.shares


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs", "ignore:.* meets only some")
@pytest.mark.parametrize("graph", ["ring:4", pytest.param("base:4:1", marks=pytest.mark.slow)])
def test_a_node_that_counts_twice_is_two_nodes_with_its_data(graph):
    """Every algorithm is that of plain nodes: node i stands for weights[i] copies, whose W is doubly stochastic."""
    problem = Quadratics()
    weighted = topology.parse(graph).weighted(WEIGHTS)
    copies = topology.from_matrices([(W / WEIGHTS)[np.ix_(COPIES, COPIES)] for W in weighted.matrices])
    assert copies.is_symmetric
    assert copies.is_doubly_stochastic
    for name in ALGORITHMS:
        if name in ADD_UP:
            with pytest.raises(qg.InputError, match="all nodes count alike; leave out weights"):
                qg.minimize(problem.gradient, problem.x0, name, graph, lr=0.05, steps=15, weights=WEIGHTS)
            continue
        if misfit(qg.algorithm(name).needs, weighted) is not None:          # Exact Diffusion needs a graph that stays
            continue
        found = qg.minimize(problem.gradient, problem.x0, name, graph, lr=0.05, steps=15, weights=WEIGHTS).x
        plain = qg.minimize(problem.gradient, problem.x0[COPIES], name, copies, lr=0.05, steps=15).x
        assert (plain - found[COPIES]).abs().max() < 1e-12, name


@pytest.mark.parametrize("name", ["dsgd-gt", "edm", "qg-dsgdm-n", "gossip-pga"])
def test_the_weighted_optimum_is_found_and_not_the_plain_one(name):
    problem = Quadratics()
    weighted, plain = problem.minimum(WEIGHTS), problem.minimum(np.ones(4))
    assert (weighted - plain).norm() > 0.3
    exact = name in ("dsgd-gt", "edm")
    rate = 0.1 if exact else lambda t: 0.2 / (1 + t / 20)   # others end near it, at a distance of the order of the rate
    x = qg.minimize(problem.gradient, problem.x0, name, "ring:4", rate, 600, weights=WEIGHTS, keep_history=False).x
    mean = torch.tensor(WEIGHTS / WEIGHTS.sum()) @ x
    assert (mean - weighted).norm() < (1e-9 if exact else 0.03)
    if exact:
        assert (x - weighted).norm(dim=1).max() < 1e-9


def test_a_lost_message_returns_its_weight_to_the_receiver():
    graph = topology.ring(4).weighted(WEIGHTS)
    engine, x = Simulator(graph, drop=0.5), Quadratics.x0
    (mixed,) = engine.mix(1, (x,))
    came = engine.faults.arrived(torch.tensor([0]), torch.tensor(1), 4)[0]
    W = torch.from_numpy(graph.weights())
    assert not came.all()
    for i in range(4):
        expected = x[i] + sum(W[i, j] * (x[j] - x[i]) for j in range(4) if came[i, j])
        assert (mixed[i] - expected).abs().max() < 1e-14


def test_a_mean_of_some_nodes_weighs_them():
    x, some = Quadratics.x0, torch.tensor([[1.0], [0.0], [1.0], [0.0]], dtype=torch.float64)
    found = Simulator(topology.ring(4).weighted(WEIGHTS)).mean(x, some)
    assert torch.allclose(found, ((3 * x[0] + 2 * x[2]) / 5).expand(4, -1), rtol=0, atol=1e-14)


def people():
    """Four owners of unequal size whose lines differ: the pooled least squares is the weighted optimum."""
    parts = []
    for k, size in enumerate((60, 12, 30, 18)):
        x = torch.randn(size, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
        parts.append(Pairs(x, (x @ torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64) + 4 * k)[:, None]))
    return parts


def least_squares(parts, weights):
    rows = [(p.x, p.y, w / len(p.x)) for p, w in zip(parts, weights, strict=True)]
    x, y = torch.cat([x for x, _, _ in rows]), torch.cat([y for _, y, _ in rows])
    root = torch.cat([torch.full((len(x), 1), w, dtype=torch.float64) for x, _, w in rows]).sqrt()
    return torch.linalg.lstsq(root * torch.nn.functional.pad(x, (0, 1), value=1.0), root * y).solution.flatten()


def trained(parts, runs=None, **how):
    torch.manual_seed(0)
    task = qg.Task(torch.nn.Linear(3, 1).double(), torch.nn.functional.mse_loss, parts, parts)
    how = {"epochs": 60, "lr": 0.1, "batch": 60, "precision": "fp64", "device": "cpu", "eval_every": 60} | how
    return qg.train(task, "dsgd-gt", "ring:4", runs=runs, **how)


def row(module):
    return torch.cat([module.weight.flatten(), module.bias]).detach()


def test_a_training_with_weights_of_examples_finds_the_optimum_of_the_pooled_data():
    """The batch is all data of the largest node; the others see theirs again, so gradients are nearly exact."""
    parts = people()
    sizes = [len(part) for part in parts]
    pooled, plain = least_squares(parts, sizes), least_squares(parts, [1, 1, 1, 1])
    assert (pooled - plain).norm() > 1
    examples, numbers = (trained(parts, weights=weights) for weights in ("examples", sizes))
    assert (row(examples.average()) - pooled).norm() < 0.1 * (pooled - plain).norm()
    assert torch.equal(row(numbers.average()), row(examples.average()))
    assert numbers.runs[0].experiment.weights == "60,12,30,18"


def test_all_averages_of_models_are_weighted(tmp_path):
    parts = people()
    seen = {}

    class See:
        def on_end(self, run):
            seen["average"] = run.average()

    run = trained(parts, tmp_path, weights="examples", epochs=2, eval_every=1, callbacks=[See()])
    rows, _ = read_run(run.folder).rows()
    p = torch.tensor([60.0, 12.0, 30.0, 18.0], dtype=torch.float64) / 120
    mean = p @ rows["x"]
    assert (mean - rows["x"].mean(dim=0)).norm() > 1e-3
    for module in (run.average(), seen["average"]):
        assert torch.allclose(row(module), mean, rtol=0, atol=1e-14)
    last = run.records[-1]
    x, y = torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts])
    loss = torch.nn.functional.mse_loss(run.average()(x), y).item()
    assert last["test_loss_averaged"] == pytest.approx(loss, rel=1e-6)
    distance = (p * (rows["x"] - mean).square().sum(dim=1)).sum().item()
    assert last["consensus_distance"] == pytest.approx(distance, rel=1e-9)
    assert last["test_loss"] == pytest.approx(np.mean(last["test_loss_nodes"]))
    merged = trained(parts, weights="examples", epochs=2, communication="merge@end")
    assert torch.allclose(row(merged.model(2)), mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("weights", ["4,1,1,2", "equal"])
def test_an_exported_average_is_weighted(tmp_path, weights):
    one = Experiment(model="mlp", topology="ring:4", epochs=1, weights=weights, algorithm="dsgd")
    (run,) = simulate(one, Options(runs=tmp_path, device="cpu"))
    rows, _ = run.rows()
    p = torch.tensor([4.0, 1.0, 1.0, 2.0] if weights != "equal" else [1.0] * 4, dtype=torch.float64)
    mean = (p / p.sum()) @ rows["x"].double()
    state = export(run, "average").state
    found = torch.cat([value.flatten() for value in state.values()]).double()
    assert found.sort().values.sub(mean.sort().values).abs().max() < 1e-6
    assert run.summary.weights == (None if weights == "equal" else [0.5, 0.125, 0.125, 0.25])


def test_weighted_averages_of_counters_are_whole_numbers():
    counters = torch.tensor([[7], [7], [7]])
    assert average(counters, 0, torch.tensor([0.1, 0.2, 0.7])).tolist() == [7]
    x = torch.tensor([[0.0], [4.0]])
    assert consensus_distance(x, torch.tensor([3.0, 1.0])).item() == 3.0


def test_older_experiments_keep_their_names():
    assert Experiment().hash == "45ecf265"
    assert Experiment(weights="equal").hash == Experiment().hash != Experiment(weights="examples").hash
    assert from_mapping({"weights": [1200, 340.5]}, "here").weights == "1200,340.5"


@pytest.mark.parametrize(
    ("graph", "weights", "said"),
    [
        ("exponential:4", [1, 2, 3, 4], "only if links go both ways.* use ring:4, base:4:1 or matching:4"),
        ("epidemic:4:1", [1, 2, 3, 4], "only if links go both ways"),
        ("ring:4", [1, 2, 3], "one weight for each of its 4 nodes, got 3"),
        ("ring:4", [1, 2, 3, 0], "weight of a node must be > 0 and finite, got 0"),
        ("ring:4", [1, 2, 3, float("nan")], "must be > 0 and finite"),
        ("ring:4", "examples", "one number for each node, got 'examples'"),
    ],
)
def test_unsuitable_weights_are_refused(graph, weights, said):
    with pytest.raises(qg.InputError, match=said):
        qg.minimize(None, [0.0], "gossip", graph, 0.1, 1, weights=weights)


def test_unsuitable_settings_are_refused():
    with pytest.raises(qg.InputError, match="unknown weights 'size'; write equal, examples, or a number for each"):
        Experiment(weights="size")
    with pytest.raises(qg.InputError, match="already have weights"):
        topology.ring(3).weighted([1, 2, 3]).weighted([1, 2, 3])
    own = Experiment(classes=("a", "b"), shape=(1, 8, 8), steps=3, mean=(0.5,), std=(0.5,), weights="examples")
    with pytest.raises(qg.InputError, match='agree on numbers, as in weights = "1200,340,80"'):
        agreement(own)
    task = qg.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, (torch.ones(40, 3), torch.ones(40, 1)))
    with pytest.raises(qg.InputError, match="give weights=…"):
        qg.train(task, "dsgd", topology.ring(4).weighted([1, 2, 3, 4]), epochs=1)
