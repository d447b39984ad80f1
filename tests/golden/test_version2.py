"""Files of version 2: half-finished runs resume bit for bit; exports stay; sites of both versions train together.

`version2/runs/` holds runs that version 2 was killed in half-way (`half`) and the same runs finished by version 2
(`ended`). These tests use the command line, `qg.optim` and files.
"""

import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import ExitStack
from pathlib import Path

import federations
import gossip_loops
import numpy as np
import pytest
import torch
from federations import Sites
from owners import Owners
from processes import together
from safetensors.torch import load_file
from test_version1 import cpu_name
from torch.distributed import TCPStore

from quasiglobal.cli import main

HERE = Path(__file__).parent / "version2" / "runs"
WHEEL = HERE.parent / "quasiglobal-0.1.0-py3-none-any.whl"

COMMON = ["--model", "cnn", "--norm", "bn", "--width", "0.0625", "--alpha", "1", "--batch", "64", "--warmup", "1"]
COMMON += ["--epochs", "6", "--lr", "0.1", "--device", "cpu"]
SIMULATED = {
    "rows": [
        "--algorithm", "qg-dsgdm-n", "--topology", "ring:4", "--schedule", "cosine", "--clip", "1", "--keep-best",
        "--weights", "1,2,3,4", "--communication", "complete@0.6-0.8",
    ],
    "edges": ["--algorithm", "relaysgd:beta=0.9", "--topology", "chain:4", "--drop", "0.1"],
    "edges-churn": ["--algorithm", "lt-admm:tau=3", "--topology", "ring:4", "--drop", "0.2", "--churn", "0.1"],
    "push": ["--algorithm", "qg-sgp", "--topology", "version2_graphs:one_way"],
    "compressed": ["--algorithm", "choco", "--topology", "ring:4", "--wire", "qsgd:4"],
    "pairs": [
        "--algorithm", "noloco:tau=3", "--topology", "matching:4", "--validation", "0.2", "--metric", "f1", "auc",
        "--draws", "shared",
    ],
}
SEEDS = {"rows": ["--seeds", "3"]}
PROCESSES = {
    "processes-compressed": ["--algorithm", "choco", "--topology", "ring:4", "--wire", "topk:0.25"],
    "processes-edges": ["--algorithm", "lt-admm:tau=3", "--topology", "ring:4", "--communication", "merge@end"],
}

EXPERIMENT = """
model = "cnn"
width = 0.0625
topology = "complete:2"
algorithm = "{algorithm}"
precision = "fp64"
epochs = 6
steps = 5
lr = 0.05
warmup = 1.0
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
shape = [1, 8, 8]
mean = [0.3]
std = [0.4]
"""
NODES = {"site": "qg-dsgdm-n", "node": "lt-admm:tau=2"}

EXPORTS = {
    "node": ("rows/ended/*-s1-*", ["--node", "1"]),
    "average": ("rows/ended/*-s1-*", []),
    "best": ("rows/ended/*-s1-*", ["--node", "2", "--best"]),
    "pushed": ("push/ended/*", []),
    "site": ("site/ended/runs1/*", []),
}
"""A run that version 2 finished, and the words of its export."""

MEASURED = {"images_per_second", "torch", "metrics", "sha256"}
"""Entries that differ between two runs of one command: speed and version, size of the records, sum of a checkpoint."""


@pytest.fixture
def qg(monkeypatch):
    """Run `qg` in this process, on one thread like the recorded runs: threads change the order of sums."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["qg", *map(str, words)])
        main()

    assert torch.get_num_threads() == 1
    return run


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    """Whether this machine rounds like the recording machine: libraries choose their kernels by the CPU.

    CPUs of several generations have the same name, so a recorded run is trained from its beginning as well.
    """
    if json.loads((HERE / "machine.json").read_text()) != machine():
        return False
    runs = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["qg", *map(str, training("compressed", runs))])
        main()
    (theirs,) = (HERE / "compressed" / "ended").rglob("checkpoint/*.safetensors")
    (ours,) = runs.rglob(f"checkpoint/{theirs.name}")
    return alike(load_file(ours), load_file(theirs), exact=True)


def machine():
    """The facts that decide which kernels the libraries choose."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "capability": torch.backends.cpu.get_cpu_capability(),
        "cpu": cpu_name(),
    }


