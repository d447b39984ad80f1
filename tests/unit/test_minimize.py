import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.engines.simulator import Simulator

TARGET = torch.arange(8.0, dtype=torch.float64)[:, None].expand(8, 3)


def pull(x, t):
    return x - TARGET


def run(x0=None, algorithm="dsgd", graph="ring:8", lr=0.1, steps=5, gradient=pull, **options):
    x0 = torch.zeros(3, dtype=torch.float64) if x0 is None else x0
    return qg.minimize(gradient, x0, algorithm, graph, lr, steps, **options)


def test_result_has_the_documented_shapes():
    result = qg.minimize(
        pull, torch.zeros(3, dtype=torch.float64), algorithm="qg-dsgdm-n", topology=qg.topology.ring(8),
        lr=0.05, steps=60, weight_decay=0.0,
    )
    assert result.x.shape == (8, 3)
    assert result.history.shape == (61, 8, 3)
    assert result.history[-1].equal(result.x)
    assert result.state["m_hat"].shape == (8, 3)
    assert result.steps == 60


def test_one_start_for_all_or_one_each():
    same = run(torch.ones(3, dtype=torch.float64))
    each = run(torch.ones(8, 3, dtype=torch.float64))
    assert same.history.equal(each.history)


def test_numpy_and_lists_are_welcome():
    from_numpy = run(np.zeros(3), gradient=lambda x, t: x.numpy() - TARGET.numpy())
    assert from_numpy.x.dtype == torch.float64
    assert from_numpy.history.equal(run().history)
    assert run([0, 0, 0]).x.dtype == torch.get_default_dtype()


def test_lr_may_be_a_number_a_tensor_or_a_function():
    plain = run(lr=0.05).history
    assert plain.equal(run(lr=lambda t: 0.05).history)
    assert plain.equal(run(lr=torch.full((8, 1), 0.05, dtype=torch.float64)).history)
    seen = []
    run(lr=lambda t: seen.append(t) or 0.1, steps=3)
    assert seen == [1, 2, 3]


def test_a_python_number_as_lr_is_not_rounded_to_float32():
    x = run(steps=1, algorithm="sgd", gradient=lambda x, t: torch.ones_like(x), lr=0.1).x
    assert x[0, 0].item() == -0.1


def test_step_counts_from_one_and_sees_the_current_x():
    calls = []
    result = run(gradient=lambda x, t: calls.append((t, x)) or x - TARGET, steps=3)
    assert [t for t, _ in calls] == [1, 2, 3]
    assert all(x.equal(result.history[t - 1]) for t, x in calls)


def test_weight_decay_is_l2_in_the_gradient():
    ones = torch.ones(3, dtype=torch.float64)
    decayed = run(ones, weight_decay=0.1, algorithm="dsgdm")
    by_hand = run(ones, gradient=lambda x, t: pull(x, t) + 0.1 * x, algorithm="dsgdm")
    assert decayed.history.equal(by_hand.history)


def test_a_gradient_that_scribbles_on_x_does_no_harm():
    assert run(gradient=lambda x, t: x.sub_(TARGET)).history.equal(run().history)


def test_a_gradient_by_autograd_works():
    def gradient(x, t):
        x.requires_grad_()
        (0.5 * (x - TARGET).square().sum()).backward()
        return x.grad

    assert run(gradient=gradient).history.equal(run().history)


@pytest.mark.parametrize("name", qg.ALGORITHMS)
def test_a_gradient_that_reuses_its_storage_does_no_harm(name):
    buffer = torch.empty(8, 3, dtype=torch.float64)
    graph = "star:8" if name == "relaysgd" else "lazy/ring:8"
    reused = run(gradient=lambda x, t: torch.sub(x, TARGET, out=buffer), algorithm=name, graph=graph, steps=20)
    assert reused.history.equal(run(algorithm=name, graph=graph, steps=20).history)


