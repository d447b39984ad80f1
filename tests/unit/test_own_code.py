"""Which Python code a command runs: none of the current folder, unless the user named it."""

import importlib.util
import json
import os
import py_compile
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from terminal import inside

from quasiglobal.cli import groups, modules
from quasiglobal.common import own_code
from quasiglobal.errors import InputError
from quasiglobal.peers.folders import OrganiserFolder, SiteFolder
from quasiglobal.topology import parse
from quasiglobal.training.experiment import from_toml

BEFORE_US = {
    "importlib", "warnings", "contextlib", "collections", "functools", "types", "operator", "keyword", "reprlib",
    "threading",
}
"""Modules that `python -m` itself imports from the current folder, before any of the package; see docs/your-own.md."""

OTHERS = (
    "torch", "numpy", "cryptography", "cffi", "rich", "tyro", "safetensors", "scipy", "networkx", "matplotlib", "PIL",
    "sklearn", "transformers", "typing_extensions", "sympy", "sitecustomize", "usercustomize",
)

ON_EVERY_COMMAND = """
import sys, quasiglobal
from quasiglobal.cli import groups, main, modules
for command in modules(groups()):
    sys.argv = ["qg", command, "--help"]
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, command
    print("tried", command)
"""


def trace(folder, name):
    """Lines of a module that show that they ran."""
    return f"with open({str(folder / 'ran')!r}, 'a') as file:\n    file.write('{name} ')\n"


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A folder with a file for every module of Python and of the packages used, each of which leaves a trace."""
    folder = tmp_path_factory.mktemp("hostile")
    for name in {*sys.stdlib_module_names, *OTHERS}:
        (folder / f"{name}.py").write_text(f"{trace(folder, name)}raise ImportError('the hostile {name}')\n")
    return folder


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty current folder and a configuration of its own."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "configuration"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


NET = "from torch import nn\n\ndef net():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"


def code(folder, name, text=NET):
    """A module that leaves a trace when it is imported."""
    folder.mkdir(exist_ok=True)
    sys.modules.pop(name, None)
    (folder / f"{name}.py").write_text(f"{trace(folder, name)}{text}")


def ran(folder):
    return (folder / "ran").exists()


def remembered(folder):
    file = folder.parent / "configuration" / "quasiglobal" / "code.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


# ------------------------------------------------------------------------------------------ the current folder


def console_script(folder):
    """The program `qg` as pip installs it, whose own folder is first on the path."""
    folder.mkdir()
    (folder / "qg").write_text("from quasiglobal.cli import main\nmain()\n")
    return [sys.executable, str(folder / "qg")]


def federation(folder):
    """An organiser's folder, and a request in the hostile folder."""
    organiser = OrganiserFolder(folder / "organiser")
    organiser.new("lungs", "ring:4", 30)
    return organiser, SiteFolder(folder / "site").request("lungs", "aachen", "127.0.0.1:4400")[0]


