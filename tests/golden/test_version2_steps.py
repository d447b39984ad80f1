"""Twenty steps of each algorithm of version 2, what it refuses and warns of, and the kernels of its steps, as recorded.

version2/README.md says by what. The tests of iterates use only `qg.minimize`, those on a GPU only `qg.train`.
"""

import json
import lzma
import warnings
from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

import quasiglobal as qg

HERE = Path(__file__).parent / "version2" / "steps"

STEPS, MIDDLE, DECAY, SEED = 20, 10, 0.01, 5
GRAPHS = ("ring:8", "star:8", "one-peer-exponential:8")

OPTIONS = (
    "dsgdm:sync=momentum,over=all", "dsgdm-n:sync=momentum", "dsgdm-n:sync=gradient", "dadam:beta2=0.999",
    "dadamw:lam=0.1", "qg-dsgdm:tau=2", "qg-dsgdm-n:tau=2", "qg-dsgdm-n:tau=2,released=true", "qg-dsgdm-n:mu=0.5",
    "qg-dadam:released=true", "slowmo:base=qg-dsgdm-n", "slowmo:tau=3,buffers=average", "slowmo:tau=3,released=true",
    "slowmo:base=d2,average=false,tau=4", "gossip:base=dmsgd", "mimelite:tau=3,participation=0.5",
    "gossip-pga:tau=3,beta=0.9,nesterov=true", "gut:beta=0.9", "qg-gut:nesterov=true", "k-gt:tau=3,server_lr=0.7",
    "led:tau=3", "proxskip:p=0.4", "momentum-tracking:init=mean", "dsgd-ac:beta=0.9,nesterov=true",
    "dfedavgm:beta=0.5,tau=3", "dfedsam:rho=0.3,beta=0.5,tau=3,gossips=2", "diloco:tau=4", "diloco:base=dsgdm,tau=3",
    "noloco:tau=4", "noloco:base=dsgdm,tau=3", "lt-admm:tau=1,beta=0.9", "lt-admm:tau=2,couple=true",
    "relaysgd:fill=start,beta=0.9,nesterov=true", "relaysgd:fill=start,base=dadam", "sgp:beta=0.9",
    "qg-sgp:nesterov=false", "push-diging:sums=true,beta=0.9", "ab:beta=0.9", "choco:beta=0.9,gamma=0.3",
    "overlap/dsgdm-n", "overlap/qg-dsgdm-n", "overlap/dadam",
)
SETTINGS = (
    "choco wire=topk:0.25", "choco wire=randk:0.25", "adagossip wire=sign", "beer wire=qsgd:4", "motef wire=randk:0.5",
    "dsgdm-n wire=bf16", "qg-dsgdm-n wire=bf16", "dsgd wire=sign", "dsgdm-n drop=0.3", "qg-dsgdm-n drop=0.2 churn=0.2",
    "dsgd-gt drop=0.3", "lt-admm:tau=1 drop=0.3 churn=0.2", "push-diging:sums=true drop=0.3",
    "choco wire=randk:0.5 drop=0.2", "sgdm-n drop=0.3", "decentlam drop=0.3", "qg-dsgdm-n weights=1,2,3,4,4,3,2,1",
    "dsgd-gt weights=1,2,3,4,4,3,2,1", "slowmo:tau=3 weights=1,2,3,4,4,3,2,1", "sgdm-n weights=1,2,3,4,4,3,2,1",
    "lt-admm weights=1,2,3,4,4,3,2,1",
)
"""Algorithms with further arguments of `qg.minimize`."""

# Relative to the largest coordinate. Not bit for bit: another CPU adds in another order. With kernels of other
# instruction sets, or the last digit of all inputs changed, the worst error is 9e-15, of gut.
TOLERANCE = 1e-13

WORDS = 6
"""The first words of a sentence, which are compared: an improved remedy is no other behaviour."""


def chosen(text):
    """An algorithm; `overlap/` stands for the wrapper that has no name of its own."""
    name = text.removeprefix("overlap/")
    return qg.algorithm(name) if name == text else qg.algorithms.Overlap(base=qg.algorithm(name))


def settings_of(words):
    read = {"wire": str, "drop": float, "churn": float, "weights": lambda text: [float(one) for one in text.split(",")]}
    pairs = (word.split("=", 1) for word in words)
    return {name: read[name](text) for name, text in pairs}


def begun(error):
    return " ".join(str(error).split()[:WORDS])


def rate(t):
    return 0.05 if t <= 12 else 0.005


