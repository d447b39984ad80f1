"""The step of an algorithm as one kernel equals its plain step. In Triton's interpreter, unless there is a GPU."""

import pytest
import torch

import quasiglobal as qg
from quasiglobal import topology
from quasiglobal.algorithms import ALGORITHMS, algorithm
from quasiglobal.algorithms.base import zeros
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.traced import traced_step
from quasiglobal.stacked import step_kernel as kernels
from quasiglobal.stacked.step import recorded_step
from quasiglobal.stacked.step_kernel import OPERATIONS, SUMS, StepKernel
from quasiglobal.training.bands import Band

pytest.importorskip("triton")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
COLUMNS, SHARED, BLOCK = 70, 67, 64
"""The last block is not full, and not all of it is mixed."""

WITHOUT = {
    **dict.fromkeys(("mimelite", "dfedsam"), "needs further gradients"),
    **dict.fromkeys(("choco", "adagossip", "beer", "motef"), "sends compressed messages"),
    **dict.fromkeys(("sgp", "qg-sgp", "push-diging", "ab"), "pushes"),
    "proxskip": "draws random numbers",
}
"""The algorithms that have no kernel."""

pytestmark = pytest.mark.filterwarnings("ignore:.*needs:UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Use kernels on a CPU too, with programs of one warp: in float64 and with 8 rows, 64 columns."""
    monkeypatch.setattr(kernels, "available", lambda x: True)
    monkeypatch.setattr(kernels, "WARPS", 1)


class SignSGD(qg.Algorithm):
    """The example of docs/your-own.md."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g.sign()), state


def random(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator).to(DEVICE)


def band_of(chosen, graph="ring:5", runs=2, shared=SHARED, weight_decay=0.0, x=None, **how):
    """A band with a state, and its x."""
    engine = Simulator(topology.parse(graph), seeds=tuple(range(runs)), shared=shared, **how)
    x = random(engine.rows, COLUMNS) if x is None else x
    band = Band(algorithm(chosen), engine, 0, weight_decay)
    band.begin_at(x)
    return band, x


def kernel_of(band, x, t=1, lr=None):
    time, lr = x.new_tensor(t), x.new_tensor(0.1) if lr is None else lr
    return band.kernel(t, x, x.clone(), time, lr)


def stepped(chosen, graph, lr, in_place, steps):
    """Return x and the band after some steps of two runs towards the rows of a target."""
    rows = 2 * topology.parse(graph).n
    decay = torch.linspace(0, 0.1, rows, dtype=torch.float64, device=DEVICE)[:, None]
    band, x = band_of(chosen, graph, weight_decay=decay)
    target, time = random(rows, COLUMNS, seed=1), x.new_tensor(1.0)
    for t in range(1, steps + 1):
        arguments = (x, x - target, t, time, lr, lambda x: x - target, lambda x: x - target)
        if in_place:
            band.step_in_place(*arguments, fused=False)
        else:
            x = band.step(*arguments)
        time += 1
    return x, band


def check(chosen, graph="ring:5", lr=None, steps=4):
    """Compare steps by kernels with plain steps; return the kernels."""
    rows = 2 * topology.parse(graph).n
    lr = torch.linspace(0.05, 0.1, rows, dtype=torch.float64, device=DEVICE)[:, None] if lr is None else lr
    x, band = stepped(chosen, graph, lr, True, steps)
    expected, plain = stepped(chosen, graph, lr, False, steps)
    assert list(band.state) == list(plain.state)
    for ours, value in zip([x, *band.state.values()], [expected, *plain.state.values()], strict=True):
        assert (ours - value).abs().max() <= 1e-12 * value.abs().max()
    return list(band.programs.values())


GRAPHS = ("ring:5", "one-peer-exponential:4", "every:2/torus:9", "every:2/equidyn:5")
OPTIONS = (
    "qg-dsgdm:tau=2", "qg-dsgdm-n:tau=2,released=true", "slowmo:tau=3,buffers=average", "slowmo:base=d2,average=false",
    "dsgdm:sync=momentum,over=all", "dsgdm-n:sync=gradient", "dadam:beta2=0.999", "gossip:base=dmsgd",
    "qg-dadam:released=true",
    "gossip-pga:tau=2,beta=0.9", "k-gt:tau=2", "led:tau=2", "dfedavgm:tau=2", "diloco:tau=2", "noloco:tau=2",
    "dadamw:lam=0.1", "dsgd-ac:beta=0.9,nesterov=true", "qg-gut:nesterov=true",
)
QUICK = {
    ("qg-dsgdm-n", "one-peer-exponential:4"), ("dsgdm-n-gt", "ring:5"), ("dadam", "ring:5"), ("dmsgd", "ring:5"),
    ("sgdm-n", "ring:5"), ("slowmo:tau=3,buffers=average", "one-peer-exponential:4"), ("d2+", "every:2/torus:9"),
    ("qg-dadam", "ring:5"),
    ("qg-dsgdm-n", "every:2/equidyn:5"),
}
"""The cases of the fast tests: the interpreter takes a second for each."""


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        pytest.param(name, graph, marks=() if (name, graph) in QUICK else pytest.mark.slow)
        for graph in GRAPHS for name in (*ALGORITHMS, *OPTIONS) if name not in WITHOUT and name != "relaysgd"
    ],
)
def test_the_kernel_is_the_plain_step(name, graph):
    assert all(type(program) is StepKernel for program in check(name, graph))


def test_a_kernel_mixes_lazily_too():
    assert not algorithm("edm").needs.allow(topology.ring(4).lambda_min)
    assert all(type(program) is StepKernel for program in check("edm", "ring:4", steps=2))


@pytest.mark.parametrize(
    ("name", "graph"),
    [
        ("relaysgd", "chain:5"),
        pytest.param("relaysgd:fill=start,beta=0.9,nesterov=true", "tree:7", marks=pytest.mark.slow),
        pytest.param("relaysgd:fill=start,base=dadam", "star:5", marks=pytest.mark.slow),
        ("lt-admm:tau=1,beta=0.9", "ring:5"),
        pytest.param("lt-admm:tau=2,couple=true", "torus:9", marks=pytest.mark.slow),
        pytest.param("lt-admm:tau=1", "every:2/ring:5", marks=pytest.mark.slow),
    ],
)
def test_a_kernel_exchanges_messages_per_edge(name, graph):
    """The counts of relaysgd have no columns: all programs read the old ones, so that their new ones come last."""
    assert all(type(program) is StepKernel for program in check(name, graph, steps=6))


class Neighbourly(qg.Algorithm):
    """Sends other numbers on each edge, keeps what came last, and counts senders and receivers."""

    def init(self, x):
        return zeros(x, "m")

    def init_edges(self, x, edges):
        return {"inbox": x.new_zeros(len(x), edges.degree, x.shape[1]), "seen": x.new_zeros(len(x), edges.degree, 1)}

    def step(self, x, g, state, node):
        edges, x = node.edges, x - node.lr * g
        (inbox, seen), came = node.exchange(x[:, None] - 0.3 * state["inbox"], state["seen"] + 1)
        inbox, seen = torch.where(came, inbox, state["inbox"]), torch.maximum(seen, state["seen"])
        x = edges.senders.sum(dim=1) * x + (inbox / (1 + seen)).sum(dim=1)
        x = torch.where(edges.receivers.any(dim=1), x, 0.5 * x)
        return torch.where(came.any(dim=1), x, 0.3 * x), {"m": g, "inbox": inbox, "seen": seen}


@pytest.mark.parametrize("graph", ["ring:5", "one-peer-exponential:4", "exponential:5", "star:4", "every:2/chain:4"])
def test_a_kernel_exchanges_messages_of_ones_own(graph):
    assert all(type(program) is StepKernel for program in check(Neighbourly(), graph, steps=5))


def test_messages_of_too_many_edges_have_no_kernel():
    assert kernel_of(*band_of("lt-admm:tau=1", "complete:16", runs=1)) is None


def test_algorithms_of_ones_own_have_kernels():
    assert all(type(program) is StepKernel for program in check(SignSGD()))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_most_algorithms_have_kernels(name):
    found = [kernel_of(*band_of(name), t) is not None for t in (1, 2)]
    assert found == [name not in WITHOUT] * 2


@pytest.mark.parametrize("name", WITHOUT)
def test_other_steps_stay_plain(name):
    assert set(check(name)) == {None}


def test_steps_between_those_with_further_gradients_have_kernels():
    assert [type(program) for program in check("mimelite:tau=3")] == [StepKernel, StepKernel, type(None)]


@pytest.mark.parametrize("shape", [(), (10, 1), (1, COLUMNS), (10, COLUMNS)], ids=str)
def test_learning_rates_broadcast(shape):
    lr = 0.1 + 0.01 * random(*shape, seed=2).abs()
    assert all(type(program) is StepKernel for program in check("qg-dsgdm-n", lr=lr, steps=1))


class Everything(qg.Algorithm):
    """Computes each function of `FUNCTIONS` into its own state."""

    def init(self, x):
        return zeros(x, *map(str, range(len(FUNCTIONS))))

    def step(self, x, g, state, node):
        return x, {name: function(x, g, node).expand_as(x) for name, function in zip(state, FUNCTIONS, strict=True)}


FUNCTIONS = [
    lambda x, g, node: node.mix(g * g),
    lambda x, g, node: node.mean(g * g),
    lambda x, g, node: torch.add(x, g, alpha=0.3),
    lambda x, g, node: torch.sub(x, g, alpha=0.3),
    lambda x, g, node: 1 - node.lr,
    lambda x, g, node: -x / g + x / 0.3,
    lambda x, g, node: x.reciprocal(),
    lambda x, g, node: torch.addcmul(x, g, node.lr, value=0.7),
    lambda x, g, node: torch.addcdiv(x, g, node.lr, value=-0.7),
    lambda x, g, node: torch.lerp(x, g, 0.1) * torch.lerp(x, g, 0.9),
    lambda x, g, node: torch.lerp(x, g, node.lr.expand_as(x)),
    lambda x, g, node: x.abs().sqrt() + (x * x).rsqrt(),
    lambda x, g, node: 1 - 0.9**node.time,
    lambda x, g, node: x**2 + x**3 + g.abs() ** 0.5,
    lambda x, g, node: x.exp() + g.abs().log(),
    lambda x, g, node: (5 * x).floor() + g.sign() + (x - x).sign(),
    lambda x, g, node: x.relu(),
    lambda x, g, node: x.clamp(-0.1, 0.1) + x.clamp(max=0.3) + g.clamp(min=0.3),
    lambda x, g, node: x.clamp_min(0.1) + x.clamp_max(0.1),
    lambda x, g, node: torch.maximum(x, g) - torch.minimum(x, node.lr),
    lambda x, g, node: torch.zeros_like(g) + torch.ones_like(node.lr) + torch.full_like(x, 0.1),
    lambda x, g, node: torch.where(torch.logical_and(x > g, x >= 0) | torch.logical_or(g < 0, x <= g), x, g),
    lambda x, g, node: torch.where((x < node.lr) | (g >= x), x, g),
    lambda x, g, node: torch.where((x > 0.1) & ~(g >= 0.1) & (x < 2.1), x, torch.where(x <= 0.3, g, node.lr)),
    lambda x, g, node: torch.where(torch.logical_not((x == g) | (x == 0.1)), x, g),
    lambda x, g, node: x.clone().detach().view(x.shape),
    lambda x, g, node: torch.where((x != g) & (g != 0.1), x, g),
    lambda x, g, node: torch.where(x > g, x, 0.3),
    lambda x, g, node: x / node.mix(g - (g * g).sum(dim=1, keepdim=True)).norm(dim=-1, keepdim=True),
]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")       # NumPy's, about NaN, in the interpreter
def test_each_operation_is_pytorchs():
    band, x = band_of(Everything())
    x[0, 0], x[1, 1], x[2, 2] = float("nan"), float("inf"), -float("inf")
    arguments = (x, random(*x.shape, seed=3), x.new_tensor(3.0), x.new_tensor(0.1))
    step = recorded_step(
        traced_step(band.algorithm, band.engine, 0.0, 3, list(band.state)), (*arguments, *band.state.values()), []
    )
    assert {node.target for node in step.nodes if node.op == "call_function"} >= {*OPERATIONS, *SUMS}
    _, expected = band._stepped(x, arguments[1], band.state, 3, *arguments[2:], None)
    band.kernel(3, *arguments)(*arguments, *band.state.values())
    for name, value in expected.items():
        torch.testing.assert_close(band.state[name], value, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


class WithFactor(qg.Algorithm):
    """Has a factor of each node as its state, which no program may change while others read it."""

    def init(self, x):
        return {"factor": x.new_ones(len(x), 1)}

    def step(self, x, g, state, node):
        factor = state["factor"]
        return node.mix(x - factor * node.lr * g), {"factor": 0.9 * node.mix(factor)}


class WithNorm(WithFactor):
    """The factor depends on all columns."""

    def step(self, x, g, state, node):
        return node.mix(x - state["factor"] * g), {"factor": 1 / (1 + g.norm(dim=1, keepdim=True))}


class Counting(WithFactor):
    """Changes nothing but a number of each node."""

    def step(self, x, g, state, node):
        return x, {"factor": 1 + state["factor"]}


class WithFixedFactor(WithFactor):
    def step(self, x, g, state, node):
        return node.mix(x - state["factor"] * node.lr * g), state


class InPlace(qg.Algorithm):
    """Changes a tensor in place."""

    def step(self, x, g, state, node):
        return x.clone().sub_(node.lr * g), state


class Reading(qg.Algorithm):
    """Reads a number from the device."""

    def step(self, x, g, state, node):
        return x - float(node.lr.sum()) * g, state


class Whole(qg.Algorithm):
    """Counts in whole numbers."""

    def init(self, x):
        return {"count": torch.zeros_like(x, dtype=torch.int64)}

    def step(self, x, g, state, node):
        return x - node.lr * g, {"count": state["count"] + 1}


class Doing(qg.Algorithm):
    """Does nothing."""

    def step(self, x, g, state, node):
        return x, state


@pytest.mark.parametrize("own", [WithFixedFactor, WithNorm, Counting])
def test_a_state_by_node_changes_after_all_programs_have_read_it(own):
    assert all(type(program) is StepKernel for program in check(own(), steps=3))


@pytest.mark.parametrize("own", [WithFactor, InPlace, Reading, Whole, Doing])
def test_steps_without_a_translation_stay_plain(own):
    assert set(check(own(), steps=2)) == {None}


@pytest.mark.parametrize("how", [{"drop": 0.1}, {"churn": 0.1}, {"rounded": True}], ids=str)
def test_faults_and_rounding_have_no_kernel(how):
    assert kernel_of(*band_of("dsgd", **how)) is None


@pytest.mark.parametrize("participation", [0.5, 1.0])
def test_random_nodes_have_no_kernel(participation):
    band, x = band_of(f"mimelite:tau=2,participation={participation}")
    assert (kernel_of(band, x) is None) == (participation < 1)


@pytest.mark.parametrize(
    ("graph", "dtype", "fits"),
    [
        ("ring:16", torch.float64, True), ("ring:17", torch.float64, False), ("ring:32", torch.float32, True),
        ("ring:33", torch.float32, False), ("complete:22", torch.float32, True), ("complete:24", torch.float32, False),
    ],
)
def test_many_nodes_and_many_messages_have_no_kernel(graph, dtype, fits):
    x = torch.zeros(topology.parse(graph).n, COLUMNS, dtype=dtype, device=DEVICE)
    assert (kernel_of(*band_of("dsgd", graph, runs=1, x=x)) is not None) == fits


def test_there_is_no_kernel_without_triton_and_a_gpu(monkeypatch):
    monkeypatch.undo()
    band, x = band_of("dsgd", x=torch.zeros(10, COLUMNS))
    assert kernel_of(band, x) is None


def test_a_kernel_that_does_not_compile_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(StepKernel, "compile", lambda *arguments: 1 / 0)
    assert kernel_of(*band_of("dsgd")) is None
    assert "Triton cannot compile the step of DSGD()" in caplog.text


def test_positions_of_a_topology_share_one_kernel():
    band, x = band_of("qg-dsgdm-n", "one-peer-exponential:4")
    first, second = (kernel_of(band, x, t) for t in (1, 2))
    (first,), (second,) = first.passes, second.passes
    assert first.function is second.function
    assert not first.weights[0].equal(second.weights[0])


class MixingProduct(qg.Algorithm):
    """Mixes a product: as a fused product and sum, its rounding would differ between the nodes."""

    def step(self, x, g, state, node):
        return node.mix(x * g), state


def test_nodes_that_agree_stay_equal():
    x = random(1, COLUMNS).float().expand(10, COLUMNS).contiguous()
    g = random(1, COLUMNS, seed=1).float().expand(10, COLUMNS).contiguous()
    band, x = band_of(MixingProduct(), x=x)
    expected = x * g
    band.step_in_place(x, g, 1, x.new_tensor(1.0), x.new_tensor(0.1), None, fused=False)
    assert [type(program) for program in band.programs.values()] == [StepKernel]
    assert x.equal(expected)


@pytest.mark.parametrize("lr", [torch.tensor(0.1, dtype=torch.float64), "own"], ids=["one rate", "own rates"])
def test_a_kernel_serves_another_number_of_runs(lr):
    def step(band, x, in_place):
        rates = 0.1 + 0.01 * random(len(x), 1, seed=2).abs() if lr == "own" else lr.to(x)
        how = (random(*x.shape, seed=1), 1, x.new_tensor(1), rates, torch.zeros_like)
        return band.step_in_place(x, *how, fused=False) if in_place else band.step(x, *how)

    first, x = band_of("slowmo:tau=3,buffers=average")
    step(first, x, in_place=True)
    (kernel,) = first.programs.values()
    for runs in (1, 3):
        (band, x), (plain, same) = (band_of("slowmo:tau=3,buffers=average", runs=runs) for _ in range(2))
        band.take_kernels(first)
        step(band, x, in_place=True)
        assert list(band.programs.values()) == [kernel]
        assert (x - step(plain, same, in_place=False)).abs().max() <= 1e-12
    alone, x = band_of("sgdm-n", "complete:1", runs=1)
    several, _ = band_of("sgdm-n", "complete:1")
    step(alone, x, in_place=True)
    several.take_kernels(alone)
    assert not several.programs, "in a single row, a scalar looks like a column"
