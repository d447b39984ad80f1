"""Training on a GPU, compiled and captured, gives the same results as on the CPU. Skipped without a GPU."""

from dataclasses import replace

import numpy as np
import own_tasks
import pytest
import tiny_models
import torch

import quasiglobal as qg
import quasiglobal.training.program
from quasiglobal.data.shards import Shards
from quasiglobal.data.sources import Dataset, Examples, load
from quasiglobal.runs.building import make_task
from quasiglobal.stacked.routes import Compiled
from quasiglobal.stacked.step_kernel import StepKernel
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),       # from torch.compile's own imports
]

SHORT = Experiment(
    model="mlp", topology="ring:5", epochs=3, lr=0.05, partition="iid", batch=64, weight_decay=1e-3, precision="fp64"
)


def trained(experiment: Experiment, device: str, seeds: tuple[int, ...] = (0,)) -> Program:
    experiments = [experiment.with_seed(seed) for seed in seeds]
    training = Program(make_task(experiment, load("digits")), experiments, torch.device(device))
    Loop(training).run()
    return training


def without_kernel(*arguments):
    """Stands for `step_kernel`, to test the routes that it replaces: it finds none."""


@pytest.mark.parametrize(
    "algorithm",
    ["qg-dsgdm-n", "qg-dsgdm-n:tau=2", "qg-dadam", "d2+", "dsgdm-n-gt", "slowmo", "mimelite", "sgdm-n", "dmsgd"],
)
def test_captured_steps_equal_the_cpu(algorithm):
    experiment = replace(SHORT, algorithm=algorithm)
    there, here = trained(experiment, "cuda"), trained(experiment, "cpu")
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)
    for name, value in here.bands.bands[0].state.items():
        torch.testing.assert_close(there.bands.bands[0].state[name].cpu(), value, rtol=0, atol=1e-7)
    kernels = {type(program) is StepKernel for program in there.bands.bands[0].programs.values()}
    assert kernels == {algorithm != "mimelite"}


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n", "qg-dadam", "slowmo:tau=3", "mimelite"])
def test_fused_steps_equal_the_cpu(algorithm, monkeypatch):
    monkeypatch.setattr("quasiglobal.training.program.WORTH_FUSING", 0)
    monkeypatch.setattr("quasiglobal.training.bands.step_kernel", without_kernel)
    experiment = replace(SHORT, algorithm=algorithm)
    there, here = trained(experiment, "cuda"), trained(experiment, "cpu")
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)
    assert any(program is not None for program in there.bands.bands[0].programs.values()) == (algorithm != "mimelite")


@pytest.mark.parametrize("how", ["kernel", "fused", "plain", "lost messages"])
def test_a_captured_step_finds_the_weights_that_are_drawn_for_it(how, monkeypatch):
    monkeypatch.setattr("quasiglobal.training.program.WORTH_FUSING", 0 if how == "fused" else float("inf"))
    if how != "kernel":
        monkeypatch.setattr("quasiglobal.training.bands.step_kernel", without_kernel)
    experiment = replace(SHORT, topology="matching:5", drop=0.3 if how == "lost messages" else 0.0)
    there, here = (trained(experiment, device, seeds=(0, 1)) for device in ("cuda", "cpu"))
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)
    kinds = {type(program) is StepKernel for program in there.bands.bands[0].programs.values()}
    assert kinds == {how == "kernel"}