@pytest.mark.parametrize("module", [False, True], ids=["qg", "python -m"])
def test_no_file_beside_a_request_runs_when_it_is_approved(hostile, tmp_path, module):
    organiser, request = federation(tmp_path)
    here = shutil.copytree(hostile, tmp_path / "here")
    for name in BEFORE_US if module else ():
        (here / f"{name}.py").unlink()
    shutil.copy(request, here)
    program = [sys.executable, "-m", "quasiglobal"] if module else console_script(tmp_path / "bin")
    words = ["federation", "approve", request.name, "--yes", "--folder", str(organiser.path)]
    done = subprocess.run([*program, *words], cwd=here, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert [site.name for site in organiser.read().sites] == ["aachen"]
    assert not ran(hostile)


def test_no_command_runs_a_file_of_the_current_folder(hostile, tmp_path):
    (tmp_path / "every.py").write_text(ON_EVERY_COMMAND)
    done = subprocess.run([sys.executable, str(tmp_path / "every.py")], cwd=hostile, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert re.findall(r"^tried (\S+)$", done.stdout, re.MULTILINE) == [*modules(groups())]
    assert not ran(hostile)


def test_the_processes_of_a_training_run_no_file_of_the_current_folder_either(hostile, tmp_path):
    here = shutil.copytree(hostile, tmp_path / "here")
    (here / "nets_of_processes.py").write_text(NET)
    words = [
        "train", "--model", "nets_of_processes:net", "--engine", "distributed", "--processes", "2", "--epochs", "1",
        "--topology", "ring:4", "--device", "cpu", "--runs", str(tmp_path / "runs"),
    ]
    done = subprocess.run([*console_script(tmp_path / "bin"), *words], cwd=here, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished" in done.stdout
    assert not ran(hostile)


def test_the_package_leaves_the_path_of_other_programs_alone(tmp_path):
    (tmp_path / "beside.py").write_text("import quasiglobal, sys\nprint(sys.path[0])\n")
    for words in (["beside.py"], ["-m", "beside"], ["-c", "import beside"]):
        done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=True)
        assert done.stdout.strip() in (str(tmp_path), "")


def test_the_current_folder_comes_last_and_only_for_code_that_is_there(here, monkeypatch, capsys):
    before = [*sys.path]
    code(here, "nets_last", f"import sys\nPATH = [*sys.path]\n{NET}")
    words = ["check", "--model", "nets_last:net", "--topology", "ring:4", "--device", "cpu"]
    assert inside(monkeypatch, capsys, *words)[0] == 0
    assert [*before, str(here)] == sys.modules["nets_last"].PATH
    assert sys.path == before
    code(here, "nets_refused")
    (here / "mailed.toml").write_text('model = "nets_refused:net"\n')
    seen = []
    monkeypatch.setattr("quasiglobal.cli.train.prepare", lambda *given: seen.append([*sys.path]) or exit(2))
    for words in (["--model", "mlp"], ["mailed.toml"]):
        assert inside(monkeypatch, capsys, "check", *words)[0] == 2
    assert seen == [before, before]


# -------------------------------------------------------------------------------------- names that files have


SETTINGS = {
    "model": "{}:net", "loss": "{}:net", "metric": ["{}:net"], "data": "{}:net", "algorithm": "{}:net:beta=0.5",
    "topology": "every:2/{}:net",
}

@pytest.mark.parametrize(("command", "setting"), [
    (command, setting) for command in ("train", "check", "tune", "node") for setting in SETTINGS
    if (command, setting) != ("node", "data")               # the data of `qg node` are typed
])  # fmt: skip
def test_an_experiment_by_mail_runs_no_code(here, monkeypatch, capsys, command, setting):
    name, value = f"mailed_{setting}_{command}", SETTINGS[setting]
    code(here, name)
    value = [value[0].format(name)] if isinstance(value, list) else value.format(name)
    settings, words = {"topology": "ring:4", "epochs": 1, setting: value}, [command, "mailed.toml"]
    if command == "node":
        np.savez(here / "site.npz", x=np.zeros((20, 1, 8, 8), np.float32), y=np.arange(20) % 10)
        settings |= {"classes": list("0123456789"), "steps": 2, "shape": [1, 8, 8], "mean": [0.5], "std": [0.5]}
        words += ["--data", "site.npz", "--node", "0", "--rendezvous", "127.0.0.1:1", "--patience", "0.1"]
    (here / "mailed.toml").write_text("\n".join(f"{key} = {json.dumps(one)}" for key, one in settings.items()))
    status, _, err = inside(monkeypatch, capsys, *words)
    assert (status, len(err.splitlines())) == (2, 1)
    assert f"{name}:net in mailed.toml would import {name} from {here}/{name}.py, which you have not allowed" in err
    assert err.endswith(f"add --allow-code {name}\n")
    assert not ran(here)
    assert not remembered(here)


@pytest.mark.parametrize("name", ["os:abort", "os:_exit", "__main__:main", "shutil:rmtree", "torch.hub:load"])
def test_functions_of_python_are_refused_too(here, monkeypatch, capsys, name):
    (here / "mailed.toml").write_text(f'model = "{name}"\ntopology = "ring:4"\ndevice = "cpu"\n')
    status, _, err = inside(monkeypatch, capsys, "train", "mailed.toml")
    assert status == 2
    assert f"the model {name} in mailed.toml would use {name} of this Python" in err
    assert err.endswith(f"add --allow-code {name}\n")


@pytest.mark.parametrize("settings", [
    {"topology": "quasiglobal.cli.federation:extend"}, {"data": "quasiglobal.cli.federation:extend"},
    {"model": "quasiglobal.cli.federation:extend"}, {"model": "quasiglobal.__main__:main"},
])  # fmt: skip
def test_an_experiment_by_mail_runs_no_command_of_the_library(here, monkeypatch, capsys, settings):
    """Read in the organiser's folder, it would prolong the federation in the organiser's name."""
    before = OrganiserFolder(here / "federation").new("lungs", "ring:4", 30)
    settings = {"topology": "ring:4", "device": "cpu"} | settings
    (here / "mailed.toml").write_text("\n".join(f"{key} = {json.dumps(one)}" for key, one in settings.items()))
    status, _, err = inside(monkeypatch, capsys, "check", "mailed.toml")
    assert status == 2
    assert "which you have not allowed" in err
    assert OrganiserFolder(here / "federation").read() == before


@pytest.mark.parametrize(("name", "value"), [("utilisation", "organiser.key"), ("on", "ray")])
def test_an_experiment_by_mail_writes_to_no_other_file_and_uses_no_other_machine(
    here, monkeypatch, capsys, name, value
):
    (here / "mailed.toml").write_text(f'{name} = "{value}"\ntopology = "ring:4"\n')
    status, _, err = inside(monkeypatch, capsys, "train", "mailed.toml")
    assert status == 2
    assert err == f"qg: {name} cannot be in mailed.toml; give it on the command line, as --{name}\n"


@pytest.fixture
def mailed_run(here, monkeypatch, capsys):
    """A run folder with a model of somebody's code, trained here, and its exported model; as in another folder."""
    code(here, "mailed_nets", f"import quasiglobal as qg\n\nclass Mine(qg.Algorithm):\n    pass\n\n{NET}")
    words = ["--model", "mailed_nets:net", "--topology", "ring:4", "--epochs", "1", "--device", "cpu"]
    assert inside(monkeypatch, capsys, "train", *words)[0] == 0
    (run,) = (here / "runs").iterdir()
    assert inside(monkeypatch, capsys, "export", str(run), "--out", "exported.safetensors")[0] == 0
    (here / "ran").unlink()
    there = here.parent / "there"
    shutil.copytree(here, there)
    code(there, "mailed_nets")
    monkeypatch.chdir(there)
    return there / "runs" / run.name


@pytest.mark.parametrize("words", [
    ("export", "{}"), ("train", "{}/experiment.json", "--seed", "1"), ("predict", "exported.safetensors", "digits"),
    ("evaluate", "exported.safetensors"), ("tune", "{}/experiment.json"), ("check", "{}/experiment.json"),
])  # fmt: skip
def test_a_run_by_mail_runs_no_code(mailed_run, monkeypatch, capsys, words):
    there = Path.cwd()
    status, _, err = inside(monkeypatch, capsys, *(word.format(mailed_run) for word in words))
    assert status == 2
    assert "would import mailed_nets from" in err
    assert "--allow-code mailed_nets" in err
    assert not ran(there)


@pytest.mark.filterwarnings("always:.*allow-code mailed_nets; skipped")
def test_a_run_by_mail_is_listed_without_its_code(mailed_run, monkeypatch, capsys):
    for command in ("runs", "compare", "plot", "report"):
        status, _, err = inside(monkeypatch, capsys, command)
        assert (status, "allow-code" in err) == (0, False), command
    values = json.loads((mailed_run / "experiment.json").read_text())
    (mailed_run / "experiment.json").write_text(json.dumps(values | {"algorithm": "mailed_nets:Mine"}))
    status, out, _ = inside(monkeypatch, capsys, "runs")
    assert status == 2
    assert "warning: the algorithm mailed_nets:Mine in" in out
    assert "add --allow-code mailed_nets; skipped" in " ".join(out.split())
    assert not ran(Path.cwd())


def test_a_federation_by_mail_runs_no_code(here, monkeypatch, capsys):
    code(here, "mailed_graphs")
    organiser = OrganiserFolder(here / "federation")
    organiser.new("lungs", "mailed_graphs:net", 30)
    _, request = SiteFolder(here / "site").request("lungs", "aachen", None)[0], "site/request-aachen.json"
    status, _, err = inside(monkeypatch, capsys, "federation", "approve", request, "--yes")
    assert status == 2
    assert "the topology mailed_graphs:net in federation/federation.json would import mailed_graphs from" in err
    assert not ran(here)


def test_the_file_that_would_run_is_named(here, monkeypatch, capsys):
    code(here, "nets_read")
    (here / "mailed.toml").write_text('model = "nets_read:net"\ntopology = "ring:4"\n')
    assert f"nets_read from {here}/nets_read.py, which" in inside(monkeypatch, capsys, "check", "mailed.toml")[2]
    code(here / "nets_read", "__init__")                    # Python prefers a package, and a library, to the file
    importlib.invalidate_caches()
    assert f"nets_read from {here}/nets_read/, which" in inside(monkeypatch, capsys, "check", "mailed.toml")[2]
    assert not ran(here)


def test_a_compiled_copy_beside_the_source_does_not_run_in_its_place(here, monkeypatch, capsys):
    code(here, "nets_compiled")
    cache = importlib.util.cache_from_source(here / "nets_compiled.py")
    kind = py_compile.PycInvalidationMode.UNCHECKED_HASH    # as Python's are, if their time and size are forged
    py_compile.compile(here / "nets_compiled.py", cfile=cache, doraise=True, invalidation_mode=kind)
    (here / "nets_compiled.py").write_text(NET)
    (here / "mailed.toml").write_text('model = "nets_compiled:net"\ntopology = "ring:4"\ndevice = "cpu"\n')
    assert inside(monkeypatch, capsys, "check", "mailed.toml", "--allow-code", "nets_compiled")[0] == 0
    assert not ran(here)
    assert sys.pycache_prefix is None


# -------------------------------------------------------------------------------------- names that the user gave


def test_a_typed_name_is_remembered_for_files_of_its_folder_alone(here, monkeypatch, capsys):
    code(here, "nets_typed")
    (here / "mine.toml").write_text('model = "nets_typed:net"\ntopology = "ring:4"\nepochs = 1\ndevice = "cpu"\n')
    assert inside(monkeypatch, capsys, "check", "mine.toml")[0] == 2
    assert inside(monkeypatch, capsys, "check", "mine.toml", "--model", "nets_typed:net")[0] == 0
    assert remembered(here) == [{"name": "nets_typed:net", "folder": str(here)}]
    assert inside(monkeypatch, capsys, "check", "mine.toml")[0] == 0
    assert len(remembered(here)) == 1

    other = here.parent / "other"
    code(other, "nets_typed")
    shutil.copy(here / "mine.toml", other)
    monkeypatch.chdir(other)
    status, _, err = inside(monkeypatch, capsys, "check", "mine.toml")
    assert status == 2
    assert f"would import nets_typed from {other}" in err
    assert not ran(other)


@pytest.mark.parametrize("words", [
    ("--allow-code", "nets_allowed"), ("--allow-code=nets_allowed:net",), ("--allow-code", "x", "--allow-code",
    "nets_allowed:net"),
])  # fmt: skip
def test_allowed_code_is_remembered(here, monkeypatch, capsys, words):
    code(here, "nets_allowed")
    (here / "mailed.toml").write_text('model = "nets_allowed:net"\ntopology = "ring:4"\ndevice = "cpu"\n')
    assert inside(monkeypatch, capsys, "check", "mailed.toml", *words)[0] == 0
    assert remembered(here) == [{"name": words[-1].rpartition("=")[2], "folder": str(here)}]
    assert inside(monkeypatch, capsys, "check", "mailed.toml")[0] == 0


def test_a_name_of_python_is_remembered_without_the_rest_of_its_module(here, monkeypatch, capsys):
    words = ["check", "--topology", "ring:4", "--device", "cpu"]
    assert inside(monkeypatch, capsys, *words, "--loss", "torch.nn.functional:cross_entropy")[0] == 0
    assert remembered(here) == [{"name": "torch.nn.functional:cross_entropy", "folder": ""}]
    for loss, status in (("cross_entropy", 0), ("nll_loss", 2)):
        (here / "mailed.toml").write_text(f'loss = "torch.nn.functional:{loss}"\ntopology = "ring:4"\ndevice = "cpu"\n')
        assert inside(monkeypatch, capsys, "check", "mailed.toml")[0] == status


@pytest.mark.parametrize("words", [
    ("topology", "code_typed:graph"), ("topology", "lazy/code_typed:graph"), ("data", "code_typed:data"),
    ("partition", "code_typed:data"), ("algorithms", "code_typed:Mine"), ("check", "--algorithm", "code_typed:Mine"),
    ("algorithms", "slowmo:base=code_typed:Mine"),
])  # fmt: skip
def test_every_command_takes_typed_names(here, monkeypatch, capsys, words):
    text = "import quasiglobal as qg\nimport torch\nfrom quasiglobal.algorithms import DSGD\n"
    text += "graph = {0: [1], 1: [0]}\ndata = (torch.rand(60, 64), torch.arange(60) % 3)\nMine = DSGD\n"
    code(here, "code_typed", text)
    status, _, err = inside(monkeypatch, capsys, *words)
    assert status == 0, err
    assert [one["folder"] for one in remembered(here)] == [str(here)]


def test_what_a_file_is_called_allows_nothing(here, monkeypatch, capsys):
    code(here, "nets_called")
    (here / "nets_called:net").mkdir()
    (here / "nets_called:net" / "nets_called:net.toml").write_text('model = "nets_called:net"\ntopology = "ring:4"\n')
    shutil.copytree(here / "nets_called:net", here / "x" / "nets_called:net")
    for words in (
        ("check", "nets_called:net/nets_called:net.toml", "--data", "csv:x/nets_called:net"),
        ("check", "nets_called:net/nets_called:net.toml", "--runs", "nets_called:net"),
    ):
        status, _, err = inside(monkeypatch, capsys, *words)
        assert status == 2
        assert not ran(here), err


def test_names_of_the_library_need_no_permission(here, monkeypatch, capsys):
    (here / "mine.toml").write_text('algorithm = "quasiglobal.algorithms.sgd:DSGDm"\ntopology = "ring:4"\n')
    assert inside(monkeypatch, capsys, "check", "mine.toml", "--device", "cpu")[0] == 0
    assert not remembered(here)


def test_in_python_the_call_is_the_permission(here, monkeypatch, capsys):
    code(here, "graph_of_python", "graph = {0: [1], 1: [0]}\n")
    monkeypatch.syspath_prepend(str(here))
    assert parse("graph_of_python:graph").n == 2
    assert remembered(here) == [{"name": "graph_of_python:graph", "folder": str(here)}]
    (here / "mine.toml").write_text('topology = "graph_of_python:graph"\n')
    assert inside(monkeypatch, capsys, "check", "mine.toml", "--device", "cpu")[0] == 0

    code(here, "graph_of_a_file", "graph = {0: [1], 1: [0]}\n")
    (here / "other.toml").write_text('topology = "graph_of_a_file:graph"\n')
    assert from_toml(here / "other.toml").resolved.nodes == 2
    assert len(remembered(here)) == 1, "what Python only read from a file is not the user's word"


def test_a_configuration_that_cannot_be_written_stops_nothing(here, monkeypatch, capsys):
    code(here, "nets_unwritten")
    (here.parent / "configuration").write_text("a file")            # root may write any folder
    words = ["train", "--topology", "ring:4", "--epochs", "1", "--device", "cpu"]
    status, _, err = inside(monkeypatch, capsys, *words, "--model", "nets_unwritten:net")
    assert status == 0
    assert err.count("is not remembered") == 1
    monkeypatch.setattr(own_code, "config_folder", lambda: Path("~/.config/quasiglobal"))   # no home folder
    assert inside(monkeypatch, capsys, *words, "--model", "nets_unwritten:net")[0] == 0
    assert not (here / "~").exists()


def test_many_processes_may_remember_at_once(here):
    code(here, "nets_at_once")
    threads = [
        threading.Thread(target=own_code._append.__wrapped__, args=(f"m{k}:net", "", here.parent / "configuration/c"))
        for k in range(40)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    lines = (here.parent / "configuration" / "c").read_text().splitlines()
    assert {json.loads(line)["name"] for line in lines} == {f"m{k}:net" for k in range(40)}


def test_wrong_values_are_one_sentence(here, monkeypatch, capsys):
    for words in (("--allow-code", "a b"), ("--allow-code",), ("--allow-code", "nets.py")):
        status, _, err = inside(monkeypatch, capsys, "check", *words)
        assert status == 2
        assert err.startswith("qg: --allow-code needs a module, or a name in it, as in package.module:Name, got")


def test_a_module_of_the_name_of_an_installed_one_is_pointed_out(here, monkeypatch, capsys):
    code(here, "wave")                                      # Python has one
    status, _, err = inside(monkeypatch, capsys, "check", "--model", "wave:net")
    assert status == 2
    assert re.search(r"module wave has no 'net'; it is \S+wave.py, which comes before \S+wave.py: give yours ano", err)
    assert not ran(here)


def test_processes_are_allowed_what_their_command_is(here, monkeypatch):
    """`qg train --processes` passes names on; it asks before it starts any."""
    code(here, "nets_passed")
    with own_code.only_given(["nets_passed"]):
        own_code.give({"model": "nets_typed:net"})
        assert own_code.allowed() == ["--allow-code", "nets_passed", "--allow-code", "nets_typed:net"]
        own_code.check_all({"model": "nets_passed:net", "metric": ("mae",)})
        code(here, "nets_other")
        with pytest.raises(InputError, match="would import nets_other"):
            own_code.check_all({"metric": ("nets_other:net",)})
        assert os.environ["PYTHONSAFEPATH"] == "1"
    assert "PYTHONSAFEPATH" not in os.environ
