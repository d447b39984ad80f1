"""Steps by the door of the compiler, `compiled`, and by Inductor, equal the plain functions."""

import pytest
import torch

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.traced import step_of_tensors
from quasiglobal.stacked import step_blocks, step_kernel
from quasiglobal.stacked.compiling import step_by_inductor
from quasiglobal.stacked.recording import Untraceable
from quasiglobal.stacked.step import recorded_step
from quasiglobal.stacked.step_blocks import compiled

K, D = 5, 70


def random(*shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def momentum(x, g, m, lr, mix):
    m = 0.9 * m + g
    return mix(x - lr * m), g, m, lr


def towards_the_mean(x, g, mean):
    return x - 0.1 * g + 0.1 * (mean(x) - x), g


def swapped(x, y):
    return y, x


def scaled(x, g):
    """Norms need whole rows."""
    return x - g / g.norm(dim=1, keepdim=True), g


def outside(x, g):
    """A norm that no record of PyTorch's operations has."""
    return x - g / float((g.numpy() ** 2).sum()), g


W = qg.topology.ring(K).weights(1)
FUNCTIONS = {
    momentum: ((K, D), (K, D), (K, D), (K, 1)), towards_the_mean: ((K, D), (K, D)), swapped: ((K, D), (K, D)),
    scaled: ((K, D), (K, D)), outside: ((K, D), (K, D)),
}
OPERATIONS = {momentum: {"mix": torch.from_numpy(W)}, towards_the_mean: {"mean": None}}
PLAIN = {
    momentum: lambda *values: momentum(*values, mix=lambda v: torch.from_numpy(W) @ v),
    towards_the_mean: lambda *values: towards_the_mean(*values, mean=lambda v: v.mean(dim=0, keepdim=True)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.parametrize("how", ["as it is", "in blocks", "kernel"])
def test_a_compiled_function_overwrites_its_arguments_with_its_results(function, how, monkeypatch):
    monkeypatch.setattr(step_blocks, "BLOCK", 12 * K if how == "in blocks" else 10**6)
    if how == "kernel":
        pytest.importorskip("triton")
        if function is outside:
            pytest.skip("on a CPU, a record sees no NumPy")
        monkeypatch.setattr(step_kernel, "available", lambda x: True)
        monkeypatch.setattr("quasiglobal.stacked.step_blocks.available", lambda x: True)
        monkeypatch.setattr(step_kernel, "WARPS", 1)
    tensors = [random(*shape, seed=k) for k, shape in enumerate(FUNCTIONS[function])]
    expected = [value.clone() for value in tensors]
    step = compiled(function, like=tensors, operations=OPERATIONS.get(function))
    for _ in range(3):
        expected = PLAIN.get(function, function)(*expected)
        step(*tensors)
    for ours, value in zip(tensors, expected, strict=True):
        torch.testing.assert_close(ours, value, rtol=1e-12, atol=1e-13)
    translated = {"in blocks": function in (momentum, swapped), "kernel": True}.get(how, False)
    assert getattr(step, "__name__", "") != "as_it_is" if translated else step.__name__ == "as_it_is"


def test_other_operations_are_refused():
    with pytest.raises(ValueError, match="the operations among rows are mix and mean, got push"):
        compiled(momentum, like=[random(K, D)] * 4, operations={"push": None})


@pytest.mark.filterwarnings("ignore:.* needs a fixed", "ignore:D2 needs")
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_that_the_compiler_gets_is_the_step(name):
    """Without Inductor itself, which takes seconds: the recorded graph, views replaced, writes at its end."""
    graph = qg.topology.parse({"relaysgd": "star:5"}.get(name, "ring:5"))
    algorithm, engine, g = ALGORITHMS[name], Simulator(graph, seeds=(0, 1), shared=67), random(2 * K, D, seed=1)
    x, lr = random(2 * K, D), torch.linspace(0.05, 0.1, 2 * K, dtype=torch.float64)[:, None]
    state = {name: value.clone() for name, value in engine.begin(algorithm, x).items()}
    for t in (1, 2, 3):
        time = x.new_tensor(float(t))
        step = step_of_tensors(algorithm, engine, 1e-3, t, list(state))
        arguments = (x, g, time, lr, *state.values())
        try:
            expected = [value.clone() for value in step(*arguments)]
        except Untraceable:                                 # it needs further gradients
            assert name in ("mimelite", "dfedsam")
            return
        engine.prepare(t, x)
        outputs = [0, *range(4, len(arguments))]
        step_by_inductor(recorded_step(step, arguments, outputs), backend="eager")(*arguments)
        for ours, value in zip((x, *state.values()), expected, strict=True):
            assert (ours - value).abs().max() <= 1e-12 * (1 + value.abs().max())
