"""Mixing uses full precision under every precision setting: quasi-global momentum depends on it."""

import re
from threading import Event, Thread

import numpy as np
import pytest
import torch

import quasiglobal as qg
from quasiglobal.engines.simulator import Simulator
from quasiglobal.runs.estimate import prepare
from quasiglobal.runs.options import Options
from quasiglobal.stacked.precision import _switches
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program

N, D, STEPS = 16, 200, 240

devices = pytest.mark.parametrize("device", ["cpu"] + (["cuda"] if torch.cuda.is_available() else []))


def rounded(v, bits):
    """Round float32 to `bits` bits of mantissa: 10 is TF32, 7 is bf16."""
    raw = v.contiguous().view(torch.int32)
    drop = 23 - bits
    return ((raw + (1 << (drop - 1))) >> drop << drop).view(torch.float32)


class RoundingSimulator(Simulator):
    """Mixes W v as a tensor core would: operands rounded, products summed in float32."""

    def __init__(self, graph, bits):
        super().__init__(graph)
        self.bits = bits

    def mix(self, t, tensors, time=None):
        W = torch.tensor(self.topology.weights(t), dtype=torch.float32)
        return tuple(rounded(W, self.bits) @ rounded(v, self.bits) for v in tensors)


def buffer_error(engine=None):
    """Error of the float32 momentum buffer against float64, relative to the gradients, after two lr decays."""
    rng = np.random.default_rng(0)
    centre = torch.from_numpy(rng.standard_normal((N, D)))
    noise = torch.from_numpy(rng.standard_normal((STEPS, N, D)))
    start = torch.from_numpy(3 + rng.standard_normal(D))

    def run(dtype, engine):
        return qg.minimize(
            lambda x, t: x - centre.to(dtype) + noise[t - 1].to(dtype), start.to(dtype),
            "qg-dsgdm", "ring:16", lr=lambda t: 0.1 * 0.1 ** (t // 80), steps=STEPS, engine=engine,
        )

    exact, approximate = run(torch.float64, None), run(torch.float32, engine)
    gradients = exact.x - centre + noise[-1]
    return float((approximate.state["m_hat"] - exact.state["m_hat"]).norm() / gradients.norm())


# One rounding of x ≈ 3 in float32 is 1e-7; over lr = 0.001 it is 1e-4 of a gradient, and the buffer averages.
BOUND = 1e-4


def test_float32_mixing_keeps_the_momentum_buffer():
    assert buffer_error() < BOUND


@pytest.mark.parametrize("bits", [10, 7], ids=["TF32", "bf16"])
def test_that_bound_fails_under_tensor_core_mixing(bits):
    assert buffer_error(RoundingSimulator(qg.topology.ring(16), bits)) > 10 * BOUND


def mixed(device):
    v = torch.randn(N, D, generator=torch.Generator().manual_seed(0)) + 100
    engine = Simulator(qg.topology.ring(N))
    exact = torch.from_numpy(engine.topology.weights()) @ v.double()
    ours = engine.mix(1, (v.to(device),))[0]
    assert ours.dtype == torch.float32
    return float((ours.cpu() - exact).abs().max())


# Half a unit in the last place at 100 is 4e-6; a TF32 or bf16 product of the differences is off by 1e-3.
MIX_BOUND = 1e-5


@devices
def test_mixing_is_float32_by_default(device):
    assert mixed(device) < MIX_BOUND


@devices
def test_autocast_does_not_reach_into_mixing(device):
    with torch.autocast(device, dtype=torch.bfloat16):
        assert mixed(device) < MIX_BOUND


@devices
def test_a_lower_matmul_precision_does_not_reach_into_mixing(device):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        assert mixed(device) < MIX_BOUND
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)


def test_nodes_that_agree_stay_bit_for_bit():
    for name in ("social", "torus:16", "one-peer-exponential:6"):
        engine = Simulator(qg.topology.parse(name))
        v = torch.randn(1, D).expand(engine.topology.n, D)
        assert engine.mix(1, (v,))[0].equal(v)


def test_a_step_without_gossip_returns_what_it_was_given():
    engine = Simulator(qg.topology.parse("every:2/ring:4"))
    v = torch.randn(4, 3)
    assert engine.mix(1, (v,))[0] is v


def test_models_that_travel_in_16_bits_keep_the_mean():
    graph = qg.topology.ring(8)
    x = torch.randn(8, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    (mixed,) = Simulator(graph, rounded=True).mix(1, (x,))
    delta = torch.from_numpy(graph.weights()) - torch.eye(8)
    assert torch.allclose(mixed, x + delta @ x.bfloat16().double(), rtol=0, atol=1e-14)
    assert torch.allclose(mixed.mean(dim=0), x.mean(dim=0), rtol=0, atol=1e-14)
    assert not torch.allclose(mixed, x + delta @ x, rtol=0, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n", "qg-dadam", "d2+"])
def test_what_differences_mixed_models_is_not_sent_in_16_bits(algorithm):
    with pytest.raises(qg.InputError, match=f"{re.escape(algorithm)} uses small differences .* use --wire full"):
        training_on_digits(algorithm)
    training_on_digits("dsgdm-n")


def training_on_digits(algorithm):
    experiment = Experiment(model="mlp", topology="lazy/ring:4", algorithm=algorithm, wire="bf16")
    return Program(*prepare(experiment, Options(device="cpu")), torch.device("cpu"))


@pytest.mark.parametrize("spec", ["ring:400", "one-peer-exponential:256", "every:2/ring:400"])
def test_many_nodes_add_their_neighbours_one_by_one(spec):
    graph = qg.topology.parse(spec)
    engine = Simulator(graph, seeds=(0, 1), shared=3)
    x = torch.randn(2, graph.n, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for t in (1, 2):
        expected = x.clone()
        expected[..., :3] = torch.from_numpy(graph.weights(t)) @ x[..., :3]
        mixed = engine.mix(t, (x.flatten(0, 1),))[0].view_as(x)
        torch.testing.assert_close(mixed, expected, rtol=0, atol=1e-14)
    same = torch.full((2 * graph.n, 5), 0.1)
    assert engine.mix(1, (same,))[0].equal(same)


def test_threads_share_the_switches_and_leave_them_as_they_were():
    """PyTorch refuses `cudnn.flags` if convolutions and recurrences differ, as after a thread that left too early."""
    def precisions():
        return [part.fp32_precision for part in _switches("cuda").parts]

    before, entered, leave = precisions(), Event(), Event()

    def other():
        with _switches("cuda"):
            entered.set()
            leave.wait(10)

    with _switches("cuda"):
        thread = Thread(target=other)
        thread.start()
        assert entered.wait(10)
    assert precisions() == ["ieee"] * 3
    with torch.backends.cudnn.flags(enabled=False):
        pass
    leave.set()
    thread.join()
    assert precisions() == before
