"""In-place steps, compiled or not, equal the algorithm's pure step."""

import pytest
import torch

from quasiglobal import topology
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.engines.simulator import Simulator
from quasiglobal.training.bands import Band

ROWS, COLUMNS = 8, 5
GRAPH = topology.parse("one-peer-exponential:4")
GRAPHS = {"relaysgd": topology.star(4), "lt-admm": topology.ring(4)}


def minimised(name, how):
    """Return x and the band after 7 steps towards the rows of a target."""
    torch.manual_seed(0)
    target = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
    x = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    engine = Simulator(GRAPHS.get(name, GRAPH), seeds=(0, 1), shared=COLUMNS - 1)
    band = Band(ALGORITHMS[name], engine, 0, weight_decay=0.1)
    band.begin_at(x)
    rates = torch.linspace(0.05, 0.1, ROWS, dtype=torch.float64)[:, None]
    time = torch.tensor(1.0, dtype=torch.float64)
    for t in range(1, 8):
        arguments = (x, x - target, t, time, rates, lambda x: x - target + 0.1 * x, lambda x: x - target)
        if how == "pure":
            x = band.step(*arguments)
        else:
            band.step_in_place(*arguments, fused=how != "in place")
        time += 1
    return x, band


@pytest.mark.filterwarnings("ignore:.*needs:UserWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("how", ["in place", pytest.param("inductor", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_step_in_place_is_the_step(name, how):
    x, band = minimised(name, how)
    expected, pure = minimised(name, "pure")
    torch.testing.assert_close(x, expected, rtol=1e-12, atol=1e-12)
    assert list(band.state) == list(pure.state)
    for key, value in pure.state.items():
        torch.testing.assert_close(band.state[key], value, rtol=1e-12, atol=1e-12)
    if how != "in place":
        fused = [program is not None for program in band.programs.values()]
        assert all(fused) or name in ("mimelite", "dfedsam"), "only steps that ask for further gradients are not fused"
