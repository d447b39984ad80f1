"""The optimizer in a user's training loop: the same numbers as the simulator, and no hang."""

import re

import loops
import pytest
import torch
from processes import together

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.simulator import Simulator


@pytest.mark.parametrize(("algorithm", "groups", "overlap", "block"), [
    ("qg-dsgdm-n", True, True, 9),                          # in blocks of 9 parameters, and whole
    *(pytest.param(*case, marks=pytest.mark.slow) for case in (
        ("qg-dsgdm-n", False, False, None), ("slowmo:tau=7", True, False, None), ("dadam", False, True, None),
        ("dsgdm-n-gt", True, False, None), ("dsgdm-n-gt", True, False, 9),
    )),
])
def test_a_loop_is_what_the_simulator_computes(algorithm, groups, overlap, block):
    size, net = 3, loops.model()
    sizes = [p.numel() for p in net.parameters()]
    first, second = sum(sizes[:2]), sum(sizes[2:])

    def of_groups(one, other):
        values = [one if groups else other] * first + [other] * second
        return torch.tensor([values], dtype=torch.float64)

    def gradient(x, t):
        rows = []
        for rank in range(size):
            torch.nn.utils.vector_to_parameters(x[rank], net.parameters())
            net.zero_grad()
            loops.loss_of(net, loops.batches(rank)[t - 1]).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            rows.append(torch.cat([p.grad.flatten() for p in net.parameters()]))
        return torch.stack(rows)

    chosen = qg.algorithms.Overlap(base=qg.algorithm(algorithm)) if overlap else algorithm
    expected = qg.minimize(
        gradient, loops.row(loops.model(0)), chosen, "ring:3",
        lambda t: of_groups(0.02, 0.05) * (1 if t <= 20 else 0.1), 30, of_groups(0.1, 0.01),
    ).x
    rows = torch.stack(together(size, loops.train, size, algorithm, groups, overlap, block))
    assert (rows - expected).norm() <= 1e-12 * expected.norm()


def test_it_goes_on_from_its_state_dict():
    for whole, resumed in together(2, loops.interrupted, 2):
        assert whole.equal(resumed)


@pytest.mark.slow
def test_after_an_exact_mean_no_older_model_comes():
    """With overlap, the models of the next step have been sent when the mean replaces them."""
    for first, second in together(3, loops.averaged_between_steps, 3):
        assert first.equal(second)


@pytest.mark.slow
def test_parameters_that_are_not_contiguous_train_alike():
    for plain, transposed in together(2, loops.in_other_memory, 2):
        torch.testing.assert_close(transposed, plain, rtol=0, atol=1e-14)


@pytest.mark.slow
def test_an_overflow_still_mixes_and_keeps_the_state():
    for rank, (kept, frozen, finite, steps) in enumerate(together(2, loops.scaled, 2)):
        assert kept == (rank == 0)
        assert frozen
        assert finite
        assert steps == 6


@pytest.mark.slow
def test_different_architectures_are_refused():
    assert all("hold another architecture" in error for error in together(2, loops.different, 2))


@pytest.mark.slow
def test_a_node_that_runs_out_of_batches_is_left_behind():
    answers = together(3, loops.uneven, 3)
    assert all(0 in lost for lost, _ in answers[1:])
    assert all(finite for _, finite in answers)


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True])
def test_models_are_averaged_exactly_or_by_gossip(overlap):
    for gossiped, exact, expected in together(4, loops.averaged, 4, overlap):
        torch.testing.assert_close(exact, expected, rtol=0, atol=1e-12)
        torch.testing.assert_close(gossiped, expected, rtol=0, atol=1e-6)


def test_without_torchrun_it_says_so():
    with pytest.raises(qg.InputError, match="torchrun"):
        qg.optim.GossipOptimizer(loops.model().parameters(), "dsgd", "ring:3")


@pytest.mark.slow
def test_nodes_with_different_matrices_of_one_name_do_not_meet():
    for said in together(2, loops.with_own_weights, 2):
        assert re.search(r"nodes \[\d\] hold another architecture, algorithm, topology or base optimizer", said)


def test_the_rates_of_groups_are_one_row_that_is_kept():
    for same, changed, values in together(1, loops.rates_of_groups, 1):
        assert same
        assert changed
        assert values == [0.5, 0.5, 0.5, 0.25]