def test_a_schedule_that_reuses_its_storage_does_no_harm():
    rate = torch.zeros(())
    assert run(lr=lambda t: rate.fill_(0.1 / t)).history.equal(run(lr=lambda t: torch.tensor(0.1 / t)).history)
    assert not run(lr=torch.tensor(0.1, requires_grad=True)).x.requires_grad


def test_weight_decay_may_differ_by_parameter():
    decay = torch.tensor([[0.0, 0.1, 0.2]], dtype=torch.float64)
    together = run(torch.ones(3, dtype=torch.float64), weight_decay=decay).history
    for column, value in enumerate((0.0, 0.1, 0.2)):
        alone = run(torch.ones(3, dtype=torch.float64), weight_decay=value).history
        torch.testing.assert_close(together[..., column], alone[..., column], rtol=0, atol=1e-15)


def test_a_result_of_another_run_is_not_resumed():
    other = run(algorithm="dsgdm")
    for options in ({"algorithm": "qg-dsgdm"}, {"x0": torch.zeros(3)}, {"x0": torch.zeros(4, dtype=torch.float64)}):
        with pytest.raises(qg.InputError, match="of another algorithm, size or type"):
            run(resume=other, **{"algorithm": "dsgdm", "gradient": None} | options)


def test_no_gradient_is_gossip():
    x0 = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    result = run(x0, algorithm="gossip", gradient=None, steps=200)
    torch.testing.assert_close(result.x, x0.mean(dim=0).expand(8, 3))


def test_mimelite_asks_for_the_full_gradient():
    seen = []
    run(algorithm="mimelite", full_gradient=lambda x: seen.append(x) or pull(x, 0), steps=2, weight_decay=0.1)
    assert len(seen) == 2


def test_resume_goes_on_to_the_same_end():
    whole, half = run(steps=30, algorithm="d2+", graph="lazy/ring:8"), run(
        steps=11, algorithm="d2+", graph="lazy/ring:8")
    rest = run(steps=30, algorithm="d2+", graph="lazy/ring:8", resume=half)
    assert rest.history.equal(whole.history)
    assert all(rest.state[name].equal(whole.state[name]) for name in whole.state)
    assert run(steps=5, algorithm="d2+", graph="lazy/ring:8", resume=half).steps == 11


def test_without_history_the_end_is_the_same():
    short = run(keep_history=False)
    assert short.history.shape == (1, 8, 3)
    assert short.x.equal(run().x)
    with pytest.raises(qg.InputError, match="kept no history"):
        run(steps=9, resume=short)


def test_numpy_numbers_are_numbers():
    graph, steps = topology.ring(np.int64(8)), np.int32(5)
    algorithm = qg.algorithm("qg-dsgdm:tau=2")
    assert run(graph=graph, steps=steps, lr=np.float32(0.5), algorithm=type(algorithm)(tau=np.int64(2))).history.equal(
        run(lr=0.5, algorithm=algorithm).history)


def test_an_engine_for_another_w_of_the_same_name_is_refused():
    ring, lazy = (topology.from_matrices([graph.weights()]) for graph in (topology.ring(8), topology.ring(8).lazy()))
    assert str(ring) == str(lazy)
    with pytest.raises(qg.InputError, match=r"the engine is for matrices, but .* another .* same name"):
        run(graph=lazy, engine=Simulator(ring))
    assert run(graph=ring, engine=Simulator(topology.ring(8))).x.equal(run(graph="ring:8").x), "an equal W is accepted"


def test_zero_steps_is_the_start():
    assert run(steps=0).history.equal(torch.zeros(1, 8, 3, dtype=torch.float64))


