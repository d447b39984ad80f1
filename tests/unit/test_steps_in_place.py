"""A step in blocks of columns, in place, is the step of the algorithm."""

import pytest
import torch
from torch.distributed import HashStore

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS, Overlap
from quasiglobal.engines.distributed import Distributed
from quasiglobal.engines.simulator import Simulator
from quasiglobal.stacked import step_blocks
from quasiglobal.stacked.step_blocks import ModelRows

ROWS, D = 4, 37
OVERLAPS = ["dsgd", "dsgdm-n", "dadam", "dadamw", "qg-dsgdm-n", "qg-dadam"]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    monkeypatch.setattr(step_blocks, "BLOCK", 12 * ROWS // torch.get_num_threads())


class Swap(qg.Algorithm):
    """Every result is the storage of another argument."""

    def init(self, x):
        return {"a": x + 1, "b": x + 2}

    def step(self, x, g, state, node):
        return state["a"], {"a": state["b"], "b": node.mix(x)}


class OutsideTorch(qg.Algorithm):
    """A norm that no recording of PyTorch's operations sees."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g / float((g.numpy() ** 2).sum())), state


def engine_of(graph="ring:4", **options):
    return Distributed(qg.topology.parse(graph), HashStore(), 0, [range(ROWS)], **options)


def both(algorithm, engine, weight_decay=0.0, lr=0.1, keeps_state=False):
    """Run 6 steps plainly and 6 in place; return both models, both states, and the steps that ran in blocks."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, D, dtype=torch.float64, generator=generator)
    pieces, state = [x[:, :11].clone(), x[:, 11:].clone()], engine.begin(algorithm, x)
    own, inside = {name: value.clone() for name, value in state.items()}, 0
    for t in range(1, 7):
        g = torch.randn(ROWS, D, dtype=torch.float64, generator=generator)
        how = {"t": t, "lr": torch.as_tensor(lr, dtype=x.dtype), "full_gradient": torch.sin, "gradient": torch.sin,
               "weight_decay": weight_decay}
        x, after = engine.step(algorithm, x, g, state, **how)
        state = state if keeps_state else after
        engine.step_in_place(algorithm, ModelRows(pieces), ModelRows([g]), own, keeps_state=keeps_state, **how)
        inside = sum(program is not None for program in engine._in_blocks.programs.values())
    return (x, torch.cat(pieces, dim=1)), (state, own), inside


def assert_equal(models, states):
    scale = models[0].norm()
    assert (models[0] - models[1]).norm() <= 1e-12 * scale
    for name, value in states[0].items():
        assert (value - states[1][name]).norm() <= 1e-12 * (scale + value.norm()), name


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_blocks_give_the_numbers_of_the_whole_step(name):
    graph = {"relaysgd": "star:4"}.get(name, "ring:4")
    columns = torch.linspace(0.01, 0.1, D, dtype=torch.float64)[None]
    for options, decay, lr in [({}, 0.0, 0.1), ({"shared": 30}, columns, columns), ({"rounded": True}, 0.01, 0.1)]:
        models, states, _ = both(ALGORITHMS[name], engine_of(graph, **options), decay, lr)
        assert_equal(models, states)


@pytest.mark.parametrize(("name", "inside"), [
    ("dsgd", True), ("qg-dsgdm-n", True), ("dsgdm-n-gt", True), ("dadam", True),
    ("qg-dadam", False), ("dsgd-clip", False), ("sgd", False), ("mimelite", False),     # norms, exact means, gradients
])
def test_a_step_that_needs_whole_rows_is_not_computed_in_blocks(name, inside):
    assert bool(both(ALGORITHMS[name], engine_of())[2]) == inside


@pytest.mark.parametrize(("algorithm", "inside"), [(Swap(), True), (OutsideTorch(), False)])
def test_a_users_algorithm_may_return_its_arguments_and_leave_pytorch(algorithm, inside):
    models, states, found = both(algorithm, engine_of())
    assert bool(found) == inside
    assert_equal(models, states)


def test_a_step_with_a_deadline_may_skip_others_and_is_not_computed_in_blocks():
    models, states, inside = both(ALGORITHMS["qg-dsgdm-n"], engine_of(round_deadline=1.0))
    assert not inside
    assert_equal(models, states)


def test_a_kept_state_does_not_change():
    models, (state, own), inside = both(ALGORITHMS["qg-dsgdm-n"], engine_of(), keeps_state=True)
    assert inside
    assert own["m_hat"].equal(state["m_hat"])
    assert_equal(models, ({}, {}))


@pytest.mark.parametrize("name", OVERLAPS)
def test_overlap_averages_the_models_before_the_local_step(name):
    """x⁺ = W x − η u: the base's own x⁺ without a graph is x − η u."""
    base, W = qg.algorithm(name), torch.from_numpy(qg.topology.ring(4).weights(1))
    alone, graph = Simulator(qg.topology.parse("every:9/ring:4")), Simulator(qg.topology.ring(4))
    x, g = torch.randn(2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    how = {"t": 1, "lr": torch.tensor(0.1, dtype=torch.float64), "full_gradient": torch.sin}
    local, _ = alone.step(base, x, g, alone.begin(base, x), **how)
    new, _ = graph.step(Overlap(base=base), x, g, graph.begin(Overlap(base=base), x), **how)
    torch.testing.assert_close(new, W @ x + local - x, rtol=0, atol=1e-13)
    models, states, _ = both(Overlap(base=base), engine_of())
    assert_equal(models, states)


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if name not in (*OVERLAPS, "dsgdm", "qg-dsgdm")])
def test_overlap_refuses_algorithms_that_are_not_one_local_step_and_one_average(name):
    with pytest.raises(qg.InputError, match="overlap needs an algorithm that makes a local step"):
        Overlap(base=ALGORITHMS[name])