def training(case, runs, *words):
    """The command of the recorded runs of a case in the simulator."""
    return "train", *COMMON, *SIMULATED[case], *(words or SEEDS.get(case, [])), "--runs", runs


def alike(ours, theirs, exact):
    """Whether two values of JSON or tensors are equal or, if not `exact`, equal up to rounding.

    Another kind of CPU rounds otherwise. With AVX2 or SSE in place of AVX512, weights and states differed by up to 6e-5
    and losses by 2e-7; shares of the 360 test images differ in steps of 0.003.
    """
    if isinstance(theirs, dict):
        return ours.keys() >= theirs.keys() and all(
            alike(ours[name], value, exact) for name, value in theirs.items() if name not in MEASURED
        )
    if isinstance(theirs, list):
        return len(ours) == len(theirs) and all(alike(a, b, exact) for a, b in zip(ours, theirs, strict=True))
    if isinstance(theirs, torch.Tensor):
        if exact or not theirs.is_floating_point():
            return ours.dtype == theirs.dtype and ours.equal(theirs)
        return ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-3, atol=1e-3)
    return ours == (pytest.approx(theirs, rel=1e-2, abs=1e-2) if isinstance(theirs, float) and not exact else theirs)


def assert_alike(ours, theirs, exact):
    """Assert that a folder has all files of a recorded folder, with the same models, states, records and summary."""
    files = [path.relative_to(theirs) for path in theirs.rglob("*") if path.is_file()]
    assert files
    for name in files:
        mine = ours / name
        assert mine.is_file(), f"{name} is made again"
        if name.suffix == ".safetensors":
            assert alike(load_file(mine), load_file(theirs / name), exact), name
        elif name.suffix in (".json", ".jsonl"):
            for line, before in zip(values_in(mine), values_in(theirs / name), strict=True):
                assert alike(line, before, exact), name


def assert_resumed(runs, case, name, exact):
    """Assert that a run ended like the recorded one, and was resumed: another training gives the same models.

    The records up to the checkpoint are those of version 2, with the speed that it measured.
    """
    half, ended = (HERE / case / when / name for when in ("half", "ended"))
    assert_alike(runs / name, ended, exact)
    saved = min(max(int(path.stem) for path in folder.glob("*.json")) for folder in half.rglob("checkpoint"))
    assert saved >= 3
    mine, before = (
        [record["images_per_second"] for record in values_in(run / "metrics.jsonl")[:saved]]
        for run in (runs / name, ended)
    )
    assert mine == pytest.approx(before), "it resumed, and did not begin anew"


def values_in(path):
    text = path.read_text()
    return [json.loads(line) for line in text.splitlines()] if path.suffix == ".jsonl" else [json.loads(text)]


def half(case, tmp_path):
    """A copy of the half-finished runs of a case."""
    return shutil.copytree(HERE / case / "half", tmp_path / "runs")


@pytest.mark.parametrize("case", SIMULATED)
def test_a_half_finished_run_of_the_simulator_resumes_bit_for_bit(tmp_path, qg, case, exact):
    runs = half(case, tmp_path)
    names = sorted(folder.name for folder in runs.iterdir())
    qg(*training(case, runs))
    assert sorted(folder.name for folder in runs.iterdir()) == names, "the experiment's name stayed"
    for name in names:
        assert_resumed(runs, case, name, exact)


@pytest.mark.parametrize("words", [("--seed", "1"), ("--seed", "2", "--seeds", "2")])
def test_rows_of_one_program_resume_alone_and_beside_a_row_that_begins(tmp_path, qg, words, exact):
    """Version 2 had the rows of seeds 0, 1 and 2 in one program."""
    runs = half("rows", tmp_path)
    begun = {folder.name for folder in runs.iterdir()}
    qg(*training("rows", runs, *words))
    ended = [path.parent for path in runs.glob("*/summary.json")]
    assert len(ended) == int(words[-1])
    for folder in ended:
        if folder.name in begun:
            assert_resumed(runs, "rows", folder.name, exact)
        else:
            assert_alike(folder, HERE / "rows" / "ended" / folder.name, exact)


@pytest.mark.slow
@pytest.mark.parametrize("case", PROCESSES)
def test_a_half_finished_run_over_processes_resumes_bit_for_bit(tmp_path, qg, case, exact):
    runs = half(case, tmp_path)
    (before,) = runs.iterdir()
    words = ["--engine", "distributed", "--processes", "2", "--runs", runs]
    with pytest.raises(SystemExit) as ended:
        qg("train", *COMMON, *PROCESSES[case], *words)
    assert ended.value.code == 0
    assert [before] == list(runs.iterdir())
    assert_resumed(runs, case, before.name, exact)