BAD = {
    "x0 must have shape [8, d] or [d] for the 8 nodes of ring:8, got [5, 3]": {"x0": torch.zeros(5, 3)},
    "got [2, 8, 3]": {"x0": torch.zeros(2, 8, 3)},
    "x0 is not finite at node 2": {"x0": torch.zeros(8, 3).index_fill(0, torch.tensor([2]), torch.nan)},
    "x0 must be an array of numbers, got str": {"x0": "here"},
    "gradient must return shape [8, 3], like x, got [8]": {"gradient": lambda x, t: x[:, 0]},
    "lr must be finite and >= 0, got -1.0 at step 1": {"lr": -1.0},
    "lr must be finite and >= 0, got nan at step 3": {"lr": lambda t: 0.1 if t < 3 else float("nan")},
    "lr must be a number or broadcast to x's [8, 3], got [5] at step 1": {"lr": torch.ones(5)},
    "lr is 0 at step 4, but QGDSGDm divides by lr; end the schedule above 0": {
        "algorithm": "qg-dsgdm", "lr": lambda t: 0.1 * (t < 4)},
    "steps must be a whole number >= 0, got -1": {"steps": -1},
    "steps must be a whole number >= 0, got 2.5": {"steps": 2.5},
    "lr must be a number or a tensor, got 'fast' at step 1": {"lr": "fast"},
    "lr must be a number or a tensor, got None at step 1": {"lr": lambda t: None},
    "for a list of rates: lambda t: rates[t - 1]": {"lr": [0.1, 0.05, 0.01]},
    "weight_decay must be a number or a tensor, got 'some'": {"weight_decay": "some"},
    "x0 must be float32 or float64, got torch.bfloat16": {"x0": torch.zeros(3, dtype=torch.bfloat16)},
    "x0 must be float32 or float64, got torch.complex64": {"x0": torch.zeros(3, dtype=torch.complex64)},
    "x0 must have shape [8, d] or [d] for the 8 nodes of ring:8, got [8, 0]": {"x0": torch.zeros(0)},
    "for the 8 nodes of ring:8, got []": {"x0": 1.0},
    "gradient must return shape [8, 3], like x, got NoneType": {"gradient": lambda x, t: None},
    "gradient must return shape [8, 3], like x, got complex [8, 3]": {"gradient": lambda x, t: x + 1j},
    "gradient must be a function of (x, t), got 3": {"gradient": 3},
    "resume must be an earlier Result, got str": {"resume": "run"},
    "the engine is for ring:5, but the topology is ring:8": {"engine": Simulator(topology.ring(5))},
    "a topology is a name": {"graph": 8},
    "an algorithm is a name": {"algorithm": 8},
    "weight_decay must be finite and >= 0, got -0.1": {"weight_decay": -0.1},
    "did you mean 'dsgdm'": {"algorithm": "dsgdmm"},
    "did you mean 'ring'": {"graph": "rung:8"},
}


@pytest.mark.parametrize("words", BAD)
def test_bad_input_is_one_sentence_before_the_first_step(words):
    with pytest.raises(qg.InputError) as caught:
        run(**BAD[words])
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("algorithm", ["d2+", "slowmo", "qg-dsgdm-n", "qg-sgdm", "slowmo:base=dsgd"])
def test_lr_zero_is_refused_where_it_divides(algorithm):
    with pytest.raises(qg.InputError, match="divides by lr"):
        run(algorithm=algorithm, graph="lazy/ring:8", lr=0.0)


def test_lr_zero_is_fine_where_it_does_not_divide():
    assert run(algorithm="dsgdm", lr=0.0).x.equal(torch.zeros(8, 3, dtype=torch.float64))


def test_a_gradient_that_turns_nan_stops_with_step_and_node_and_keeps_the_history():
    def gradient(x, t):
        g = pull(x, t)
        if t == 7:
            g[3] = torch.nan
        return g

    with pytest.raises(qg.Diverged) as caught:
        run(gradient=gradient, algorithm="qg-dsgdm", steps=20)
    error = caught.value
    assert "the gradient is not finite at step 7, node 3" in str(error)
    assert (error.step, error.node) == (7, 3)
    assert error.result.history.equal(run(algorithm="qg-dsgdm", steps=6).history)
    rest = run(algorithm="qg-dsgdm", steps=20, resume=error.result)
    assert rest.history.equal(run(algorithm="qg-dsgdm", steps=20).history)


