"""Lost messages and absent nodes in the simulator: seeded, resumable, equal to a loop over the nodes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.data.sources import load
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.draws import WINDOW, Faults
from quasiglobal.engines.simulator import Simulator
from quasiglobal.runs import distributed
from quasiglobal.runs.building import make_task
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import read_run
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program

N, D, STEPS, LR = 8, 3, 50, 0.1
GRAPH = qg.topology.ring(N)
TARGET = torch.from_numpy(np.random.default_rng(0).normal(size=(N, D)))
NEIGHBOURLY = [name for name, algorithm in ALGORITHMS.items() if not traffic(algorithm).means]
BEARING = [name for name in NEIGHBOURLY if ALGORITHMS[name].needs.loss != "refused"]


def gradient(x, t):
    return x - TARGET.repeat(len(x) // N, 1)


def run(algorithm="dsgd", topology=GRAPH, steps=STEPS, seeds=(0,), resume=None, **faults):
    engine = Simulator(topology, seeds=seeds, **faults)
    x0 = torch.zeros(D, dtype=torch.float64)
    return qg.minimize(gradient, x0, algorithm, topology, LR, steps, engine=engine, resume=resume)


def error(algorithm, **faults):
    """Distance of the farthest node to the minimum after 400 steps."""
    try:
        return (run(algorithm, steps=400, **faults).x - TARGET.mean(dim=0)).norm(dim=1).max()
    except qg.Diverged:
        return torch.inf


# --------------------------------------------------------------------------------- reference draws in Python integers

BITS = 2**64 - 1


def splitmix(*numbers):
    """splitmix64's output function over a chain of numbers, in unsigned arithmetic."""
    key = 0
    for number in numbers:
        key = (key + number + 0x9E3779B97F4A7C15) & BITS
        key = (key ^ key >> 30) * 0xBF58476D1CE4E5B9 & BITS
        key = (key ^ key >> 27) * 0x94D049BB133111EB & BITS
        key = key ^ key >> 31
    return key


def happens(probability, *numbers):
    return (splitmix(*numbers) >> 11) < round(probability * 2**53)