class Two(Owners):
    """Two owners of digits with one node each, in a federation or, with a secret, at a rendezvous."""

    def __init__(self, folder, kind):
        super().__init__(folder, epochs=6)
        (folder / "experiment.toml").write_text(EXPERIMENT.format(algorithm=NODES[kind]))
        if kind == "site":
            self.places = [["--site", str(site.path)] for site in Sites(folder, "complete:2", 2).folders]
        else:
            self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.places = [["--node", str(k), "--rendezvous", f"127.0.0.1:{self.store.port}"] for k in range(2)]

    def meet(self, *words, paths=(None, None), program=("-m", "quasiglobal"), status=0, more=((), ())):
        """Start both nodes, each with its path of modules and `more` words; wait for them."""
        words = ["--device", "cpu", "--patience", "100", *words]
        before = [[] if path is None else ["env", f"PYTHONPATH={path}"] for path in paths]
        nodes = [
            self.launch(k, *self.places[k], *words, *more[k], before=before[k], program=program) for k in range(2)
        ]
        return [self.said(node, k, status) for k, node in enumerate(nodes)]

    def simulate(self, qg):
        """The models of the simulator, from the data of both."""
        with np.load(self.folder / "all.npz") as data:
            mine = data["owner"] < 2
            np.savez(self.folder / "both.npz", **{
                name: values if name.endswith("_test") else values[mine] for name, values in data.items()
            })
        toml, runs = self.folder / "experiment.toml", self.folder / "simulated"
        data = ["--data", f"folder:{self.folder / 'both.npz'}", "--partition", "by:owner"]
        qg("train", toml, *data, "--device", "cpu", "--runs", runs)
        return last_rows(runs)

    def models(self):
        """The last models of both nodes."""
        return [last_rows(self.folder / f"runs{k}") for k in range(2)]


def last_rows(runs):
    """The rows of the last checkpoint of the only run in a folder."""
    return load_file(max(runs.rglob("checkpoint/*.safetensors")))


@pytest.fixture
def two(tmp_path, monkeypatch):
    """Factory of two owners; their nodes are killed after the test."""
    monkeypatch.setenv("QG_SECRET", "of both")
    with ExitStack() as stack:
        def make(kind):
            made = Two(tmp_path, kind)
            stack.callback(made.close)
            return made

        yield make


@pytest.mark.slow
@pytest.mark.parametrize("kind", NODES)
def test_half_finished_nodes_of_owners_resume_bit_for_bit(tmp_path, two, kind, exact):
    both = two(kind)
    for k in range(2):
        shutil.copytree(HERE / kind / "half" / f"runs{k}", tmp_path / f"runs{k}")
    both.meet()
    for k in range(2):
        (folder,) = (tmp_path / f"runs{k}").iterdir()
        assert_resumed(tmp_path, kind, folder.relative_to(tmp_path), exact)


def earlier(folder, commit=None):
    """The folder of the code of version 2, or of a commit in this repository's history."""
    place = folder / "earlier"
    if commit is None:
        with zipfile.ZipFile(WHEEL) as wheel:
            wheel.extractall(place)
    else:
        command = ["git", "archive", "--format=zip", f"{commit}:src"]
        archive = subprocess.run(command, cwd=HERE.parents[3], capture_output=True)
        if archive.returncode:
            pytest.skip(f"the history here does not go back to commit {commit}")
        with zipfile.ZipFile(io.BytesIO(archive.stdout)) as source:
            source.extractall(place)
    found = subprocess.run(
        [sys.executable, "-c", "import importlib.util as u; print(u.find_spec('quasiglobal').origin)"],
        env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True, check=True,
    )
    assert Path(found.stdout.strip()).is_relative_to(place), "the earlier code runs, not today's"
    return place


@pytest.mark.parametrize(("kind", "commit"), [
    ("site", None), pytest.param("node", None, marks=pytest.mark.slow),
    pytest.param("site", "3105bbb", marks=pytest.mark.slow),
])
def test_a_node_of_an_earlier_version_and_one_of_today_train_together(tmp_path, two, kind, commit, qg):
    """To 1e-12, the rounding of 30 steps in float64: the sums over the neighbours have another order."""
    both = two(kind)
    both.meet(paths=(earlier(tmp_path, commit), None), more=([], ["--bandwidth", "1gbit"] if kind == "site" else []))
    expected = both.simulate(qg)
    for k, model in enumerate(both.models()):
        assert model.keys() == expected.keys()
        torch.testing.assert_close(model["x"][0], expected["x"][k], rtol=0, atol=1e-12)