def test_divergence_names_the_run_and_its_node():
    engine = Simulator(topology.ring(8), seeds=(0, 1, 2))
    g = torch.zeros(24, 3, dtype=torch.float64)
    g[19] = torch.inf
    with pytest.raises(qg.Diverged, match="step 1, node 3 of run 2"):
        run(torch.zeros(24, 3, dtype=torch.float64), gradient=lambda x, t: g, engine=engine)


def test_an_iterate_that_overflows_stops_too():
    with pytest.raises(qg.Diverged, match="x is not finite at step"):
        run(lr=1e200, steps=20)


def test_d2_warns_on_an_even_ring_and_names_the_remedy():
    with pytest.warns(UserWarning, match=r"use \(I \+ W\)/2, the topology lazy/ring:8"):
        run(algorithm="d2")
    run(algorithm="d2", graph="lazy/ring:8")
    run(algorithm="d2", graph="ring:7", x0=torch.zeros(3), gradient=None)
    for name in ("one-peer-exponential:8", "every:4/lazy/ring:8"):
        with pytest.warns(UserWarning, match=f"D2 needs a fixed symmetric W, which {name} is not"):
            run(algorithm="d2", graph=name)


@pytest.mark.parametrize("name", ["ed", "edm", "led:tau=2"])
def test_w_is_made_lazy_where_a_method_needs_it(name, caplog):
    """Tolerance 1e-12: (v + W v)/2 instead of ((I + W)/2) v. λ_min is −1/3 on an even ring, −0.27 on a ring of 7."""
    with caplog.at_level("INFO", "quasiglobal"):
        lazy = run(algorithm=name).x
    assert "mixes with (I + W)/2, since λ_min of ring:8 is -0.3333" in caplog.text
    caplog.clear()
    assert (lazy - run(algorithm=name, graph="lazy/ring:8").x).abs().max() < 1e-12
    seven = {"x0": torch.zeros(3, dtype=torch.float64), "gradient": lambda x, t: x - TARGET[:7], "algorithm": name}
    plain, halved = (run(graph=graph, **seven).x for graph in ("ring:7", "lazy/ring:7"))
    assert (plain - halved).abs().max() > 1e-3
    assert not caplog.text
    with pytest.raises(qg.InputError, match="needs a fixed symmetric W, which one-peer-exponential:8 is not"):
        run(algorithm=name, graph="one-peer-exponential:8")


@pytest.mark.parametrize("base", ["lt-admm", "relaysgd"])
def test_the_base_of_diloco_is_a_local_step(base):
    with pytest.raises(qg.InputError, match="the base of diloco makes the local step"):
        run(algorithm=f"diloco:base={base}")


def test_an_option_is_named_as_it_is_written():
    with pytest.raises(qg.InputError, match="unknown init of momentum-tracking"):
        run(algorithm="momentum-tracking:init=foo")


def test_rounds_that_meet_only_some_graphs_warn():
    with pytest.warns(UserWarning, match="KGT with tau = 3 meets only some of the 3 graphs of one-peer-exponential:8"):
        run(algorithm="k-gt:tau=3", graph="one-peer-exponential:8")
    for name in ("k-gt:tau=2", "gossip-pga:tau=3", "qg-dsgdm:tau=3", "slowmo:tau=3"):
        run(algorithm=name, graph="one-peer-exponential:8")
    run(algorithm="dfedavgm:tau=4", graph="every:4/ring:8")


def test_a_w_that_is_not_doubly_stochastic_warns():
    W = [[0.5, 0.5, 0], [0.25, 0.5, 0.25], [0.5, 0, 0.5]]
    with pytest.warns(UserWarning, match="not doubly stochastic: it makes the nodes' mean drift"):
        run(graph=topology.from_matrices([W]), gradient=None)
    run(graph=topology.from_matrices([W]), gradient=None, algorithm="sgd")
