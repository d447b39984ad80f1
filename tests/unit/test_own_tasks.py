"""Your own models, data, losses and metrics: every kind of task trains, is recorded and resumed."""

import csv
import json
import linecache
import multiprocessing
import random
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
import numpy as np
import own_tasks
import pytest
import torch
from own_tasks import KINDS, Pairs, drawn
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import quasiglobal as qg
from quasiglobal.cli import look, main
from quasiglobal.stacked.routes import OneByOne, Traced
from quasiglobal.training import program

SHORT = {"algorithm": "qg-dsgdm-n", "topology": "ring:4", "epochs": 3, "lr": 0.1, "device": "cpu", "batch": 8}
TIMING = "images_per_second"


def untimed(records):
    return [{name: value for name, value in record.items() if name != TIMING} for record in records]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_task_trains_and_is_recorded(kind):
    task = KINDS[kind]()
    run = qg.train(task, **SHORT | {"epochs": 6})
    first, last = run.records[0], run.records[-1]
    assert last["loss"] < first["loss"]
    for name in [*task.metrics, "test_loss"]:
        for ending in ("", "_std", "_worst", "_best", "_averaged"):
            assert isinstance(last[f"{name}{ending}"], float), name
        assert len(last[f"{name}_nodes"]) == 4
        assert last[name] == pytest.approx(np.mean(last[f"{name}_nodes"]))
    assert ("train_accuracy" in last) == task.classifies


@pytest.mark.parametrize("kind", KINDS)
def test_stacked_and_one_by_one_agree(kind, monkeypatch):
    def trained(route):
        monkeypatch.setattr("quasiglobal.stacked.stack.choose_route", lambda *how: route)
        return qg.train(KINDS[kind](), **SHORT | {"epochs": 2, "precision": "fp64"})

    torch.manual_seed(0)
    stacked = trained(Traced)
    torch.manual_seed(0)
    alone = trained(OneByOne)
    for ours, theirs in zip(stacked.records, alone.records, strict=True):
        for name in ours.keys() - {TIMING}:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-9, abs=1e-9), name


def test_the_values_of_each_node_are_those_of_its_model():
    task = own_tasks.regression()
    run = qg.train(task, **SHORT)
    x, y = task.data.test.x, task.data.test.y
    for node in range(4):
        with torch.no_grad():
            error = (run.model(node)(x) - y).abs().mean()
        assert run.records[-1]["mae_nodes"][node] == pytest.approx(float(error), abs=1e-6)
    with torch.no_grad():
        assert run.records[-1]["mae_averaged"] == pytest.approx(float((run.average()(x) - y).abs().mean()), abs=1e-6)
    assert run.records[-1]["mae_best"] == min(run.records[-1]["mae_nodes"]), "lower is better"
    assert run.records[-1]["near_best"] == max(run.records[-1]["near_nodes"])


# ------------------------------------------------------------------------------------------------ data


def parts_of_people(*sizes):
    parts = []
    for person, size in enumerate(sizes):
        x = torch.randn(size, 3, generator=torch.Generator().manual_seed(person)) + person
        parts.append(Pairs(x, (x.sum(dim=1) > 3 * person).long()))
    return parts


def test_a_list_has_one_data_set_per_node_and_nobody_splits_it():
    task = qg.Task(nn.Linear(3, 2), functional.cross_entropy, parts_of_people(10, 25, 40))
    assert [len(part) for part in task.data.parts] == [8, 20, 32]
    assert [len(part) for part in task.data.test_parts] == [2, 5, 8]
    run = qg.train(task, **SHORT | {"topology": "complete:3"})
    last = run.records[-1]
    for name in ("accuracy", "test_loss"):
        assert last[f"{name}_own"] == pytest.approx(np.mean(last[f"{name}_own_nodes"]))
        assert len(last[f"{name}_own_nodes"]) == len(last[f"{name}_nodes"]) == 3
    for node, part in enumerate(task.data.test_parts):
        x, y = task.data.test.x, task.data.test.y
        with torch.no_grad():
            right = (run.model(node)(x).argmax(dim=1) == y).double()
        assert last["accuracy_own_nodes"][node] == pytest.approx(float(right[part].mean()))
        assert last["accuracy_nodes"][node] == pytest.approx(float(right.mean()))


def test_an_object_metric_is_computed_on_each_nodes_own_part_too():
    task = qg.Task(
        nn.Linear(3, 2), functional.cross_entropy, parts_of_people(20, 25, 40), metrics={"f1": qg.metrics.f1}
    )
    run = qg.train(task, **SHORT | {"topology": "complete:3"})
    for node, part in enumerate(task.data.test_parts):
        with torch.no_grad():
            output = run.model(node)(task.data.test.x)
        assert run.records[-1]["f1_nodes"][node] == pytest.approx(qg.metrics.f1(output, task.data.test.y))
        own = qg.metrics.f1(output[part], task.data.test.y[part])
        assert run.records[-1]["f1_own_nodes"][node] == pytest.approx(own)


def test_the_held_out_fifth_is_the_same_for_all_seeds_and_forms():
    x, y = drawn(50, 3), torch.arange(50) % 2
    tasks = [
        qg.Task(nn.Linear(3, 2), functional.cross_entropy, given)
        for given in ((x, y), (x.numpy(), y.numpy()), Pairs(x, y), TensorDataset(x, y))
    ]
    for task in tasks:
        assert (len(task.data.train), len(task.data.test)) == (40, 10)
        assert task.data.test.x.equal(tasks[0].data.test.x)
    runs = qg.train(tasks[0], **SHORT, seeds=2).runs
    assert [run.experiment.seed for run in runs] == [0, 1]
    assert runs[0].records != runs[1].records


def test_a_data_set_of_ours_keeps_its_own_test_set():
    data = qg.data.load("digits")
    task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), functional.cross_entropy, data)
    assert task.data is data
    fewer = qg.Task(task.model, task.loss, data, test=qg.data.from_arrays(data.train.x, data.train.y))
    assert len(fewer.data.test) == len(data.train) - len(data.train) * 4 // 5


