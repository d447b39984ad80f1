"""Methods after 2021, compared step by step with recorded runs of published code: README.md names the sources."""

from pathlib import Path

import numpy as np
import pytest
from test_golden import INPUTS, assert_equal, gradient

import quasiglobal as qg
from quasiglobal.engines.simulator import Simulator

HERE = Path(__file__).parent
RECORDED = dict(np.load(HERE / "later_ring8.npz"))
RELAY = "relaysgd:fill=start"

CASES = {
    "relaysgd__nesterov__chain": (f"{RELAY},beta=0.9,nesterov=true", "chain:8", {}),
    "relaysgd__nesterov__double-trees": (f"{RELAY},beta=0.9,nesterov=true", "double-trees:8", {}),
    "relaysgd__adam__double-trees": (f"{RELAY},base=dadam,beta2=0.999", "double-trees:8", {}),
    "momentum-tracking": ("momentum-tracking:init=mean", "ring:8", {"weight_decay": 0.001}),
    "decentlam": ("decentlam", "ring:8", {"weight_decay": 0.001}),
    "gut": ("gut", "ring:8", {}),
    "qg-gut__nesterov": ("qg-gut:nesterov=true", "ring:8", {}),
    "choco__topk:0.4": ("choco:gamma=0.3", "ring:8", {"wire": "topk:0.4"}),
    "beer__full": ("beer:gamma=0.3", "ring:8", {}),
    "beer__topk:0.4": ("beer:gamma=0.3", "ring:8", {"wire": "topk:0.4"}),
    "motef__topk:0.4": ("motef:gamma=0.3,lam=0.3", "ring:8", {"wire": "topk:0.4"}),
    "lt-admm": ("lt-admm:tau=5,beta_a=0.02,rho=0.8,alpha=0.4", "ring:8", {"lr": 0.05}),
    "k-gt": ("k-gt:tau=5,server_lr=0.7", "ring:8", {"lr": 0.05}),
    "led": ("led:tau=5", "ring:8", {"lr": 0.05}),
    "ed": ("ed", "ring:8", {"lr": 0.05}),
    "proxskip": ("proxskip:p=1", "ring:8", {"lr": 0.05}),
}
OTHERS = {"relaysgd__sgd__binary-tree", "relaysgd__nesterov__chain__lost", "noloco", "noloco__partners"}


def path(text, graph, **options):
    return qg.minimize(
        gradient, INPUTS["x0"], text, graph, **{"lr": lambda t: INPUTS["lrs"][t - 1], "steps": 60} | options
    ).history


@pytest.mark.parametrize("key", CASES)
def test_trajectory_equals_that_of_published_code(key):
    text, graph, options = CASES[key]
    assert_equal(path(text, graph, **options), RECORDED[key])


def test_relays_on_one_tree_of_the_two():
    tree = qg.topology.from_matrices([qg.topology.double_trees(8).weights(1)])
    assert_equal(path(RELAY, tree), RECORDED["relaysgd__sgd__binary-tree"])


def test_relays_with_the_same_messages_lost():
    graph = qg.topology.chain(8)
    engine = Simulator(graph, seeds=(7,), drop=0.3)
    lossy = path(f"{RELAY},beta=0.9,nesterov=true", graph, engine=engine)
    assert_equal(lossy, RECORDED["relaysgd__nesterov__chain__lost"])


def test_random_pairs_as_recorded():
    partners = RECORDED["noloco__partners"]

    def pairs(t):
        W = np.eye(8)
        if t % 5 == 0 and t <= 60:
            W = (W + W[partners[t // 5 - 1]]) / 2
        return W

    assert_equal(path("noloco:tau=5,beta2=0.999", qg.topology.from_function(pairs)), RECORDED["noloco"])


def test_every_recorded_run_is_compared():
    assert set(RECORDED) == set(CASES) | OTHERS


@pytest.mark.slow
def test_base_graphs_are_as_long_as_the_authors():
    lengths = np.load(HERE / "base_graph_lengths.npy")
    for k, n in np.argwhere(lengths > 0):
        graph = qg.topology.base(int(n), int(k) + 1)
        assert graph.period == graph.exact_after == lengths[k, n], (n, k + 1)