@pytest.mark.slow
def test_an_earlier_version_reads_every_federation_file_without_a_relay(tmp_path):
    place, ports = earlier(tmp_path), federations.free_ports(1)
    for name, relays in (("plain", []), ("relayed", [2])):
        of = Sites(tmp_path, "ring:3", 3, name=name, addresses=["a:1", "b:2", f"127.0.0.1:{ports[0]}"], relays=relays)
        said = subprocess.run(
            [sys.executable, "-m", "quasiglobal", "site", "show", "--folder", of.folders[0].path],
            env=os.environ | {"PYTHONPATH": str(place)}, capture_output=True, text=True,
        )
        assert said.returncode == (2 if relays else 0)
        assert ("it was made by another version of quasiglobal" in said.stderr) == bool(relays)


@pytest.mark.parametrize("case", [
    "outer-momentum", *(pytest.param(case, marks=pytest.mark.slow) for case in ("groups", "overlap", "edges"))
])
def test_an_optimizer_goes_on_from_the_state_that_version_2_saved(case, exact):
    """To 1e-9 elsewhere: the rounding of 10 steps in float64."""
    file = HERE / "optimizer" / f"{case}.pt"
    ended = torch.load(file, weights_only=True)["ended"]
    close = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-9, "atol": 1e-9}
    for (_, row), expected in zip(together(2, gossip_loops.trained, case, file), ended, strict=True):
        torch.testing.assert_close(row, expected, **close)


@pytest.mark.parametrize("name", EXPORTS)
def test_a_finished_run_is_exported_byte_for_byte(tmp_path, qg, name):
    place, words = EXPORTS[name]
    (run,) = HERE.glob(place)
    qg("export", run, *words, "--out", tmp_path / "model.safetensors")
    assert content(tmp_path / "model.safetensors") == content(HERE / "exports" / f"{name}.safetensors")


def content(path):
    """The header and the bytes of the tensors; safetensors writes the texts of the header in a random order."""
    written = path.read_bytes()
    first = 8 + int.from_bytes(written[:8], "little")
    return json.loads(written[8:first]), written[first:]


def lines_without_onnx(path):
    """The lines of a file, but for the one about the ONNX file, which is written only where onnx is installed."""
    return [line for line in path.read_bytes().splitlines(keepends=True) if b"`model.onnx`" not in line]


def test_an_exported_folder_has_the_same_files(tmp_path, qg):
    place, words = EXPORTS["average"]
    (run,) = HERE.glob(place)
    qg("export", run, *words, "--out", tmp_path / "model")
    recorded = HERE / "exports" / "folder"
    for path in recorded.iterdir():
        read = content if path.suffix == ".safetensors" else lines_without_onnx
        assert read(tmp_path / "model" / path.name) == read(path), path.name
    with np.load(HERE / "exports" / "x.npz") as data:
        outputs = torch.export.load(tmp_path / "model" / "model.pt2").module()(torch.from_numpy(data["x"] / 16).float())
    found = json.loads((HERE / "exports" / "average.json").read_text())
    expected = torch.tensor([list(one["probabilities"].values()) for one in found])
    torch.testing.assert_close(outputs.softmax(dim=1), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["average", "pushed"])
def test_an_exported_model_of_version_2_predicts_the_same(tmp_path, qg, name, exact, capsys):
    exports = HERE / "exports"
    for kind in ("json", "csv"):
        qg("predict", exports / f"{name}.safetensors", exports / "x.npz", "--out", tmp_path / f"{name}.{kind}")
    assert alike(*(json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, exports)), exact)
    ours, theirs = ((folder / f"{name}.csv").read_text() for folder in (tmp_path, exports))
    assert ours.splitlines()[0] == theirs.splitlines()[0]
    if exact:
        assert ours == theirs
    capsys.readouterr()
    qg("evaluate", exports / f"{name}.safetensors", "--json")
    assert alike(json.loads(capsys.readouterr().out), json.loads((exports / f"{name}-score.json").read_text()), exact)
