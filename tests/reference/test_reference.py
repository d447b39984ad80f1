"""The library's trajectory equals the node-by-node NumPy reference at every step, up to rounding."""

import itertools
from dataclasses import dataclass
from functools import cache

import numpy as np
import pytest
import torch
from later_nodes import LATER
from numpy_nodes import CHANNELS, NAMES, reference, sample, splitmix64

import quasiglobal as qg

STEPS = 40
SEED = 5
TOLERANCE = 1e-12
"""Relative to the largest coordinate so far, at least 1. Rounding gives 1e-14; a misplaced ε, 1e-8."""

OPTIONS = [
    *("dsgdm:beta=0.8", "dsgdm-n:beta=0.8", "dadam:beta2=0.999", "dadam:beta1=0.8"),
    *(
        f"{name}:sync={what},over={whom}"
        for name in ("dsgdm", "dsgdm-n")
        for what in ("momentum", "gradient")
        for whom in ("graph", "all")
    ),
    *(
        f"{name}:{options}"
        for name in ("qg-dsgdm", "qg-dsgdm-n")
        for options in ("beta=0.8", "mu=0.5", "tau=2", "tau=3", "mu=0.5,tau=2")
    ),
    *("qg-dsgdm:tau=3,released=true", "qg-dsgdm-n:tau=3,released=true", "qg-dsgdm:beta=0.8,released=true"),
    *("qg-dadam:released=true", "qg-dadam:beta1=0.8,beta2=0.999", "qg-dadam:beta2=0.999,released=true"),
    *("dsgdm-gt:beta=0.8", "dsgdm-n-gt:beta=0.8"),
    *("slowmo:base=dsgd", "slowmo:base=qg-dsgdm", "slowmo:base=dadam", "slowmo:average=false"),
    *("slowmo:buffers=average", "slowmo:base=qg-dsgdm,buffers=average", "slowmo:released=true"),
    *("slowmo:beta=0.5,alpha=0.8,tau=5", "slowmo:base=dsgd,tau=5,average=false,released=true"),
    *("dmsgd:beta=0.8,mu=0.3", "dmsgd-2:beta=0.8,mu=0.3"),
    *("mimelite:tau=3", "mimelite:participation=0.5", "mimelite:beta=0.8,tau=3,participation=0.5"),
    *("qg-gossip:mu=0.5", "qhm:mu=0.5", "qhm:beta=0.9,mu=0.3"),
    *("momentum-tracking:init=mean", "edm:beta=0.5", "decentlam:beta=0.5", "gossip-pga:tau=3,beta=0.9"),
    *("gossip-pga:tau=4,beta=0.9,nesterov=true", "gut:mu=0.5", "qg-gut:nesterov=true", "k-gt:tau=3,server_lr=0.5"),
    *("led:tau=1", "led:tau=3", "proxskip:p=1", "proxskip:p=0.5", "gt-nsgdm:beta=0.5", "dsgd-clip:clip=0.3"),
    *("dadamw:lam=0.1", "dsgd-ac:p=1", "dsgd-ac:beta=0.9,nesterov=true", "dfedavgm:beta=0.5,tau=3"),
    *("diloco:tau=4", "diloco:tau=3,beta=0.5,server_lr=0.5,nesterov=false", "diloco:base=dsgdm,tau=4"),
    *("dfedsam:rho=0.5,tau=2", "dfedsam:rho=0.3,beta=0.5,tau=3,gossips=2", "noloco:tau=4"),
    "noloco:base=dsgdm,tau=3,beta=0.8,server_lr=0.5",
]
GOSSIP = [name for name in NAMES if name not in CHANNELS]
TEXTS = [*GOSSIP, *OPTIONS]

TOPOLOGIES = ["ring:8", "star:5", "one-peer-exponential:8"]
MORE_TOPOLOGIES = ["lazy/ring:8", "every:2/ring:8", "social"]
REFUSED = {*itertools.product(("ed", "edm", "led"), ("one-peer-exponential:8", "every:2/ring:8"))}       # W changes
CASES = [
    (text, topology)
    for text, topology in [*itertools.product(TEXTS, TOPOLOGIES), *itertools.product(GOSSIP, MORE_TOPOLOGIES)]
    if (text.partition(":")[0], topology) not in REFUSED
]


def is_slow(text, topology):
    """In the fast suite, options and the methods after 2021 run on one graph, where no other method is the same.

    The other names run on a second one, whose weights change.
    """
    name, _, options = text.partition(":")
    if name == "momentum-tracking":
        return topology != "one-peer-exponential:8"
    return topology not in (("ring:8",) if options or name in LATER else ("ring:8", "one-peer-exponential:8"))


@dataclass(frozen=True)
class Quadratic:
    """½ |A_i x − b_i|² with a different A_i and b_i at every node, and noise that depends on the step."""

    A: np.ndarray
    b: np.ndarray

    def full_gradient(self, i, x):
        return self.A[i].T @ (self.A[i] @ x - self.b[i])

    def gradient(self, i, x, t):
        return self.full_gradient(i, x) + 0.3 * np.sin(np.arange(len(x)) + 5 * i + 3 * t)


