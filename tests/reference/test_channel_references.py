"""Methods with messages per edge or pushes equal their references at every step, also when messages are lost."""

import itertools
from functools import cache

import networkx as nx
import numpy as np
import pytest
import torch
from numpy_nodes import CHANNELS, reference
from test_reference import SEED, STEPS, TOLERANCE, learning_rate, problem, relative_error

import quasiglobal as qg
from quasiglobal.engines.draws import Faults
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.wire import wire_of


def uniform(graph):
    """W of a directed or undirected graph with equal weights in each row: not doubly stochastic."""
    A = nx.to_numpy_array(graph).T + np.eye(len(graph))
    return A / A.sum(axis=1, keepdims=True)


ONE_WAY = nx.DiGraph([(i, (i + 1) % 6) for i in range(6)] + [(0, 3), (1, 4), (4, 0)])
GRAPHS = {
    "ring": qg.topology.ring(6),
    "one-peer": qg.topology.one_peer_exponential(8),
    "directed": qg.topology.from_matrices([uniform(ONE_WAY)]),
    "changing": qg.topology.from_matrices([uniform(ONE_WAY), uniform(nx.cycle_graph(6, create_using=nx.DiGraph))]),
    "star": qg.topology.star(5),
    "every second": qg.topology.parse("every:2/star:5"),
    "chain": qg.topology.from_graph(nx.path_graph(6)),
    "binary tree": qg.topology.tree(7),
    "double trees": qg.topology.double_trees(7),
}
FITTING = {
    "relaysgd": ("star", "chain", "binary tree", "double trees"),
    "lt-admm": ("ring", "star", "every second"),
    "sgp": ("directed", "changing"),
    "qg-sgp": ("directed", "changing", "one-peer"),
    "push-diging": ("directed", "changing", "one-peer"),
    "ab": ("directed", "changing"),
    "choco": ("ring", "star"),
    "adagossip": ("ring", "star"),
    "beer": ("ring", "star"),
    "motef": ("star",),
}
OPTIONS = {
    "relaysgd": ("", "fill=start", "beta=0.9", "beta=0.8,nesterov=true,fill=start", "base=dadam"),
    "lt-admm": ("", "tau=1,beta_a=0.1", "tau=2,rho=0.8,alpha=0.3", "beta=0.9", "gamma=0.02", "couple=true,tau=3"),
    "sgp": ("", "beta=0.9", "beta=0.9,nesterov=true", "base=dadam"),
    "qg-sgp": ("", "nesterov=false,beta=0.8,mu=0.5"),
    "push-diging": ("", "beta=0.9", "sums=true", "sums=true,beta=0.9"),
    "ab": ("", "beta=0.9"),
    "choco": ("", "gamma=0.5,beta=0.9"),
    "adagossip": ("", "gamma=0.3,rho=0.9,beta=0.9"),
    "beer": ("", "gamma=0.5"),
    "motef": ("", "gamma=0.3,lam=0.4"),
}
TEXTS = {name: [f"{name}:{one}" if one else name for one in options] for name, options in OPTIONS.items()}
CASES = [case for name in CHANNELS for case in itertools.product(TEXTS[name], FITTING[name])]


@cache
def losses(drop, n):
    """The library's lost messages, [steps + 1, n, n]; the reference implements no random draws."""
    seeds = torch.tensor([SEED])
    return np.array([~Faults(drop=drop).arrived(seeds, torch.tensor(t), n)[0].numpy() for t in range(STEPS + 1)])


def both(text, graph, kind="quadratic", weight_decay=0.0, drop=0.0, wire="full"):
    f, x0 = problem(kind, graph.n)

    def rows(x, t):
        return torch.tensor(np.array([f.gradient(i, row, t) for i, row in enumerate(x.numpy())]))

    engine = Simulator(graph, seeds=(SEED,), drop=drop, wire=wire_of(wire))
    result = qg.minimize(
        rows, torch.tensor(x0), text, graph, learning_rate, STEPS, weight_decay, engine=engine
    )
    lost = losses(drop, graph.n)
    path = reference(
        text, f.gradient, x0, graph.weights, learning_rate, STEPS, weight_decay, f.full_gradient, SEED, graph.period,
        lambda t, i, j: lost[t, i, j], wire,
    )
    return result.history.numpy(), path


@pytest.mark.parametrize(("text", "graph"), CASES)
def test_the_library_takes_the_reference_path(text, graph):
    assert relative_error(*both(text, GRAPHS[graph], "logistic", 0.01)) < TOLERANCE


@pytest.mark.filterwarnings("ignore:.*loses its exactness")
@pytest.mark.parametrize(
    "text",
    [
        pytest.param(one, marks=pytest.mark.slow if k else ())
        for name, texts in TEXTS.items() for k, one in enumerate(texts)
        if qg.ALGORITHMS[name].needs.loss != "refused"
    ],
)
def test_also_when_messages_are_lost(text):
    for graph in FITTING[text.partition(":")[0]]:
        library, path = both(text, GRAPHS[graph], drop=0.3)
        assert relative_error(library, path) < TOLERANCE, graph


@pytest.mark.parametrize(
    "text",
    [
        "choco:gamma=0.2,beta=0.5", "adagossip:gamma=0.05,rho=0.9", "beer:gamma=0.2",
        pytest.param("motef:gamma=0.2,lam=0.3", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("wire", ["topk:0.4", "randk:0.4", "sign", "qsgd:4"])
def test_compressed_messages_are_those_of_the_reference(text, wire):
    library, path = both(text, GRAPHS["star"], "logistic", wire=wire)
    assert relative_error(library, path) < TOLERANCE
    plain = both(text, GRAPHS["star"], "logistic")[1]
    assert relative_error(path, plain) > 1e-3


def test_no_two_texts_walk_the_same_path():
    """On a tree whose weights are not doubly stochastic, all differ."""
    graph = qg.topology.from_matrices([uniform(nx.path_graph(6))])
    f, x0 = problem("quadratic", 6)
    paths = {
        text: reference(text, f.gradient, x0, graph.weights, learning_rate, STEPS)
        for text in [*itertools.chain(*TEXTS.values()), "dsgd", "dsgdm:beta=0.9", "dadam", "dsgd-gt"]
    }
    twins = [pair for pair in itertools.combinations(paths, 2) if relative_error(*map(paths.get, pair)) < 1e-3]
    assert twins == [                                       # each node has equal shares, as with sums
        ("push-diging", "push-diging:sums=true"), ("push-diging:beta=0.9", "push-diging:sums=true,beta=0.9"),
    ]


def test_sums_change_nothing_without_loss():
    """P has equal shares on this graph, as the sums have."""
    plain, sums = (both(f"push-diging:sums={sums},beta=0.5", GRAPHS["directed"])[0] for sums in ("false", "true"))
    assert relative_error(plain, sums) < TOLERANCE


@pytest.mark.parametrize(("push", "mix"), [
    ("sgp", "dsgd"), ("sgp:beta=0.9", "dsgdm"), ("qg-sgp", "qg-dsgdm-n"), ("ab", "push-diging"),
])
def test_with_doubly_stochastic_weights_a_push_is_an_average(push, mix):
    first, second = (both(text, GRAPHS["ring"])[0] for text in (push, mix))
    assert relative_error(first, second) < TOLERANCE