def problem(inputs, device="cpu"):
    """Gradients, and where they begin: node i minimises ½‖A_i x − b_i‖² over every other row of A_i at a step.

    The full gradient is over all rows.
    """
    A, b, x0 = (torch.from_numpy(inputs[name]).to(device) for name in ("A", "b", "x0"))

    def gradient(x, t, every=2):
        residual = torch.einsum("nij,nj->ni", A, x) - b
        residual[:, (t + torch.arange(A.shape[1], device=device)) % every != 0] = 0
        return torch.einsum("nij,ni->nj", A, residual)

    return gradient, partial(gradient, t=0, every=1), x0


def path(case, graph, inputs, device="cpu"):
    """The iterates after the middle step and the last one, and what else there is to say of a run."""
    gradient, full_gradient, x0 = problem(inputs, device)
    text, *words = case.split()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always", UserWarning)
        try:
            result = qg.minimize(
                gradient, x0, chosen(text), graph, lr=rate, steps=STEPS,
                weight_decay=DECAY, full_gradient=full_gradient, seed=SEED, **settings_of(words),
            )
        except qg.InputError as error:
            return None, {"refused": begun(error)}
    said = {"state": {name: list(value.shape) for name, value in result.state.items()}}
    if warned:
        said["warned"] = sorted({begun(one.message) for one in warned})
    return result.history[[MIDDLE, STEPS]].cpu().numpy(), said


def recorded():
    return dict(np.load(HERE / "iterates.npz")), json.loads((HERE / "cases.json").read_text())


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a GPU"
))])
@pytest.mark.parametrize("graph", GRAPHS)
def test_twenty_steps_of_every_algorithm_are_the_recorded_ones(graph, device):
    arrays, cases = recorded()
    expected, errors = iter(arrays[graph]), {}
    for case, told in cases[graph].items():
        iterates, said = path(case, graph, arrays, device)
        assert said == told, case
        if iterates is not None:
            theirs = next(expected)
            errors[case] = np.abs(iterates - theirs).max() / np.abs(theirs).max()
    assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


def test_every_recorded_algorithm_runs_on_some_graph():
    """Algorithms that later versions add need no record."""
    _, cases = recorded()
    assert list(cases) == list(GRAPHS)
    names = [case for case in cases["ring:8"] if case in qg.ALGORITHMS]
    assert [name for name in names if all("refused" in of_graph[name] for of_graph in cases.values())] == []


# ----------------------------------------------------------------------------------------------- steps in place

def path_in_place(text, graph, inputs):
    """The same iterates by the steps of processes, in place and in blocks of columns; one process has all nodes.

    Only this function reads the package's inside: the public `GossipOptimizer` has one node a process.
    """
    from torch.distributed import HashStore

    from quasiglobal.engines.distributed import Distributed
    from quasiglobal.stacked.step_blocks import ModelRows

    (gradient, full_gradient, x), algorithm = problem(inputs), chosen(text)
    engine = Distributed(qg.topology.parse(graph), HashStore(), 0, [range(len(x))], seeds=(SEED,))
    state = {name: value.clone() for name, value in engine.begin(algorithm, x).items()}
    found, pieces = [], [x[:, :5].clone(), x[:, 5:].clone()]
    for t in range(1, STEPS + 1):
        engine.step_in_place(
            algorithm, ModelRows(pieces), ModelRows([gradient(torch.cat(pieces, dim=1), t)]), state, t=t,
            lr=torch.tensor(rate(t), dtype=x.dtype), weight_decay=DECAY, full_gradient=full_gradient,
            gradient=partial(gradient, t=t),
        )
        found.append(torch.cat(pieces, dim=1))
    return torch.stack([found[MIDDLE - 1], found[STEPS - 1]]).numpy()


@pytest.mark.parametrize("graph", [pytest.param(one, marks=[pytest.mark.slow] * (one != "ring:8")) for one in GRAPHS])
def test_steps_in_blocks_of_columns_are_the_recorded_ones(graph, monkeypatch):
    monkeypatch.setattr("quasiglobal.stacked.step_blocks.BLOCK", 3 * 8)      # three columns of all nodes
    arrays, cases = recorded()
    run, errors = [case for case, told in cases[graph].items() if "state" in told], {}
    for case, theirs in zip(run, arrays[graph], strict=True):
        if " " not in case:
            errors[case] = np.abs(path_in_place(case, graph, arrays) - theirs).max() / np.abs(theirs).max()
    assert len(errors) > len(OPTIONS)
    assert {case: error for case, error in errors.items() if not error <= TOLERANCE} == {}


# ---------------------------------------------------------------------------------------------------- kernels of steps

KERNELS = {
    **{graph: {} for graph in ("ring:5", "one-peer-exponential:4", "exponential:5", "every:2/equidyn:5", "chain:5")},
    "every:2/torus:9": {},
    "ring:5, float32": {"dtype": torch.float32},
    "ring:5, a rate for each row": {"rates": 10},
    "ring:5, some columns": {"shared": 67},
    "ring:5, one run": {"runs": 1},
    "ring:5, no decay": {"decay": 0.0},
    "ring:5, a decay for each row": {"decay": torch.full((10, 1), 0.01, dtype=torch.float64)},
}
"""A graph, and what differs from two runs in float64 that share all columns."""