def comes(faults, seed, t, i, j):
    away = [happens(faults.churn, seed, 2, (t - 1) // WINDOW, node) for node in (i, j)]
    return not any(away) and not happens(faults.drop, seed, 1, t, i, j)


@pytest.mark.parametrize("faults", [Faults(drop=0.3), Faults(churn=0.3), Faults(drop=0.2, churn=0.2)], ids=str)
def test_the_draws_are_splitmix_of_seed_step_receiver_and_sender(faults):
    seeds = (0, 7, 2**62)
    for t in (1, 20, 21, 1000):
        mask = faults.arrived(torch.tensor(seeds), torch.tensor(float(t)), N)
        expected = [[[comes(faults, seed, t, i, j) for j in range(N)] for i in range(N)] for seed in seeds]
        assert mask.tolist() == expected


@pytest.mark.parametrize("topology", ["ring:8", "one-peer-exponential:8", "every:2/star:8"])
@pytest.mark.parametrize("faults", [{"drop": 0.3}, {"churn": 0.4}, {"drop": 0.2, "churn": 0.2}], ids=str)
def test_a_lossy_run_is_a_loop_over_nodes_and_what_came(topology, faults):
    """Tolerance 1e-12: sums in another order."""
    graph, seed = qg.topology.parse(topology), 5
    result = run(topology=graph, seeds=(seed,), **faults)
    x = np.zeros((N, D))
    for t in range(1, STEPS + 1):
        W, half = graph.weights(t), x - LR * (x - TARGET.numpy())
        x = half.copy()
        for i in range(N):
            for j in range(N):
                if i != j and W[i, j] and comes(Faults(**faults), seed, t, i, j):
                    x[i] += W[i, j] * (half[j] - half[i])
        np.testing.assert_allclose(result.history[t].numpy(), x, rtol=0, atol=1e-12)


# -------------------------------------------------------------------------------------------- properties of the faults

@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.filterwarnings("ignore:.*needs every eigenvalue")
def test_without_faults_nothing_changes(algorithm):
    graph = qg.topology.star(N) if algorithm == "relaysgd" else GRAPH
    plain = qg.minimize(gradient, torch.zeros(D, dtype=torch.float64), algorithm, graph, LR, 15)
    assert run(algorithm, graph, steps=15, drop=0.0, churn=0.0).history.equal(plain.history)


def test_the_same_seed_draws_the_same_faults_and_another_others():
    assert run(drop=0.3, churn=0.1).history.equal(run(drop=0.3, churn=0.1).history)
    assert not run(drop=0.3).history.equal(run(drop=0.3, seeds=(1,)).history)
    assert not run(drop=0.3).history.equal(run().history)


def test_each_run_of_a_program_draws_from_its_own_seed():
    """Tolerance 1e-14: one matrix product per run versus a batched product."""
    together = run("qg-dsgdm-n", seeds=(3, 4), drop=0.3, churn=0.1).x
    apart = torch.cat([run("qg-dsgdm-n", seeds=(seed,), drop=0.3, churn=0.1).x for seed in (3, 4)])
    torch.testing.assert_close(together, apart, rtol=0, atol=1e-14)


@pytest.mark.parametrize("algorithm", BEARING)
@pytest.mark.filterwarnings("ignore:.*needs every eigenvalue", "ignore:.*(loses its exactness|is cut off)")
def test_a_resumed_run_draws_the_same_faults(algorithm):
    graph = qg.topology.star(N) if algorithm == "relaysgd" else GRAPH
    whole = run(algorithm, graph, drop=0.3, churn=0.1)
    half = run(algorithm, graph, steps=23, drop=0.3, churn=0.1)
    assert run(algorithm, graph, drop=0.3, churn=0.1, resume=half).history.equal(whole.history)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_nodes_that_agree_stay_bit_for_bit_where_they_are(dtype):
    engine = Simulator(qg.topology.torus(16), seeds=(0, 1), drop=0.4, churn=0.2)
    x = torch.linspace(0.1, 0.9, 7, dtype=dtype).expand(32, -1)
    for t in range(1, 100):
        assert engine.mix(t, (x,))[0].equal(x)


def test_the_nodes_still_agree_in_the_end_but_their_mean_has_moved():
    x0 = torch.from_numpy(np.random.default_rng(1).normal(size=(N, D)))
    x = qg.minimize(None, x0, "gossip", GRAPH, 1.0, 500, engine=Simulator(GRAPH, drop=0.3)).x
    torch.testing.assert_close(x, x[:1].expand_as(x), rtol=0, atol=1e-12)
    assert (x.mean(dim=0) - x0.mean(dim=0)).norm() > 1e-3
    assert (x >= x0.amin(dim=0)).all()
    assert (x <= x0.amax(dim=0)).all()


def test_a_node_that_is_away_keeps_to_itself_for_a_window():
    faults, seeds = Faults(churn=0.3), torch.tensor([0])
    for window in range(20):
        steps = range(window * WINDOW + 1, (window + 1) * WINDOW + 1)
        masks = torch.cat([faults.arrived(seeds, torch.tensor(t), N) for t in steps])
        assert masks.eq(masks[0]).all()
        away = [happens(0.3, 0, 2, window, i) for i in range(N)]
        assert not masks[0, away].any()
        assert not masks[0][:, away].any()
        here = [not gone for gone in away]
        assert masks[0][here][:, here].all()


@pytest.mark.parametrize("p", [0.05, 0.3, 0.9])
def test_faults_are_as_frequent_as_they_should_be(p):
    """Within 5 standard deviations: lost messages over 100 steps, absent nodes over 100 windows."""
    seeds, n, steps = torch.arange(10), 16, 100
    lost = [~Faults(drop=p).arrived(seeds, torch.tensor(t), n) for t in range(1, steps + 1)]
    share, count = torch.stack(lost).double().mean(), steps * lost[0].numel()
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5
    masks = (Faults(churn=p).arrived(seeds, torch.tensor(t * WINDOW), n) for t in range(1, steps + 1))
    away = [~mask.diagonal(dim1=1, dim2=2) for mask in masks]          # a present node receives from itself
    share, count = torch.stack(away).double().mean(), steps * away[0].numel()
    assert abs(share - p) < 5 * (p * (1 - p) / count) ** 0.5


def test_the_two_directions_of_an_edge_are_lost_apart():
    mask = Faults(drop=0.5).arrived(torch.arange(10), torch.tensor(1), 16)
    assert not mask.equal(mask.transpose(1, 2))


def test_the_draws_follow_the_tensor_so_that_a_captured_step_draws_anew():
    engine, algorithm = Simulator(GRAPH, drop=0.5), qg.algorithm("dsgd")
    x, lr = TARGET, torch.tensor(LR, dtype=torch.float64)

    def step(t, time):
        time = torch.tensor(time, dtype=torch.float64)
        return engine.step(
            algorithm, x, torch.zeros_like(x), {}, t=t, time=time, lr=lr, full_gradient=torch.zeros_like
        )[0]

    assert step(2, 9.0).equal(step(9, 9.0))
    assert not step(2, 9.0).equal(step(2, 2.0))
    assert engine.mix(9, (x,))[0].equal(step(9, 9.0))


# ----------------------------------------------------------------------------------------------- unsupported settings

@pytest.mark.parametrize("algorithm", sorted(set(ALGORITHMS) - set(NEIGHBOURLY)))
def test_an_exact_mean_is_refused(algorithm):
    with pytest.raises(qg.InputError, match=r"exact mean .* needs every node"):
        run(algorithm, drop=0.1)


def test_a_method_that_collapses_is_refused():
    assert set(NEIGHBOURLY) - set(BEARING) == {"decentlam", "qg-gut", "qg-sgp"}
    for faults in ({"drop": 0.1}, {"churn": 0.1}):
        with pytest.raises(qg.InputError, match="DecentLaM collapses when messages are lost"):
            run("decentlam", **faults)
    with pytest.raises(qg.InputError, match="use it without drop and churn"):
        training(replace(SHORT, algorithm="decentlam"))


@pytest.mark.parametrize("algorithm", [name for name in NEIGHBOURLY if ALGORITHMS[name].needs.loss == "harmed"])
@pytest.mark.filterwarnings("ignore:.*needs every eigenvalue")
def test_methods_that_one_sided_loss_harms_say_so(algorithm):
    with pytest.warns(UserWarning, match="loses its exactness when messages are lost in one direction"):
        run(algorithm, steps=1, drop=0.1)
    if ALGORITHMS[algorithm].needs.absence == "tolerated":
        run(algorithm, steps=1, churn=0.1)              # an absent node leaves W doubly stochastic


@pytest.mark.parametrize("algorithm", ["sgp", "push-diging", "push-diging:sums=true", "ab"])
@pytest.mark.filterwarnings("ignore:.*when a node is cut off")
def test_methods_that_absent_nodes_harm_say_so(algorithm):
    with pytest.warns(UserWarning, match="misses the minimum, or diverges, when a node is cut off for many steps"):
        run(algorithm, steps=1, churn=0.1)
    assert error(algorithm, churn=0.1) > 1e-3


@pytest.mark.parametrize("algorithm", ["dsgd-gt", "edm", "lt-admm:tau=1,beta_a=0.1"])
def test_methods_that_absent_nodes_do_not_harm_reach_the_minimum(algorithm):
    assert error(algorithm, churn=0.1) < 1e-6


@pytest.mark.parametrize("name", ["drop", "churn"])
@pytest.mark.parametrize("value", [-0.1, 1.0, float("nan")])
def test_a_probability_is_in_its_range(name, value):
    for make in (Experiment, lambda **faults: Simulator(GRAPH, **faults)):
        with pytest.raises(qg.InputError, match=f"{name} must be a probability in"):
            make(**{name: value})


def test_processes_do_not_simulate_faults(tmp_path):
    with pytest.raises(qg.InputError, match="use --engine simulator"):
        distributed.train_over_processes(Experiment(drop=0.1), Options(runs=tmp_path, engine="distributed"))


# -------------------------------------------------------------------------------------------------------- training

SHORT = Experiment(model="mlp", topology="ring:4", epochs=2, lr=0.05, partition="iid", batch=64, drop=0.3, churn=0.2)


def training(experiment, seeds=(0,)):
    experiments = [experiment.with_seed(seed) for seed in seeds]
    return Program(make_task(experiment, load("digits")), experiments, torch.device("cpu"))


def test_a_training_with_faults_resumes_bit_for_bit_and_is_another_one_than_without():
    whole, first, second = (training(SHORT, (0, 1)) for _ in range(3))
    spared = training(replace(SHORT, drop=0.0, churn=0.0), (0, 1))
    for _ in range(2):
        whole.train_epoch()
        spared.train_epoch()
    first.train_epoch()
    second.restore([first.checkpoint(0), first.checkpoint(1)])
    second.train_epoch()
    assert second.state.x.equal(whole.state.x)
    assert not spared.state.x.equal(whole.state.x)


@pytest.mark.parametrize("algorithm", ["sgdm-n", "slowmo", "mimelite"])
def test_a_training_that_needs_exact_means_is_refused_before_it_begins(algorithm):
    with pytest.raises(qg.InputError, match="exact mean"):
        training(replace(SHORT, algorithm=algorithm))


def test_runs_from_before_there_were_faults_keep_their_names():
    folders = sorted((Path(__file__).parents[2] / "docs" / "results" / "compiled-route").iterdir())
    assert len(folders) == 6
    for folder in folders:
        experiment = read_run(folder).experiment
        assert experiment.hash == folder.name.rpartition("-")[2]
        assert experiment.name == folder.name
    hashes = {replace(SHORT, drop=drop, churn=churn).hash for drop in (0.0, 0.1) for churn in (0.0, 0.1)}
    assert len(hashes) == 4