RING = torch.tensor([[1, 1, 0, 1], [1, 1, 1, 0], [0, 1, 1, 1], [1, 0, 1, 1]], dtype=torch.float64) / 3


def plain_loop(make, mixed, steps=20, overflows=(), decays=True):
    """Each node's torch optimizer on a ring of 4, then x ← mixed(t, x, rates): written without this library."""
    nets = [loops.model() for _ in RING]
    bases = [make(list(net.parameters())) for net in nets]
    schedules = [torch.optim.lr_scheduler.MultiStepLR(base, milestones=[10] if decays else []) for base in bases]
    data = [loops.batches(rank, steps) for rank in range(len(RING))]
    rate = {p: group["lr"] for group in bases[0].param_groups for p in group["params"]}
    rates = torch.cat([torch.full((p.numel(),), rate[p], dtype=p.dtype) for p in nets[0].parameters()])
    for t in range(1, steps + 1):
        for rank, (net, base) in enumerate(zip(nets, bases, strict=True)):
            def closure(net=net, base=base, batch=data[rank][t - 1]):
                base.zero_grad()
                loss = loops.loss_of(net, batch)
                loss.backward()
                return loss

            if (t, rank) not in overflows:
                base.step(closure)
        x = torch.stack([loops.row(net) for net in nets])
        x = mixed(t, x, rates * (0.1 if decays and t > 10 else 1.0))
        for net, values in zip(nets, x, strict=True):
            torch.nn.utils.vector_to_parameters(values.clone(), net.parameters())
        for schedule in schedules:
            schedule.step()
    return x


def averaged(t, x, rates):
    return RING @ x


def close(rows, expected):
    """Whether all rows agree to 1e-12: float64 rounding, amplified by 20 steps."""
    return (torch.stack(rows) - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "scheduled"), [(loops.adamw, "gossip"), (loops.sgdm, "base"), (loops.lbfgs, "gossip")]
)
def test_a_base_steps_and_the_neighbours_average(make, scheduled):
    expected = plain_loop(make, averaged)
    assert close(together(4, loops.train_with_base, make, "ring:4", "dsgd", scheduled), expected)


@pytest.mark.slow
def test_a_base_makes_local_steps_between_averages():
    expected = plain_loop(loops.adamw, lambda t, x, rates: x if t % 4 else RING @ x)
    assert close(together(4, loops.train_with_base, loops.adamw, "every:4/ring:4", "dsgd", "base"), expected)


@pytest.mark.slow
@pytest.mark.slow
def test_slowmo_adds_its_outer_step_to_a_base():
    first, m = loops.row(loops.model()), 0.0

    def outer(t, x, rates):
        nonlocal first, m
        if t % 7:
            return RING @ x
        m = 0.7 * m + (first - x.mean(dim=0)) / rates
        first = first - rates * m
        return first.expand_as(x)

    expected = plain_loop(loops.adamw, outer)
    rows = together(4, loops.train_with_base, loops.adamw, "ring:4", "slowmo:base=dsgd,tau=7", "gossip")
    assert close(rows, expected)


@pytest.mark.slow
def test_d2_plus_corrects_the_steps_of_a_base():
    """Exact diffusion: adapt, correct by the last correction rescaled to the present rate, combine."""
    correction = 0.0

    def corrected(t, half, rates):
        nonlocal correction
        x = (torch.eye(4, dtype=torch.float64) + RING) / 2 @ (half + rates * correction)
        correction = (x - half) / rates
        return x

    expected = plain_loop(loops.sgdm, corrected)
    assert close(together(4, loops.train_with_base, loops.sgdm, "lazy/ring:4", "d2+", "gossip"), expected)


@pytest.mark.slow
def test_a_base_goes_on_from_its_state_dict():
    for whole, resumed in together(2, loops.interrupted, 2, loops.adamw):
        assert whole.equal(resumed)


@pytest.mark.slow
def test_after_an_overflow_the_base_does_not_step_but_the_node_mixes():
    expected = plain_loop(loops.sgdm, averaged, 6, overflows={(3, 0)}, decays=False)
    assert close(together(4, loops.scaled_with_base, 4), expected)


@pytest.mark.slow
def test_nodes_with_different_bases_are_refused():
    for said in together(2, loops.other_bases, 2):
        assert len(said) == 3
        assert all("base optimizer" in sentence for sentence in said)


