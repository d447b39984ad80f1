"""Fixed points and identities of the methods after 2021, on heterogeneous quadratics and a ring of 6.

λ_min of this ring is −1/3, so that `ed`, `edm` and `led` mix with (I + W)/2.
"""

from functools import cache

import pytest
import torch
from theory_problems import Quadratics, noisy

import quasiglobal as qg

PROBLEM = Quadratics.random(6, seed=1, low=0.5, high=1.0)
RING = qg.topology.ring(6)
W = torch.from_numpy(RING.weights())
START = torch.zeros(3, dtype=torch.float64)


@cache
def at_rest(name, lr=0.2, steps=360):
    """Run to the fixed point, for whole rounds: the error shrinks by a factor of 0.95 or less per step."""
    return qg.minimize(PROBLEM.gradient, START, name, RING, lr, steps, keep_history=False).x


def distance(name, **options):
    return (at_rest(name, **options) - PROBLEM.minimiser).norm(dim=1).max()


@pytest.mark.parametrize(
    ("name", "lr"),
    [
        ("momentum-tracking:beta=0.5", 0.1), ("momentum-tracking:beta=0.5,init=mean", 0.1), ("ed", 0.2), ("edm", 0.2),
        ("k-gt:tau=3", 0.1), ("k-gt:tau=3,server_lr=0.5", 0.2), ("led", 0.1), ("proxskip", 0.2),
    ],
)
def test_bias_correcting_methods_reach_the_exact_minimiser_at_every_node(name, lr):
    """Tolerance 1e-7; rounding accumulates to about 1e-12. DSGD stays 1e-2 or more away."""
    assert distance(name, lr=lr) < 1e-7
    assert distance("dsgd", lr=lr) > 1e-2


def rests_at(one_round):
    """The fixed point of an affine map of [n, d], such as one round of a method, by a linear solve."""
    b = one_round(torch.zeros_like(PROBLEM.c)).flatten()
    unit = torch.eye(len(b), dtype=b.dtype)
    A = torch.stack([one_round(e.view_as(PROBLEM.c)).flatten() - b for e in unit], dim=1)
    return torch.linalg.solve(unit - A, b).view_as(PROBLEM.c)


def descended(x, lr=0.2):
    return x - lr * PROBLEM.gradient(x)


def averaged(x):
    return x.mean(dim=0).expand_as(x)


def gossip_and_global_average(x):
    for k in range(4):
        x = averaged(descended(x)) if k == 3 else W @ descended(x)
    return x


def heavy_ball_steps(x):
    m = torch.zeros_like(x)
    for _ in range(3):
        m = 0.5 * m + PROBLEM.gradient(x)
        x = x - 0.2 * m
    return W @ x


def sharpness_aware_steps(x):
    for _ in range(3):
        g = PROBLEM.gradient(x)
        x = x - 0.2 * PROBLEM.gradient(x + 0.05 * g / g.norm(dim=1, keepdim=True))
    return W @ x