def test_columns_name_the_input_and_the_target_of_dicts():
    items = [{"image": drawn(4), "age": float(i), "label": i % 2, "id": "x"} for i in range(20)]
    task = qg.Task(nn.Linear(4, 2), functional.cross_entropy, own_tasks.items_of(items), columns=("image", "label"))
    assert qg.train(task, **SHORT).records[-1]["accuracy"] >= 0

    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(5, 2)

        def forward(self, batch):
            return self.layer(torch.cat([batch["image"], batch["age"][:, None]], dim=1))

    both = (("image", "age"), "label")
    qg.train(qg.Task(Both(), functional.cross_entropy, own_tasks.items_of(items), columns=both), **SHORT)
    with pytest.raises(qg.InputError, match=r"example 0 of train is a dict; name its .* columns=\('image', 'id'\)"):
        qg.Task(nn.Linear(4, 2), functional.cross_entropy, own_tasks.items_of(items))
    with pytest.raises(qg.InputError, match="has no 'picture'; its columns are image, age, label, id"):
        qg.Task(nn.Linear(4, 2), functional.cross_entropy, own_tasks.items_of(items), columns=("picture", "label"))


class Noisy(Dataset):
    """Random transforms by all three generators."""

    def __init__(self):
        self.x, self.y, self.read = drawn(40, 3), torch.arange(40) % 2, []

    def __len__(self):
        return 40

    def __getitem__(self, index):
        noise = float(torch.rand(())) + np.random.rand() + random.random()
        self.read.append((index, noise))
        return self.x[index] + noise, self.y[index]


def test_examples_read_anew_are_a_function_of_seed_node_epoch_and_index(tmp_path):
    model = nn.Linear(3, 2)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    qg.Task(model, functional.cross_entropy, Noisy(), cache=False)
    assert torch.rand(3).equal(expected), "the generators are restored"

    def run(stop_after=None, runs=None):
        data = Noisy()
        task = qg.Task(model, functional.cross_entropy, data, cache=False)
        stop = [StopAfter(stop_after)] if stop_after else []
        return qg.train(task, **SHORT | {"epochs": 4}, runs=runs, checkpoint_seconds=0, callbacks=stop), data.read

    whole, read = run()
    assert len({noise for _, noise in read}) > 100, "every epoch draws anew"
    again, same = run()
    assert read == same
    assert untimed(whole.records) == untimed(again.records)
    with pytest.warns(UserWarning, match="the same call resumes"):
        run(2, tmp_path)
    resumed, _ = run(runs=tmp_path)
    assert untimed(resumed.records) == untimed(whole.records)
    assert resumed.model(1).weight.equal(whole.model(1).weight)


def test_worker_processes_read_the_same_examples():
    def run(**how):
        data = Noisy()
        task = qg.Task(nn.Linear(3, 2), functional.cross_entropy, data, cache=False)
        return qg.train(task, **SHORT, **how), len(data.read)

    torch.manual_seed(0)
    whole, read_here = run()
    torch.manual_seed(0)
    by_workers, read_elsewhere = run(workers=2)
    assert untimed(by_workers.records) == untimed(whole.records)
    assert read_elsewhere < read_here, "the training examples are read in other processes"


def test_an_error_in_a_worker_process_is_one_sentence():
    class Broken(Noisy):
        def __getitem__(self, index):
            if len(self.read) > 60 and index == 7:
                raise ValueError("no such file")
            return super().__getitem__(index)

    data = Broken()
    task = qg.Task(nn.Linear(3, 2), functional.cross_entropy, data, cache=False)
    data.read.extend(range(60))
    with pytest.raises(qg.InputError, match="example 7 of train cannot be read: Broken raises ValueError"):
        qg.train(task, **SHORT, workers=1)
    assert multiprocessing.active_children() == [], "the workers have ended too"