@pytest.mark.parametrize("how", ["kernel", "fused", "plain"])
def test_algorithms_step_on_their_own_rows(how, monkeypatch):
    monkeypatch.setattr("quasiglobal.training.program.WORTH_FUSING", 0 if how == "fused" else float("inf"))
    if how != "kernel":
        monkeypatch.setattr("quasiglobal.training.bands.step_kernel", without_kernel)
    names = ("qg-dsgdm-n", "dmsgd", "sgdm-n")
    experiments = [replace(SHORT, algorithm=name, lr=lr) for name in names for lr in (0.05, 0.02)]
    task = make_task(SHORT, load("digits"))
    there, here = (Program(task, experiments, torch.device(device)) for device in ("cuda", "cpu"))
    for _ in range(2):
        there.train_epoch()
        here.train_epoch()
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("norm", ["bn", "gn", "evonorm"])
def test_a_deep_network_learns_the_same_as_on_the_cpu(norm):
    experiment = replace(SHORT, model="resnet8", norm=norm, algorithm="qg-dsgdm-n", epochs=1)
    there, here = trained(experiment, "cuda"), trained(experiment, "cpu")
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)
    for name, value in here.state.buffers.items():
        torch.testing.assert_close(there.state.buffers[name].cpu(), value, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:W of .*epidemic")
@pytest.mark.parametrize("topology", ["one-peer-exponential:4", "ring:5", "equidyn:5", "every:2/epidemic:5:2"])
def test_each_phase_and_period_has_its_own_graph(topology):
    there, here = (
        trained(replace(SHORT, topology=topology, algorithm="slowmo:tau=3"), device, seeds=(0, 1))
        for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)


@pytest.mark.parametrize("faults", [{"drop": 0.3}, {"churn": 0.4}], ids=str)
def test_a_captured_step_loses_the_messages_that_the_cpu_loses(faults):
    experiment = replace(SHORT, epochs=4, **faults)
    there, here = (trained(experiment, device, seeds=(0, 1)) for device in ("cuda", "cpu"))
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:.*loses its exactness", "ignore:.*meant for data that are alike")
@pytest.mark.parametrize(
    "settings",
    [
        {"algorithm": "relaysgd:beta=0.9,nesterov=true", "topology": "chain:5", "drop": 0.3},
        {"algorithm": "relaysgd:fill=start,base=dadam", "topology": "double-trees:5"},
        {"algorithm": "lt-admm:tau=2,beta=0.9", "drop": 0.3},
        {"algorithm": "sgp:beta=0.9", "topology": "exponential:5"},
        {"algorithm": "qg-sgp", "topology": "one-peer-exponential:5"},
        {"algorithm": "push-diging:sums=true,beta=0.9", "topology": "exponential:5", "drop": 0.3},
        {"algorithm": "ab", "topology": "equidyn:5"},
        {"algorithm": "choco:gamma=0.3", "wire": "topk:0.1"},
        {"algorithm": "adagossip", "wire": "sign"},
        {"algorithm": "beer", "wire": "qsgd:4", "drop": 0.3},
        {"algorithm": "motef", "wire": "randk:0.1"},
        {"algorithm": "momentum-tracking:init=mean"},
        {"algorithm": "edm"},
        {"algorithm": "proxskip:p=0.4"},
        {"algorithm": "dfedsam:tau=2"},
        {"algorithm": "noloco:tau=3", "topology": "matching:5"},
        {"algorithm": "dsgdm-n", "communication": "complete@0.5-0.8,merge@end"},
    ],
    ids=lambda settings: "-".join(map(str, settings.values())),
)
def test_captured_channels_equal_the_cpu(settings):
    experiment = replace(SHORT, **settings)
    there, here = (trained(experiment, device, seeds=(0, 1)) for device in ("cuda", "cpu"))
    torch.testing.assert_close(there.state.x.cpu(), here.state.x, rtol=0, atol=1e-9)
    for name, value in here.bands.bands[0].state.items():
        torch.testing.assert_close(there.bands.bands[0].state[name].cpu(), value, rtol=0, atol=1e-6)


@pytest.mark.parametrize("norm", ["bn", "evonorm"])
def test_a_resumed_run_goes_on_with_the_same_numbers(norm):
    """Equal up to non-deterministic kernels, which in float64 change the 16th digit."""
    experiment = replace(SHORT, model="resnet8", norm=norm, data="digits", augment=False, epochs=2)
    task = make_task(experiment, load("digits"))
    whole = trained(experiment, "cuda")
    first = Program(task, [experiment], torch.device("cuda"))
    first.train_epoch()
    second = Program(task, [experiment], torch.device("cuda"))
    second.restore([first.checkpoint(0)])
    second.train_epoch()
    assert (second.state.x - whole.state.x).abs().max() <= 1e-9 * whole.state.x.abs().max()


@pytest.fixture(params=[False, True], ids=["as it is", "compiled"])
def compiles(request, monkeypatch):
    """Transformers uncompiled, as in short trainings, and compiled, as in long trainings."""
    monkeypatch.setattr(quasiglobal.training.program, "WORTH_COMPILING", 0.0 if request.param else float("inf"))
    return request.param


@pytest.mark.parametrize("train", ["all", "head", "lora:2"])
def test_captured_transformers_equal_the_cpu(tmp_path, train, compiles):
    precision, error = ("fp32", 1e-4) if compiles else ("fp64", 1e-9)       # float64 is not compiled
    chosen = tiny_models.experiment(
        tiny_models.write_model(tmp_path), train=train, algorithm="qg-dsgdm-n", epochs=3, precision=precision
    )
    ends = []
    for device in ("cuda", "cpu"):
        training = Program(tiny_models.task(chosen), [chosen], torch.device(device))
        assert isinstance(training.model.route, Compiled) == (compiles and device == "cuda")
        Loop(training).run()
        ends.append(training.state.x.cpu())
    torch.testing.assert_close(*ends, rtol=0, atol=error)


def test_a_captured_transformer_with_dropout_goes_on_with_the_same_numbers(tmp_path, compiles):
    model = tiny_models.write_model(tmp_path, dropout=True)
    chosen = tiny_models.experiment(model, algorithm="qg-dsgdm-n", epochs=3)
    whole, first, second = (Program(tiny_models.task(chosen), [chosen], torch.device("cuda")) for _ in range(3))
    Loop(whole).run()
    first.train_epoch()
    second.restore([first.checkpoint(0)])
    Loop(second).run()
    torch.testing.assert_close(second.state.x, whole.state.x, rtol=0, atol=1e-9)


OWN = {"algorithm": "qg-dsgdm-n", "topology": "ring:4", "epochs": 3, "lr": 0.1, "batch": 8, "seeds": 2}


@pytest.mark.parametrize("kind", own_tasks.KINDS)
def test_tasks_of_a_users_own_equal_the_cpu(kind):
    torch.manual_seed(0)
    task = own_tasks.KINDS[kind]()
    there, here = (qg.train(task, **OWN, precision="fp64", device=device) for device in ("cuda", "cpu"))
    for ours, theirs in zip(there.runs[1], here.runs[1], strict=True):
        for name in theirs.keys() - {"images_per_second"}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name
    assert qg.train(task, **OWN, precision="bf16", device="cuda").records[-1]["loss"] < here.records[0]["loss"]


def test_examples_read_anew_equal_the_cpu():
    """Captured steps read each step's examples from the same place."""
    class Noisy(torch.utils.data.Dataset):
        def __len__(self):
            return 90

        def __getitem__(self, index):
            return torch.full((3,), float(index % 7)) + torch.rand(3), index % 2

    torch.manual_seed(0)
    task = qg.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, Noisy(), cache=False)
    there, here = (qg.train(task, **OWN, precision="fp64", device=device) for device in ("cuda", "cpu"))
    assert there.records[-1]["loss"] == pytest.approx(here.records[-1]["loss"], rel=1e-9)