BIASED = {
    "decentlam:beta=0.5": lambda x: W @ descended(x),
    "gut:mu=0.5": lambda x: W @ descended(x, 0.5 * 0.2),
    "qg-gut:mu=0.06,beta=0.5": lambda x: W @ descended(x, 0.94 / (0.94 + 0.06 * 1.5) * 0.2),
    "qg-gut:mu=0.06,beta=0.5,nesterov=true": lambda x: W @ descended(x, 0.94 / (0.94 + 0.06 * 1.75) * 0.2),
    "gossip-pga:tau=4": gossip_and_global_average,
    "dfedavgm:beta=0.5,tau=3": heavy_ball_steps,
    "diloco:base=dsgd,tau=2,beta=0.5": lambda x: averaged(descended(descended(x))),
    "noloco:base=dsgd,tau=2": lambda x: W @ descended(descended(x)),
    "dsgd-ac": lambda x: W @ x - 0.2 * PROBLEM.gradient(x),
}
"""Each method rests where this map does.

Where nothing moves, DecentLaM's momentum and the outer momenta of DiLoCo and NoLoCo are 0. In GUT y = 0:
(1 − μ)δ = μbu/η with δ = g − u/η, so that u = WX − X is ηg (1 − μ)/(1 − μ + μb), and x = WX = W(x − u).
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", BIASED)
def test_the_others_rest_near_the_minimiser(name):
    """Tolerance 1e-9 against a linear solve."""
    assert (at_rest(name) - rests_at(BIASED[name])).abs().max() < 1e-9
    assert distance(name) > 1e-3


@pytest.mark.slow
def test_an_exact_average_now_and_then_reduces_the_bias():
    assert distance("gossip-pga:tau=4") < 0.7 * distance("dsgd")
    assert distance("gut:mu=0.5") < distance("decentlam:beta=0.5") < distance("dfedavgm:beta=0.5,tau=3")


def test_sharpness_aware_rounds_rest_where_a_round_changes_nothing():
    """Tolerance 1e-9. The map is not affine, so that there is no linear solve."""
    x = at_rest("dfedsam:rho=0.05,tau=3")
    assert (sharpness_aware_steps(x) - x).abs().max() < 1e-9
    assert distance("dfedsam:rho=0.05,tau=3") > 1e-2


def test_clipped_gradients_balance_each_other_where_the_gradients_do_not():
    g = PROBLEM.gradient(at_rest("dsgd-clip:clip=0.8"))
    norm = g.norm(dim=1, keepdim=True)
    assert 0 < (norm > 0.8).sum() < 6
    assert (g * (0.8 / norm).clamp_max(1)).mean(dim=0).abs().max() < 1e-9
    assert g.mean(dim=0).abs().max() > 1e-2


def decayed(t):
    return 0.2 if t < 20 else 0.1


def test_adaptive_consensus_lets_the_nodes_apart_as_the_rate_decays():
    """After a decay by 2, γ = 1/8."""
    x = at_rest("dsgd-ac", lr=decayed)
    assert (x - rests_at(lambda x: x + (W @ x - x) / 8 - 0.1 * PROBLEM.gradient(x))).abs().max() < 1e-9
    assert distance("dsgd-ac", lr=decayed) > 1.5 * distance("dsgd-ac")


def harmonic(t):
    return 2 / (t + 10)


def test_normalized_tracking_approaches_the_minimiser_as_the_rate_decays():
    """Each step has the length of the rate, in the end 0.0054: the nodes are within a few rates of the minimiser."""
    assert distance("gt-nsgdm:beta=0.5", lr=harmonic) < 0.02 < distance("dsgd") / 5


@pytest.mark.slow
@pytest.mark.parametrize(("name", "lr"), [("decentlam", 0.01), ("gut", 0.05), ("qg-gut", 0.01), ("d2+", 0.05)])
@pytest.mark.filterwarnings("ignore:.* needs a fixed")
def test_methods_that_need_a_fixed_w_move_away_where_it_changes(name, lr):
    """As their `needs` say. On this one-peer graph quasi-global momentum stays near the minimiser."""
    peers = qg.topology.one_peer_exponential(6)
    x, calm = (
        qg.minimize(PROBLEM.gradient, START, one, peers, lr, 300, keep_history=False).x for one in (name, "qg-dsgdm")
    )
    assert (x - PROBLEM.minimiser).norm() > 10
    assert (calm - PROBLEM.minimiser).norm() < 1


# Identities between methods, at every step


def path(name, topology, lr=0.1):
    return qg.minimize(noisy(PROBLEM, 0.5), START, name, topology, lr, 40).history


def falling(t):
    return 0.1 / t


@pytest.mark.parametrize(
    ("one", "other", "lr"),
    [
        ("momentum-tracking", "dsgdm-gt", falling),             # two linear filters in either order
        ("ed", "led:tau=1", 0.1), ("led:tau=1", "proxskip:p=1", falling), ("gossip-pga:tau=1", "sgd", falling),
    ],
)
def test_methods_that_are_the_same_on_a_fixed_graph(one, other, lr):
    """Tolerance 1e-12, for sums in another order on iterates of order 1."""
    assert (path(one, RING, lr) - path(other, RING, lr)).abs().max() < 1e-12


def test_momentum_tracking_is_not_tracking_with_momentum_where_w_changes():
    peers = qg.topology.one_peer_exponential(6)
    assert (path("momentum-tracking", peers) - path("dsgdm-gt", peers)).abs().max() > 1e-3


def test_exact_diffusion_without_momentum_is_d2_plus_with_a_lazy_w():
    assert (path("ed", RING, falling) - path("d2+", RING.lazy(), falling)).abs().max() < 1e-12
    assert (path("led:tau=1", RING, falling) - path("ed", RING, falling)).abs().max() > 1e-3