class StopAfter:
    """Presses Ctrl-C in an epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def on_epoch(self, run):
        if run.epoch == self.epoch:
            signal.raise_signal(signal.SIGINT)


def test_the_public_data_module():
    assert dir(qg.data) == ["Dataset", "from_arrays", "load", "split"]
    parts = qg.data.split(np.arange(100) % 10, 5, kind="dirichlet", alpha=0.1, seed=3)
    assert sum(map(len, parts)) == 100
    data = qg.data.from_arrays(np.random.rand(50, 3, 4, 4), np.arange(50) % 2, normalise=True)
    assert len(data.mean) == 3
    assert isinstance(data, qg.data.Dataset)


# ------------------------------------------------------------------------------------------------ objects


@dataclass(frozen=True, kw_only=True)
class Slower(qg.Algorithm):
    """DSGD with a factor."""

    factor: float = 0.5

    def step(self, x, g, state, node):
        return node.mix(x - self.factor * node.lr * g), state


@pytest.mark.slow
def test_texts_and_objects_mean_the_same(tmp_path):
    torch.manual_seed(0)
    task = own_tasks.classification()
    usual = qg.train(task, **SHORT)
    qgm = qg.algorithm("qg-dsgdm-n")
    (tmp_path / "ring.csv").write_text("source,target\n0,1\n1,2\n2,3\n3,0\n")
    ring = {i: [(i - 1) % 4, (i + 1) % 4] for i in range(4)}
    for algorithm, topology in (
        (qgm, qg.topology.ring(4)), (qgm, nx.cycle_graph(4)), (qgm, ring), ("qg-dsgdm-n", tmp_path / "ring.csv"),
        ("qg-dsgdm-n", str(tmp_path / "ring.csv")),
    ):
        run = qg.train(task, **SHORT | {"algorithm": algorithm, "topology": topology})
        assert run.records[-1]["loss"] == pytest.approx(usual.records[-1]["loss"], rel=1e-6)
    half = qg.train(task, **SHORT | {"algorithm": Slower()})
    assert half.records[-1]["loss"] == pytest.approx(
        qg.train(task, **SHORT | {"algorithm": "dsgd", "lr": 0.05}).records[-1]["loss"], rel=1e-5
    )


def test_partitions():
    task = own_tasks.classification()
    assert qg.train(task, **SHORT).runs[0].experiment.partition == "iid"
    assert qg.train(task, **SHORT, alpha=1.0).runs[0].experiment.partition == "dirichlet"

    def sorted_by_label(labels, n, rng):
        return np.array_split(np.argsort(labels, kind="stable"), n)

    run = qg.train(task, **SHORT, partition=sorted_by_label)
    assert run.records[-1]["loss"] != qg.train(task, **SHORT).records[-1]["loss"]
    with pytest.raises(qg.InputError, match="the partition returned 2 parts for 4 nodes"):
        qg.train(task, **SHORT, partition=lambda labels, n, rng: [[0], [1]])
    with pytest.raises(qg.InputError, match="dirichlet needs one class number per example"):
        qg.train(own_tasks.regression(), **SHORT, alpha=0.1)
    parts = qg.Task(nn.Linear(3, 2), functional.cross_entropy, parts_of_people(10, 25, 40))
    with pytest.raises(qg.InputError, match="train is a list, so nothing is split"):
        qg.train(parts, **SHORT | {"topology": "complete:3"}, partition="iid")
    with pytest.raises(qg.InputError, match="train has 3 parts, but ring:4 has 4 nodes"):
        qg.train(parts, **SHORT)


def test_schedules_and_clipping():
    task = own_tasks.classification()

    def rates(**how):
        run = qg.train(task, **SHORT | {"epochs": 4, "lr": 0.8, "batch": 40} | how)
        return [record["lr"] for record in run.records]

    assert rates() == [0.8] * 4
    assert rates(schedule="linear") == pytest.approx([0.8, 0.6, 0.4, 0.2])
    assert rates(schedule="cosine") == pytest.approx([0.4 * (1 + np.cos(np.pi * f)) for f in (0, 0.25, 0.5, 0.75)])
    assert rates(schedule=lambda done: 1 - done / 2) == pytest.approx([0.8, 0.7, 0.6, 0.5])
    assert rates(schedule="steps") == pytest.approx([0.1, 0.24, 0.38, 0.52]), "the paper's warm-up over five epochs"
    with pytest.raises(qg.InputError, match="unknown schedule 'cosinus'; did you mean 'cosine'"):
        rates(schedule="cosinus")
    g = torch.randn(3, 50)
    ours = program.clipped(g, 2.0)
    for row, clipped in zip(g, ours, strict=True):
        parameter = nn.Parameter(torch.zeros(50))
        parameter.grad = row.clone()
        nn.utils.clip_grad_norm_([parameter], 2.0)
        torch.testing.assert_close(clipped, parameter.grad)
    assert qg.train(task, **SHORT, clip=1e-6).records[-1]["loss"] > qg.train(task, **SHORT).records[-1]["loss"]


# ------------------------------------------------------------------------------------------------ run folders


def test_runs_are_written_resumed_and_not_repeated(tmp_path):
    torch.manual_seed(0)
    task = own_tasks.regression()
    run = qg.train(task, **SHORT, runs=tmp_path, seeds=2)
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert [name.startswith("arrays-Linear-qg-dsgdm-n-ring4") for name in folders] == [True, True]
    lines = (run.runs[0].folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == run.records
    summary = json.loads((run.runs[0].folder / "summary.json").read_text())
    assert summary["best"]["mae"] == min(record["mae"] for record in run.records)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()}
    again = qg.train(task, **SHORT, runs=tmp_path, seeds=2)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*") if path.is_file()} == before
    assert again.records == run.records
    assert again.model(0).weight.equal(run.model(0).weight)
    in_memory = qg.train(task, **SHORT, seeds=2)
    assert untimed(in_memory.runs[1]) == untimed(run.runs[1])


def test_a_changed_task_is_another_run(tmp_path):
    def names(task, **how):
        before = {path.name for path in tmp_path.iterdir()}
        qg.train(task, **SHORT | {"epochs": 1} | how, runs=tmp_path)
        return {path.name for path in tmp_path.iterdir()} - before

    x, y = drawn(40, 3), torch.arange(40) % 2
    model, factor = nn.Linear(3, 2), 2.0
    loss = functional.cross_entropy
    assert len(names(qg.Task(model, loss, (x, y)))) == 1
    assert names(qg.Task(model, loss, (x, y))) == set()
    assert names(qg.Task(model, loss, (x.clone(), y.clone()))) == set()
    assert len(names(qg.Task(nn.Linear(3, 2), loss, (x, y)))) == 1
    assert len(names(qg.Task(nn.Sequential(model), loss, (x, y)))) == 1
    assert len(names(qg.Task(model, loss, (x + 1, y)))) == 1
    assert len(names(qg.Task(model, lambda output, target: loss(output, target) * factor, (x, y)))) == 1
    factor = 3.0
    assert len(names(qg.Task(model, lambda output, target: loss(output, target) * factor, (x, y)))) == 1
    metrics = {"right": lambda output, target: (output.argmax(dim=1) == target).float()}
    assert len(names(qg.Task(model, loss, (x, y), metrics=metrics))) == 1
    for how in ({"algorithm": Slower()}, {"algorithm": Slower(factor=0.25)}, {"topology": {0: [1], 1: [0]}},
                {"partition": lambda labels, n, rng: np.array_split(np.arange(len(labels)), n)},
                {"schedule": lambda done: 1 - done / 2}, {"lr": lambda t: 0.1}, {"clip": 1.0}):
        assert len(names(qg.Task(model, loss, (x, y)), **how)) == 1, how
        assert names(qg.Task(model, loss, (x, y)), **how) == set(), how


@pytest.mark.slow
def test_commands_read_the_folders_without_the_objects(tmp_path):
    task = own_tasks.regression()
    def random_parts(targets, n, rng):
        return np.array_split(rng.permutation(len(targets)), n)

    how = SHORT | {"algorithm": Slower(), "topology": nx.path_graph(4), "partition": random_parts}
    qg.train(task, **how, runs=tmp_path / "runs")

    script = (                                              # another process, which does not know the objects
        "import sys\nfrom quasiglobal.cli import main\n"
        "for words in (['runs'], ['compare'], ['plot'], ['report', '--runs', 'runs', '--out', 'out']):\n"
        "    sys.argv = ['qg', *words]\n    main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("mae") == 2
    assert all((tmp_path / "out" / name).exists() for name in ("curves.png", "index.html"))
    tables = (tmp_path / "out" / "tables.md").read_text()
    assert "## Own experiments" in tables
    (row,) = (line for line in tables.splitlines() if line.startswith("| Linear | arrays |"))
    assert "| mae 0." in row
    assert "| finished |" in row


# ------------------------------------------------------------------------------------------------ errors


class Needs(nn.Linear):
    def __init__(self, size):
        super().__init__(size, 2)


class Raises(nn.Linear):
    def forward(self, x):
        raise ValueError("no such thing")


class Hooked(nn.Module):
    """Takes the features of an inner layer by a hook that refers to the module."""

    def __init__(self):
        super().__init__()
        self.first, self.head, self.found = nn.Linear(3, 3), nn.Linear(3, 2), {}
        self.first.register_forward_hook(lambda part, given, output: self.found.update(first=output))

    def forward(self, x):
        self.first(x)
        return self.head(self.found["first"])


class Invalid(nn.Linear):
    def forward(self, x):
        return super().forward(x) * float("nan")


class FewOnly:
    """A metric that fails on more than a few examples."""

    def reset(self):
        self.count = 0

    def update(self, output, target):
        self.count += len(output)

    def compute(self):
        if self.count > 5:
            raise ValueError("too many")
        return 0.0


class Halved(nn.Linear):
    def forward(self, x):
        return super().forward(x.bfloat16()).float()


X, Y = drawn(20, 3), torch.arange(20) % 2
LOSS = functional.cross_entropy
WRONG = {
    "the loss is the class CrossEntropyLoss; give an instance": lambda: qg.Task(
        nn.Linear(3, 2), nn.CrossEntropyLoss, (X, Y)
    ),
    "the labels are 1 to 2; class numbers are 0, 1, …: subtract 1": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, Y + 1)),
    "class numbers need to be whole": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, Y.float())),
    r"the loss mse_loss fails .* make the targets a column, y\[:, None\]": lambda: qg.Task(
        nn.Linear(3, 1), functional.mse_loss, (X, X[:, 0])
    ),
    "convert whole numbers to float": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X.byte(), Y)),
    "has text; turn inputs into token ids": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, np.array(["a", "b"] * 10))),
    "give train and test apart": lambda: qg.Task(nn.Linear(3, 2), LOSS, (TensorDataset(X, Y), TensorDataset(X, Y))),
    "has parameters to train; make them parameters of the model": lambda: qg.Task(
        nn.Linear(3, 2), nn.Linear(2, 1), (X, Y)
    ),
    r"Scalar returns .* for 2 examples; each tensor needs one row per example": lambda: qg.Task(
        Scalar(3, 2), lambda output, target: LOSS(output[0], target), (X, Y)
    ),
    "Linear gives one output, but cross-entropy needs one per class": lambda: qg.Task(
        nn.Linear(3, 1), LOSS, (X, torch.arange(20) // 18 * 2)
    ),
    "Embedding fails on inputs int64": lambda: qg.Task(
        nn.Embedding(5, 2), lambda output, target: output.mean(), (torch.arange(20), X)
    ),
    "computes a dict; it has to compute one number": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, Y), metrics={"d": Dicts()}
    ),
    "a training example is .* but a test example is": lambda: qg.Task(
        nn.Linear(3, 1), functional.mse_loss, (X, X[:, :1]), test=(X, X[:, 0])
    ),
    "two metrics are called '<lambda>'": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, Y), metrics=[lambda output, target: target, lambda output, target: target]
    ),
    "a step has a batch of one example, which BatchNorm cannot normalise": lambda: qg.Task(
        nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), LOSS, [(X[:9], Y[:9])] * 4, test=(X, Y)
    ),
    "Needs cannot be made: TypeError: .* missing 1 required .*; give an instance": lambda: qg.Task(Needs, LOSS, (X, Y)),
    r"Raises fails on inputs \[2, 3\]: ValueError: no such thing": lambda: qg.Task(Raises(3, 2), LOSS, (X, Y)),
    r"Linear fails on inputs \[2, 3\]: .*mat1 and mat2": lambda: qg.Task(nn.Linear(4, 2), LOSS, (X, Y)),
    "Halved fails .*; all parts are trained in one precision: cast to that of a weight": lambda: qg.Task(
        Halved(3, 2, dtype=torch.bfloat16), LOSS, (X, Y)
    ),
    "is neither an nn.Module nor a function": lambda: qg.Task(lambda: 3, LOSS, (X, Y)),
    "got str; give an instance, or a function without arguments": lambda: qg.Task("resnet18", LOSS, (X, Y)),
    "Hooked fails .* your module works, but a copy of it does not, .*; give its class": lambda: qg.Task(
        Hooked(), LOSS, (X, Y)
    ),
    r"it is called with two arguments, \(output, target\)": lambda: qg.Task(
        nn.Linear(3, 2), lambda output: output.mean(), (X, Y)
    ),
    r"and their order: \(output, target\)": lambda: qg.Task(
        nn.Linear(3, 2), lambda target, output: LOSS(output, target), (X, Y)
    ),
    "Invalid returns NaN for its first inputs": lambda: qg.Task(Invalid(3, 2), LOSS, (X, Y)),
    "train has a tensor of the kind sparse_coo; give a dense one": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X.to_sparse(), Y)
    ),
    "all labels are -100, which the loss cross_entropy ignores": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, torch.full((20,), -100))
    ),
    "Identity has no parameters to train": lambda: qg.Task(nn.Identity(), LOSS, (X, Y)),
    r"the loss mse_loss fails on outputs \[2, 3\] and targets \[2, 1\] of Linear": lambda: qg.Task(
        nn.Linear(3, 3), functional.mse_loss, (X, X[:, :1])
    ),
    "Linear gives 2 outputs, but the highest label is 4; it needs 5 outputs": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, torch.arange(20) % 5)
    ),
    "Sequential gives 7 outputs, digits has 10 classes": lambda: qg.Task(
        nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), LOSS, qg.data.load("digits")
    ),
    r"the loss .* returns a tensor of shape \[2\], not one number; take its mean": lambda: qg.Task(
        nn.Linear(3, 2), nn.CrossEntropyLoss(reduction="none"), (X, Y)
    ),
    "the input of example 3 of train has a value that is not a finite number": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (torch.where(X[3, 1] == X, torch.nan, X), Y), test=(X, Y)
    ),
    "the loss cross_entropy fails on outputs": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, Y.float())),
    "train is a DataLoader; give its Dataset": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, DataLoader(TensorDataset(X, Y))
    ),
    "train is an IterableDataset; give a Dataset": lambda: qg.Task(nn.Linear(3, 2), LOSS, Endless()),
    "train is a Tensor; it needs to be a torch Dataset": lambda: qg.Task(nn.Linear(3, 2), LOSS, X),
    "part 0 of train is an array; write a pair as": lambda: qg.Task(nn.Linear(3, 2), LOSS, [X, Y]),
    "example 1 of train has the shapes": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, own_tasks.items_of([(X[0], 0), (X[0, :2], 1)]), test=(X, Y)
    ),
    "train has 2 parts, but test has 1": lambda: qg.Task(nn.Linear(3, 2), LOSS, [(X, Y), (X, Y)], test=[(X, Y)]),
    "x and y of train need one row per example": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, Y[:5])),
    r"metric 'mean' returns \[\] for 2 examples": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, Y), metrics={"mean": lambda output, target: output.mean()}
    ),
    "a metric cannot be called 'loss'": lambda: qg.Task(
        nn.Linear(3, 2), LOSS, (X, Y), metrics={"loss": qg.metrics.accuracy}
    ),
    "task must be a qg.Task": lambda: nn.Linear(3, 2),
    r"metric 'm' returns \[3, 3\] for 3 examples, but \[2, 2\] for 2: it broadcasts": lambda: qg.Task(
        nn.Linear(3, 1), flat_mse, (X, X[:, 0]), metrics={"m": lambda output, target: (output - target).abs()}
    ),
    r"metric 'm' returns \[2\] for 3 examples": lambda: qg.Task(
        nn.Linear(3, 1), flat_mse, (X, X[:, 0]), metrics={"m": lambda output, target: output[:2, 0]}
    ),
    "metric 'accuracy' needs class numbers or yes/no targets, 1 or 0; use mse or mae": lambda: qg.Task(
        nn.Linear(3, 1), functional.mse_loss, (X, X[:, :1]), metrics={"accuracy": qg.metrics.accuracy}
    ),
    r"metric 'a' cannot tell which axis of outputs \[2, 6, 6\] has the classes": lambda: qg.Task(
        nn.Embedding(6, 6), lambda output, target: LOSS(output.mT, target), (TOKENS, TOKENS),
        metrics={"a": qg.metrics.accuracy},
    ),
    r"PairsOnly fails on inputs \[3, 3\]": lambda: qg.Task(PairsOnly(3, 2), LOSS, (X, Y)),
    "DataParallel is a DataParallel; give the module inside it": lambda: qg.Task(
        nn.DataParallel(nn.Linear(3, 2)), LOSS, (X, Y)
    ),
    r"convert the targets to float: y.float\(\)": lambda: qg.Task(
        nn.Linear(3, 1), functional.binary_cross_entropy_with_logits, (X, Y[:, None])
    ),
    r"flatten the targets: y\[:, 0\]": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, Y[:, None])),
    "give class numbers, y.argmax": lambda: qg.Task(nn.Linear(3, 2), LOSS, (X, functional.one_hot(Y))),
    "move the classes to axis 1": lambda: qg.Task(nn.Embedding(6, 5), LOSS, (TOKENS, TOKENS)),
    "check that forward has the arguments a, b": lambda: qg.Task(nn.Bilinear(3, 3, 2), LOSS, ({"a": X, "b": X}, Y)),
}

TOKENS = torch.arange(120).reshape(20, 6) % 5


def flat_mse(output, target):
    return functional.mse_loss(output[:, 0], target)


class PairsOnly(nn.Linear):
    def forward(self, x):
        return super().forward(x.view(2, 3))


class Scalar(nn.Linear):
    def forward(self, x):
        output = super().forward(x)
        return output, output.square().mean()


class Dicts:
    def update(self, output, target):
        pass

    def reset(self):
        pass

    def compute(self):
        return {"a": 1}


class Endless(IterableDataset):
    def __iter__(self):
        yield X[0], 0


@pytest.mark.parametrize("sentence", WRONG)
def test_a_misfit_is_one_sentence_and_leaves_nothing_behind(tmp_path, sentence):
    with pytest.raises(qg.InputError, match=sentence) as error:
        qg.train(WRONG[sentence](), **SHORT, runs=tmp_path / "runs")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(("loss", "ignored"), [(LOSS, -100), (nn.CrossEntropyLoss(ignore_index=255), 255)])
def test_labels_that_the_loss_ignores_are_allowed(loss, ignored):
    labels = torch.where(torch.arange(20) < 4, ignored, Y)
    assert qg.train(qg.Task(nn.Linear(3, 2), loss, (X, labels)), **SHORT).status == "finished"


def test_a_metric_that_fails_on_the_test_data_is_named():
    task = qg.Task(nn.Linear(3, 2), LOSS, (X, Y), test=(X, Y), metrics={"m": FewOnly()})
    with pytest.raises(qg.InputError, match="metric 'm' fails on the test data: ValueError: too many"):
        qg.train(task, **SHORT)


def test_masks_and_complex_numbers_are_inputs():
    class Masked(nn.Linear):
        def forward(self, x, mask):
            return super().forward(x.masked_fill(mask, 0.0))

    class Turned(nn.Linear):
        def forward(self, x):
            return super().forward(x).abs()

    turned = Turned(3, 2, dtype=torch.complex64)
    for module, inputs in ((Masked(3, 2), (X, X > 1)), (turned, torch.complex(X.double(), X.double()))):
        assert qg.train(qg.Task(module, LOSS, (inputs, Y)), **SHORT).status == "finished"


def test_a_loss_that_seems_to_broadcast_is_warned_of():
    def squared_error(output, target):
        return (output - target).square().mean()

    with pytest.warns(UserWarning, match=r"squared_error has another value if outputs \[2, 1\] are given the shape"):
        qg.train(qg.Task(nn.Linear(3, 1), squared_error, (X, X[:, 0])), **SHORT)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        qg.train(qg.Task(nn.Linear(3, 1), flat_mse, (X, X[:, 0])), **SHORT)
        qg.train(qg.Task(nn.Linear(3, 1), squared_error, (X, X[:, :1])), **SHORT)


def test_a_partition_that_repeats_examples_is_warned_of():
    labels = np.arange(8)
    with pytest.warns(UserWarning, match="uses 2 of 8 examples more than once"):
        qg.data.split(labels, 2, lambda labels, n, rng: [labels[:5], labels[3:]])


@pytest.mark.parametrize(("how", "sentence"), [
    ({"learning_rate": 0.1}, "unknown argument of qg.train 'learning_rate'; known: algorithm, topology, epochs, lr"),
    ({"runs": 3}, "runs must be a folder, got 3"),
    ({"watch": 3}, "watch must be a function of a record, got 3"),
    ({"algorithm": qg.Algorithm()}, "Algorithm has no step"),
])
def test_wrong_arguments_are_one_sentence(how, sentence):
    with pytest.raises(qg.InputError, match=sentence):
        qg.train(qg.Task(nn.Linear(3, 2), LOSS, (X, Y)), **(SHORT | how))


def test_an_algorithm_has_to_return_x_and_state():
    class Half(qg.Algorithm):
        def step(self, x, g, state, node):
            return x

    with pytest.raises(qg.InputError, match=r"step of Half returns a Tensor; it has to return \(x, state\)"):
        qg.train(qg.Task(nn.Linear(3, 2), LOSS, (X, Y)), **(SHORT | {"algorithm": Half()}))


def test_more_outputs_than_labels_are_allowed_for_own_data():
    qg.train(qg.Task(nn.Linear(3, 5), LOSS, (X, Y)), **SHORT)


def test_a_module_that_cannot_be_stacked_trains_one_by_one(caplog):
    class Branches(nn.Linear):
        def forward(self, x):
            return super().forward(x) if x.sum().item() > 0 else super().forward(-x)

    run = qg.train(qg.Task(Branches(3, 2), LOSS, (X, Y)), **SHORT)
    assert len(run.records) == 3
    assert sum("item in Branches fails on the route Traced" in record.message for record in caplog.records) == 1


# ------------------------------------------------------------------------------------------------ callbacks


class Notes:
    def __init__(self):
        self.events, self.models = [], []

    def on_start(self, run):
        self.events.append("start")

    def on_step(self, run):
        self.events.append(run.step)

    def on_epoch(self, run):
        self.events.append(f"epoch {run.epoch}: {len(run.records)}")
        self.models.append(run.model(1))

    def on_end(self, run):
        self.events.append("end")


def test_callbacks_are_called_with_the_run():
    notes = Notes()
    run = qg.train(own_tasks.classification(), **SHORT | {"epochs": 2, "batch": 20}, callbacks=[notes])
    assert notes.events == ["start", 1, 2, "epoch 1: 1", 3, 4, "epoch 2: 2", "end"]
    assert notes.models[-1][0].weight.equal(run.model(1)[0].weight)
    with pytest.raises(qg.InputError, match="has none of the methods on_start"):
        qg.train(own_tasks.classification(), **SHORT, callbacks=[object()])


def test_a_callback_ends_the_training_for_good(tmp_path):
    class Enough:
        def on_epoch(self, run):
            if run.epoch == 2:
                run.stop()

    task = own_tasks.classification()
    run = qg.train(task, **SHORT, runs=tmp_path, callbacks=[Enough()])
    with pytest.warns(UserWarning, match=r"a callback ended .* after epoch 2 of 3; delete the folder"):
        again = qg.train(task, **SHORT, runs=tmp_path)
    assert len(run.records) == len(again.records) == 2
    assert run.status == again.status == "finished"


def test_early_stopping_keeps_to_its_patience():
    stop = qg.callbacks.EarlyStopping(3, min_delta=1e-3)
    run = qg.train(own_tasks.regression(), **SHORT | {"epochs": 40, "lr": 1e-9}, callbacks=[stop])
    assert len(run.records) == 4


@pytest.mark.parametrize("folders", [True, False])
def test_keep_best_keeps_each_nodes_best_model(tmp_path, folders):
    torch.manual_seed(0)
    task = qg.Task(nn.Linear(3, 2), functional.cross_entropy, parts_of_people(15, 25, 40))
    keep = qg.callbacks.KeepBest()
    how = SHORT | {"topology": "complete:3", "epochs": 12, "lr": 0.5}
    run = qg.train(task, **how, runs=tmp_path if folders else None, callbacks=[keep])
    for node in range(3):
        values = [record["accuracy_own_nodes"][node] for record in run.records]
        epoch, value = keep.best[0][node]
        assert value == max(values) == values[epoch - 1]
        state = load_file(run.runs[0].folder / "best" / f"node-{node}.safetensors") if folders else keep.models[0][node]
        model = task.module(0)
        model.load_state_dict(state)
        part = task.data.test_parts[node]
        right = (model(task.data.test.x[part]).argmax(dim=1) == task.data.test.y[part]).double().mean()
        assert float(right) == pytest.approx(value)


def test_csv_and_tensorboard_write_every_epoch(tmp_path):
    callbacks = [qg.callbacks.CSV(), qg.callbacks.TensorBoard()]
    run = qg.train(own_tasks.regression(), **SHORT, runs=tmp_path, callbacks=callbacks)
    rows = list(csv.DictReader((run.runs[0].folder / "records.csv").read_text().splitlines()))
    assert [float(row["mae"]) for row in rows] == [record["mae"] for record in run.records]
    assert json.loads(rows[-1]["mae_nodes"]) == run.records[-1]["mae_nodes"]
    assert list((run.runs[0].folder / "tensorboard").iterdir())


def test_a_notebook_draws_the_curves():
    run = qg.train(own_tasks.regression(), **SHORT, seeds=2)
    shown = run._repr_html_()
    assert shown.startswith("<p>&lt;Trained: qg-dsgdm-n on ring:4, 3 epochs, 2 seeds, mae")
    assert "<svg" in shown




# ------------------------------------------------------------------------------------------------ what was once wrong


@pytest.mark.slow
def test_runs_of_one_name_stay_apart_in_tables(tmp_path, capsys):
    for hidden in (4, 8, 16):
        net = nn.Sequential(nn.Linear(3, hidden), nn.Linear(hidden, 2))
        qg.train(qg.Task(net, LOSS, (X, Y)), **SHORT, runs=tmp_path)
    look.compare(tuple(sorted(tmp_path.iterdir())), markdown=True)
    assert capsys.readouterr().out.count("| Sequential (") == 3


def test_random_numbers_of_any_kind_are_seeded_and_never_frozen():
    class Random(nn.Linear):
        def forward(self, x):
            x = functional.dropout(x, 0.5, self.training) + torch.randn_like(x)
            return super().forward(x) * (random.random() + np.random.rand())

    torch.manual_seed(0)
    task, how = qg.Task(Random(3, 2), LOSS, (X, Y)), SHORT | {"epochs": 30}
    one, other = (qg.train(task, **how, checkpoint_seconds=0) for _ in range(2))
    assert untimed(one.records) == untimed(other.records)
    assert len({record["loss"] for record in one.records}) == 30


def test_buffers_that_forward_assigns_are_kept():
    class Average(nn.Linear):
        def __init__(self):
            super().__init__(3, 2)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x):
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * (x.detach().mean(dim=0) + 5)
            return super().forward(x)

    run = qg.train(qg.Task(Average(), LOSS, (X, Y)), **SHORT)
    assert all((run.model(node).mean > 1).all() for node in range(4))


def test_large_numbers_are_not_a_divergence_and_a_divergence_is_told():
    x = drawn(400, 6)
    y = torch.where(torch.arange(400)[:, None] < 200, torch.zeros(400, 1), x[:, :1] * 300 + 500)
    run = qg.train(qg.Task(nn.Linear(6, 1), functional.mse_loss, (x, y), test=(x, y)), **SHORT)
    assert (len(run.records), run.status) == (3, "finished")
    with pytest.warns(UserWarning, match="diverged in epoch . of 3; try a smaller lr"):
        run = qg.train(own_tasks.regression(), **SHORT | {"lr": 1e6})
    assert run.status == "diverged"


def test_the_test_loss_is_the_loss_on_the_test_data_whatever_trains_beside_it():
    x, y = drawn(900, 3), torch.arange(900) * 3 // 900
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 10.0, 100.0]))
    task = qg.Task(nn.Linear(3, 3), loss, (x, y), test=(x, y))
    run = qg.train(task, **SHORT | {"precision": "fp64", "epochs": 1, "batch": 60}, seeds=9)
    with torch.no_grad():
        expected = [float(loss.double()(run.model(node)(x.double()), y)) for node in range(4)]
    assert run.records[-1]["test_loss_nodes"] == pytest.approx(expected, rel=1e-9)


def test_yes_no_logits_of_whole_targets_have_no_recall():
    for net in (nn.Linear(3, 1), nn.Sequential(nn.Linear(3, 1), nn.Flatten(0))):
        def loss(output, target):
            return functional.binary_cross_entropy_with_logits(output.flatten(), target.float())

        run = qg.train(qg.Task(net, loss, (X, Y), metrics={"accuracy": qg.metrics.accuracy}), **SHORT)
        assert "recall_worst" not in run.records[-1]


def test_a_list_may_mix_arrays_and_data_sets_that_are_read_anew():
    parts = [(X + k, torch.full((20,), k % 2)) for k in range(3)]
    mixed = [parts[0], Pairs(*parts[1]), Pairs(*parts[2])]
    how = SHORT | {"topology": "complete:3", "precision": "fp64"}
    torch.manual_seed(0)
    kept = qg.train(qg.Task(nn.Linear(3, 2), LOSS, mixed), **how)
    torch.manual_seed(0)
    anew = qg.train(qg.Task(nn.Linear(3, 2), LOSS, mixed, cache=False), **how)
    assert anew.records[-1]["loss"] == pytest.approx(kept.records[-1]["loss"], rel=1e-12)


def test_a_function_that_returns_one_module_gives_each_node_its_own():
    net = nn.Linear(3, 2)
    before = net.weight.clone()
    run = qg.train(qg.Task(lambda: net, LOSS, (X, Y)), **SHORT | {"alpha": 0.1})
    assert not run.model(0).weight.equal(run.model(1).weight)
    assert net.weight.equal(before)


def test_frozen_and_tied_weights_are_in_every_state_dict(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
            self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
            self.other.weight = self.one.weight
            self.out = nn.Linear(3, 2)

        def forward(self, x):
            return self.out(self.other(self.one(self.frozen(x)).relu()))

    keep = qg.callbacks.KeepBest()
    run = qg.train(qg.Task(Tied(), LOSS, (X, Y)), **SHORT, runs=tmp_path, callbacks=[keep])
    state = load_file(run.folder / "best" / "node-2.safetensors")
    Tied().load_state_dict(state)
    assert state["frozen.weight"].equal(run.model(2).frozen.weight)


def test_a_warm_up_ends_at_the_peak_also_below_the_usual_start():
    def rates(**how):
        run = qg.train(own_tasks.classification(), **SHORT | {"epochs": 4, "batch": 40} | how)
        return [record["lr"] for record in run.records]

    assert rates(lr=0.5, warmup=2, schedule="linear") == pytest.approx([0.1, 0.3, 0.5, 0.25])
    assert rates(lr=0.05, warmup=2, schedule="cosine") == pytest.approx([0.005, 0.0275, 0.05, 0.025])


def test_a_graph_in_a_file_counts_by_its_content(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("g.csv").write_text("0,1\n1,2\n2,3\n3,0\n")
    task = own_tasks.classification()

    def folder(graph):
        return qg.train(task, **SHORT | {"topology": graph, "lr": None}, runs="runs").folder

    first = folder("g.csv")
    assert "g.csv" in first.name
    assert folder(Path("g.csv")) == first
    Path("g.csv").write_text("0,1\n1,2\n2,3\n")
    assert folder("g.csv") != first
    Path("g.csv").unlink()
    look.compare((first,))


def test_a_changed_global_of_a_metric_is_noticed_by_the_same_task(tmp_path):
    limit = [0.1]

    def near(output, target):
        return ((output - target).abs() < limit[0]).float()

    task = qg.Task(nn.Linear(3, 1), functional.mse_loss, (X, X[:, :1]), metrics={"near": near})
    first = qg.train(task, **SHORT, runs=tmp_path)
    limit[0] = 10.0
    assert qg.train(task, **SHORT, runs=tmp_path).folder != first.folder


def test_keep_best_uses_all_test_data_where_a_node_has_no_score_of_its_own():
    parts = [(drawn(12, 3) + k, torch.full((12,), k % 2)) for k in range(4)]
    keep = qg.callbacks.KeepBest()
    task = qg.Task(nn.Linear(3, 2), LOSS, parts, metrics={"auc": qg.metrics.auc})
    run = qg.train(task, **SHORT, callbacks=[keep])
    assert all(np.isnan(run.records[-1]["auc_own_nodes"]))
    for node, (epoch, value) in keep.best[0].items():
        assert value == run.records[epoch - 1]["auc_nodes"][node]


def test_a_bar_needs_a_kernel_not_only_its_packages():
    pytest.importorskip("IPython")
    script = "import IPython, sys, types; sys.modules['ipykernel'] = types.ModuleType('ipykernel')\n"
    script += "from quasiglobal.api.train import _in_notebook\nassert not _in_notebook()"
    subprocess.run([sys.executable, "-c", script], check=True)


SCHEDULES = [lambda done: done, lambda done: 1 / 0, lambda done: None, lambda done: 1 - 2 * done]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_schedule_that_fails_leaves_nothing_behind(tmp_path, schedule):
    with pytest.raises(qg.InputError, match="the schedule at"):
        qg.train(own_tasks.classification(), **SHORT, schedule=schedule, runs=tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_metrics_of_callbacks_follow_their_mark_and_have_to_exist(tmp_path):
    stop = qg.callbacks.EarlyStopping(3, metric="test_loss")
    run = qg.train(own_tasks.regression(), **SHORT | {"algorithm": "dsgd", "epochs": 12, "lr": 0.01}, callbacks=stop)
    assert len(run.records) == 12, "the test loss falls, which is better"
    for callback in (qg.callbacks.EarlyStopping(metric="nonsense"), qg.callbacks.KeepBest(metric="nonsense")):
        with pytest.raises(qg.InputError, match="unknown metric 'nonsense'"):
            qg.train(own_tasks.regression(), **SHORT, callbacks=[callback])


def test_lazy_layers_numpy_numbers_and_long_names_are_fine(tmp_path):
    kind = type("Long" * 70, (nn.Sequential,), {})
    task = qg.Task(kind(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(2)), LOSS, (X, Y))
    run = qg.train(task, **SHORT | {"epochs": np.int64(2), "batch": np.int64(8)}, runs=tmp_path)
    assert len(run.records) == 2


def test_embeddings_need_no_output_per_class():
    def pull_together(output, target):
        same = target[:, None] == target
        return torch.cdist(output, output).square()[same].mean()

    assert len(qg.train(qg.Task(nn.Linear(3, 2), pull_together, (X, torch.arange(20) % 5)), **SHORT).records) == 3


def test_padding_does_not_count_as_wrong():
    output = functional.one_hot(torch.tensor([[1, 2, 0, 0]]), 3).float()
    assert qg.metrics.accuracy(output, torch.tensor([[1, 0, -100, -100]])).tolist() == [0.5]


def test_sizes_of_a_partition_may_depend_on_the_seed():
    def some(targets, n, rng):
        return np.array_split(rng.permutation(40 + 40 * rng.integers(3)), n)

    run = qg.train(own_tasks.classification(), **SHORT, seeds=3, partition=some)
    assert [len(one) for one in run.runs] == [3, 3, 3]


def test_a_command_does_not_continue_after_its_code_has_changed(tmp_path, monkeypatch, capsys):
    module = tmp_path / "changing_nets.py"
    text = "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    words = ["train", "--model", "changing_nets:net", "--topology", "ring:4", "--epochs", "1", "--device", "cpu"]

    def command(source):
        module.write_text(source)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["qg", *words])
        monkeypatch.setattr(sys, "dont_write_bytecode", True)
        sys.modules.pop("changing_nets", None)
        linecache.clearcache()
        main()

    command(text)
    command(f"# a comment\n{text}")
    assert "is already" in capsys.readouterr().out
    with pytest.raises(SystemExit) as ended:
        command(text.replace("nn.Flatten(), ", "nn.Flatten(), nn.Dropout(0.1), "))
    assert ended.value.code == 2
    assert "changing_nets:net is another model than runs/" in capsys.readouterr().err