QUICK = ("ring:5", "one-peer-exponential:4")

ROUNDS = (*range(1, 61), 500)
"""Steps of all kinds: the longest round has 50 steps, but for that of diloco."""


def sources(text, graph, dtype=torch.float64, rates=1, shared=None, runs=2, decay=0.01):
    """The kernels of each kind of step of an algorithm, by the first step of the kind; None for a plain step.

    Only this function reads the package's inside: what replaces the translation of steps replaces the record too.
    Nothing is compiled, so that neither a GPU nor Triton is needed.
    """
    from quasiglobal.engines.simulator import Simulator
    from quasiglobal.stacked import step_kernel
    from quasiglobal.training.bands import Band

    class Written:
        def __init__(self, passes, wiring, x):
            self.passes = passes

        def compile(self, *arguments):
            pass

    engine = Simulator(qg.topology.parse(graph), seeds=tuple(range(runs)), shared=shared)
    x = torch.ones(engine.rows, 70, dtype=dtype)
    lr, time = x.new_full((rates, 1), 0.1) if rates > 1 else x.new_tensor(0.1), x.new_tensor(1.0)
    band = Band(chosen(text), engine, 0, decay)
    band.begin_at(x)
    found = {}
    with patch.multiple(step_kernel, available=lambda x: True, StepKernel=Written):
        for t in {band.kind(t): t for t in reversed(ROUNDS)}.values():
            kernel = band.kernel(t, x, x.clone(), time, lr)
            found[str(t)] = kernel and [
                {"text": one.text, "arguments": one.arguments, "constants": len(one.constants), "sums": one.sums,
                 "mixes": one.mixes, "tiles": one.tiles, "narrow": one.narrow}
                for one in kernel.passes
            ]
    return found


def all_sources(kind, texts=(*qg.ALGORITHMS, *OPTIONS)):
    return {text: sources(text, kind.partition(",")[0], **KERNELS[kind]) for text in texts}


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in KERNELS]
)
def test_the_kernels_of_all_steps_are_the_recorded_ones_character_by_character(kind):
    kernels = json.loads(lzma.decompress((HERE / "kernels.json.xz").read_bytes()))
    if kernels["torch"] != torch.__version__.partition("+")[0]:
        pytest.skip("another version of PyTorch may trace a step to other operations")
    for text, of_text in all_sources(kind, kernels[kind]).items():
        assert of_text == kernels[kind][text], text


# -------------------------------------------------------------------------------------------- captured steps on a GPU


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:.*meant for data")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")           # from torch.compile's own imports
@pytest.mark.parametrize("algorithm", qg.ALGORITHMS)
def test_captured_steps_of_every_algorithm_equal_those_of_the_cpu(algorithm):
    """Steps on a CPU are not captured. Tolerance: sums in another order, over 30 steps."""
    rng = np.random.default_rng(3)
    x = torch.from_numpy(rng.normal(size=(50, 5))).float()
    y = torch.from_numpy(rng.normal(size=(50, 3))).float()
    ends = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        task = qg.Task(torch.nn.Linear(5, 3), torch.nn.functional.mse_loss, (x, y))
        run = qg.train(
            task, algorithm, "star:5" if algorithm == "relaysgd" else "ring:5", epochs=6, batch=2, lr=0.02,
            precision="fp64", device=device,
        )
        ends.append([value.detach().cpu() for node in range(5) for value in run.model(node).parameters()])
    for ours, theirs in zip(*ends, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


def record():
    """Write the files that these tests read."""
    HERE.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(2)
    arrays = {"A": 0.4 * rng.normal(size=(8, 6, 10)), "b": rng.normal(size=(8, 6)), "x0": rng.normal(size=(8, 10))}
    cases = {}
    for graph in GRAPHS:
        found = {case: path(case, graph, arrays) for case in (*qg.ALGORITHMS, *OPTIONS, *SETTINGS)}
        cases[graph] = {case: said for case, (_, said) in found.items()}
        arrays[graph] = np.stack([iterates for iterates, _ in found.values() if iterates is not None])
    np.savez_compressed(HERE / "iterates.npz", **arrays)
    (HERE / "cases.json").write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
    kernels = {"torch": torch.__version__.partition("+")[0]} | {kind: all_sources(kind) for kind in KERNELS}
    (HERE / "kernels.json.xz").write_bytes(lzma.compress(json.dumps(kernels).encode()))


if __name__ == "__main__":
    torch.set_num_threads(1)
    record()