@pytest.mark.parametrize("augmentation", ["none", "flip-crop", "resize-crop"])
def test_streamed_images_equal_those_in_memory(tmp_path, augmentation):
    """Captured steps find each batch in the same place, while a thread reads the next one."""
    shards = Shards(tmp_path / "shards", (180, 3, 16, 16))
    pixels = torch.randint(0, 256, shards.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    shards.make(lambda row: pixels[row].numpy())
    labels = torch.arange(180) % 3
    terms = {"classes": ("a", "b", "c"), "scale": 255.0, "mean": (0.5,) * 3, "std": (0.3,) * 3}
    found = []
    for examples in (Examples(pixels, labels), Examples(shards.x, labels, shards=shards)):
        data = Dataset("made", examples, examples, augmentation=augmentation, **terms)
        one = replace(SHORT, model="cnn")
        training = Program(make_task(one, data), [one], torch.device("cuda"))
        Loop(training).run()
        found.append(training.state.x)
    assert found[0].allclose(found[1], rtol=1e-9, atol=1e-12)


def test_own_examples_on_disk_equal_those_in_memory(tmp_path, monkeypatch):
    """Inputs and targets of several types, in records that captured steps find in one place."""
    monkeypatch.setenv("QG_CACHE", str(tmp_path))
    rng = np.random.default_rng(0)
    examples = [({"a": rng.normal(size=(1, 8, 8)), "b": rng.integers(5)}, rng.normal(size=3)) for _ in range(180)]

    class OfBoth(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.embedding = torch.nn.Linear(64, 3), torch.nn.Embedding(5, 3)

        def forward(self, a, b):
            return self.linear(a.flatten(1)) + self.embedding(b)

    class Listed(torch.utils.data.Dataset):
        def __len__(self):
            return len(examples)

        def __getitem__(self, row):
            return examples[row]

    torch.manual_seed(0)
    model = OfBoth()
    found = []
    for limit in (1e9, 0):
        task = qg.Task(model, torch.nn.functional.mse_loss, Listed(), memory_limit=limit)
        run = qg.train(task, topology="ring:4", epochs=3, batch=7, lr=0.05, device="cuda", precision="fp64")
        found.append(run.records[-1]["test_loss"])
    assert abs(found[0] - found[1]) < 1e-12