@dataclass(frozen=True)
class Logistic:
    """log(1 + exp(−b_i a·x)), averaged over node i's examples a, all of one label b_i; one example a step."""

    a: np.ndarray
    b: np.ndarray

    def loss_gradient(self, i, x, a):
        return -self.b[i] * a * (1 - np.tanh(self.b[i] * (a @ x) / 2)) / 2  # 1/(1 + eᶻ), safe from overflow

    def full_gradient(self, i, x):
        return np.mean([self.loss_gradient(i, x, a) for a in self.a[i]], axis=0)

    def gradient(self, i, x, t):
        return self.loss_gradient(i, x, self.a[i][t % len(self.a[i])])


@cache
def problem(kind, n, d=3):
    """A problem for n nodes, with a different start at each node."""
    rng = np.random.default_rng(n)
    x0 = rng.normal(size=(n, d))
    if kind == "quadratic":
        return Quadratic(A=0.6 * rng.normal(size=(n, d, d)), b=2 * rng.normal(size=(n, d))), x0
    return Logistic(a=rng.normal(size=(n, 4, d)), b=np.sign(rng.normal(size=n))), x0


def learning_rate(t):
    """Linear warm-up over 5 steps, then two decays by 10."""
    return 0.08 * min(1, t / 5) * (1 if t <= 20 else 0.1 if t <= 32 else 0.01)


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs", "ignore:.* meets only some")
@pytest.mark.parametrize(
    ("text", "topology"), [pytest.param(*case, marks=[pytest.mark.slow] if is_slow(*case) else []) for case in CASES]
)
def test_the_library_takes_the_reference_path(text, topology):
    graph = qg.topology.parse(topology)
    for kind, weight_decay in (("quadratic", 0.0), ("logistic", 0.01)):
        f, x0 = problem(kind, graph.n)
        library, path = both(text, f, x0, graph, weight_decay)
        assert relative_error(library, path) < TOLERANCE, (kind, weight_decay)


def both(text, f, x0, graph, weight_decay, lr=learning_rate):
    """The histories of the library and of the reference."""

    def rows(function):
        return lambda x, *t: torch.tensor(
            np.array([function(i, row, *t) for i, row in enumerate(x.numpy())]), dtype=torch.float64
        )

    result = qg.minimize(
        rows(f.gradient),
        torch.tensor(x0),
        text,
        graph,
        lr=lr,
        steps=STEPS,
        weight_decay=weight_decay,
        full_gradient=rows(f.full_gradient),
        seed=SEED,
    )
    path = reference(text, f.gradient, x0, graph.weights, lr, STEPS, weight_decay, f.full_gradient, SEED)
    return result.history.numpy(), path


def relative_error(library, path):
    """The worst over all steps, each relative to the largest coordinate so far, at least 1."""
    assert library.shape == path.shape
    largest = np.maximum.accumulate(np.abs(path).max(axis=(1, 2)))
    return (np.abs(library - path).max(axis=(1, 2)) / np.maximum(1, largest)).max()


@pytest.mark.parametrize("text", ["qg-dadam", "qg-dadam:released=true"])
def test_qg_dadam_hardly_remembers_a_movement_below_its_epsilon(text):
    """The nodes hardly move for 10 steps, then they do. The start is 0, so rounding does not enter d."""
    f, x0 = problem("quadratic", 8)
    paths = both(text, f, 0 * x0, qg.topology.ring(8), 0.0, lr=lambda t: 1e-9 if t <= 10 else 0.05)
    assert relative_error(*paths) < TOLERANCE


def test_every_algorithm_has_a_reference():
    assert set(qg.ALGORITHMS) == set(NAMES)


def test_no_two_texts_walk_the_same_path():
    """Each option changes the path by far more than the tolerance, so a wrong option would be detected."""
    f, x0 = problem("quadratic", 8)
    W = qg.topology.ring(8).weights
    paths = {
        text: reference(text, f.gradient, x0, W, learning_rate, STEPS, 0.0, f.full_gradient, SEED)
        for text in TEXTS
    }
    twins = [
        pair for pair in itertools.combinations(TEXTS, 2) if relative_error(*map(paths.get, pair)) < 1e-3
    ]
    assert twins == [
        ("dadam", "dadamw"),  # without weight decay
        ("dsgdm-gt", "momentum-tracking"),  # on a fixed W
        ("qg-sgdm", "qhm"),  # the paper's single worker case
        ("diloco", "noloco"),  # before their first exchange, without weight decay
        ("led:tau=1", "proxskip:p=1"),  # where W is made lazy
    ]


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**62 + 7])
@pytest.mark.parametrize(("n", "participation"), [(5, 0.5), (8, 0.3), (8, 0.01)])
def test_mimelite_samples_the_clients_of_the_smallest_hashes(n, participation, seed):
    """Only node i moves coordinate i, so the server's movement shows which clients took part."""
    text = f"mimelite:beta=0,participation={participation}"
    result = qg.minimize(
        lambda x, t: torch.eye(n), torch.zeros(n), text, qg.topology.complete(n), lr=1, steps=50, seed=seed
    )
    moved = result.history.diff(dim=0)[:, 0]
    clients = [step.nonzero().flatten().tolist() for step in moved]
    assert clients == [sample(n, participation, seed, finished_rounds) for finished_rounds in range(50)]


def test_splitmix64_gives_the_published_sequence():
    """The first two outputs of the generator with seed 0; its state grows by the constant in splitmix64."""
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(0x9E3779B97F4A7C15) == 0x6E789E6AA1B965F4