@pytest.mark.slow
def test_a_base_shares_its_groups_and_refuses_foreign_states_and_later_parameters():
    ((shared, said),) = together(1, loops.with_later_changes, 1)
    assert shared == [True] * 3
    assert ["state that this optimizer saved" in sentence for sentence in said] == [True, True, False, False]
    assert ["make a new GossipOptimizer" in sentence for sentence in said] == [False, False, True, True]


ONE_WAY = [[0.5, 0, 0, 0.5], [0.5, 0.5, 0, 0], [0.25, 0.25, 0.5, 0], [0, 0, 0.5, 0.5]]
LOCAL = ("ed", "gossip-pga", "k-gt", "led", "proxskip")
"""Methods of 2019 and later that correct or average the results of local steps."""


@pytest.mark.parametrize(
    "name", [*ALGORITHMS, "noloco:tau=3,base=dsgd", *(f"slowmo:tau=3,base={name}" for name in ("dsgd", "d2+", "d2"))]
)
def test_an_algorithm_accepts_a_base_only_if_x_minus_lr_g_is_all_it_uses(name):
    """The base's result replaces x − ηg: an accepting algorithm moves from (x, g) as from (x − ηg, 0)."""
    graph = {"relaysgd": "star:4", "sgp": qg.topology.from_matrices([ONE_WAY])}.get(name, "lazy/ring:4")
    algorithm, engine = qg.algorithms.algorithm(name), Simulator(qg.topology.parse(graph))
    generator = torch.Generator().manual_seed(0)
    x = y = torch.randn(4, 3, dtype=torch.float64, generator=generator)
    state, same = engine.begin(algorithm, x), engine.begin(algorithm, x)
    for t in range(1, 14):
        g = torch.randn(4, 3, dtype=torch.float64, generator=generator)
        lr = torch.tensor(1 / t, dtype=torch.float64)
        options = {"t": t, "lr": lr, "full_gradient": torch.sin, "gradient": torch.sin}
        x, state = engine.step(algorithm, x, g, state, **options)
        y, same = engine.step(algorithm, y - lr * g, torch.zeros_like(g), same, **options)
    accepts = torch.allclose(x, y, rtol=1e-12, atol=1e-12)
    params = list(loops.model().parameters())
    with pytest.raises(qg.InputError, match="torchrun" if accepts else "does not accept a base: it "):
        qg.optim.GossipOptimizer(params, name, graph, base=loops.sgdm(params))
    others = ("slowmo:tau=3,base=dsgd", "slowmo:tau=3,base=d2+", "noloco:tau=3,base=dsgd")
    assert accepts == (name in ("dsgd", "d2+", "relaysgd", "lt-admm", "choco", "adagossip", *others, *LOCAL))


class Own(qg.Algorithm):
    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g.sign()), state


def test_bad_bases_are_refused_before_the_nodes_meet():
    net = loops.model()
    params = list(net.parameters())
    base, generator = loops.sgdm(params), net.parameters()
    consumer = torch.optim.SGD(generator)
    for sentence, given, algorithm, options in [
        ("lr and weight_decay are the base's; give them to SGD", params, "dsgd", {"base": base, "lr": 0.1}),
        ("lr and weight_decay are the base's", params, "dsgd", {"base": base, "weight_decay": 0.0}),
        ("params = list", generator, "dsgd", {"base": consumer}),
        ("1 trainable parameters of params are not in base, and 0", params, "dsgd", {"base": loops.sgdm(params[1:])}),
        ("averages the models before the local step", params, "dsgd", {"base": base, "overlap": True}),
        ("overlap needs an algorithm that makes a local step", params, "dsgd-gt", {"overlap": True}),
        ("must be a torch optimizer", params, "dsgd", {"base": torch.optim.SGD}),
        ("wraps DSGDm, which adds momentum", params, "slowmo", {"base": base}),
        ("buffers=average", params, "slowmo:base=dsgd,buffers=average", {"base": base}),
        ("Own does not accept a base: it is not known", params, Own(), {"base": base}),
    ]:
        with pytest.raises(qg.InputError, match=re.escape(sentence)):
            qg.optim.GossipOptimizer(given, algorithm, "ring:4", **options)
