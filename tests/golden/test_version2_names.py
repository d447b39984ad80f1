"""Names that version 2 gave to runs with a user's own parts, which are hashed by content.

`version2/names/version2_user.py` holds the user's code. A name follows from that code and from the names of the
package's classes and functions in it, so a class that moves to another module renames runs unless it keeps its old
name in fingerprints. These tests use the public API and the command line; `PLACES` says where a class that is not
public lies now.

    python tests/golden/test_version2_names.py          writes the fixtures
"""

import json
import platform
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
import version2_user as user
from test_version1 import RESULTS

import quasiglobal as qg
from quasiglobal.cli import main

HERE = Path(__file__).parent / "version2" / "names"

PLACES: dict[str, str] = {
    f"quasiglobal.{before}:{name}": f"quasiglobal.{after}:{name}"
    for before, after, names in (
        ("algorithms.complete_window", "algorithms.centralized", ("CompleteWindow",)),
        ("data.records", "data.shards", ("ExampleShards", "Form", "Place")),
        ("models.stacking", "stacked.layout", ("Stacking", "stacking_of")),
        ("models.language.loading", "models.language", ("LanguageModel", "language_model")),
    )
    for name in names
}
"""The places of classes and functions that have moved, by their places in version 2."""


def versions(*packages: str) -> dict[str, str]:
    """The versions that fingerprints depend on: attributes of their modules, and the bytecode of data classes."""
    found = {"python": ".".join(platform.python_version_tuple()[:2])}
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    return found


BASIC, LANGUAGE = ("torch", "numpy"), ("torch", "numpy", "transformers", "peft")


def recorded(name: str) -> Any:
    return json.loads((HERE / name).read_text())


def needs(*packages: str) -> pytest.MarkDecorator:
    made = recorded("versions.json") if (HERE / "versions.json").exists() else {}
    return pytest.mark.skipif(
        versions(*packages) != {name: made.get(name) for name in ("python", *packages)},
        reason=f"these names were given with {made}",
    )


# ------------------------------------------------------------------------------------------------ the leaderboard


def test_all_records_of_the_leaderboard_are_still_there():
    """Their names are those of the methods, without a hash."""
    names = (HERE / "recorded-leaderboard.txt").read_text().split()
    assert len(names) == 88
    folder = RESULTS / "leaderboard"
    assert set(names) <= {str(path.relative_to(folder)) for path in folder.rglob("*.json")}


# ------------------------------------------------------------------------------------------------ own runs


class Enough(Exception):
    """Ends a run before its first step."""


class Stop:
    """A callback that ends the run once its folder is there."""

    def on_start(self, run: Any) -> None:
        raise Enough


def begun(**given: Any) -> tuple[str, dict[str, Any]]:
    """Begin a run; return the name of its folder, and what a user's objects contribute to its experiment."""
    usual = {
        "algorithm": "dsgd", "topology": "ring:4", "epochs": 1, "steps": 1, "batch": 4, "lr": 0.125, "device": "cpu",
    }
    given = usual | given
    with tempfile.TemporaryDirectory() as runs, warnings.catch_warnings(action="ignore"):
        with suppress(Enough):
            qg.train(given.pop("task", None) or task(), **given, runs=runs, callbacks=[Stop()])
        (folder,) = Path(runs).iterdir()
        return folder.name, own_parts(folder)


def own_parts(folder: Path) -> dict[str, Any]:
    """The texts of a user's objects in a run's experiment, and their facts."""
    values = json.loads((folder / "experiment.json").read_text())
    return {name: value for name, value in values.items() if name == "objects" or "own:" in str(value)}


@contextmanager
def cache_elsewhere() -> Iterator[None]:
    """Keep shards of a user's data out of the user's cache."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("QG_CACHE", folder)
        yield


def named(runs: dict[str, Callable[[], dict[str, Any]]], which: str) -> dict[str, Any]:
    with cache_elsewhere():
        name, parts = begun(**runs[which]())
    return {"run": name, **parts}


@needs(*BASIC)
@pytest.mark.parametrize("which", user.RUNS)
def test_a_run_with_own_parts_keeps_its_name(which):
    assert named(user.RUNS, which) == recorded("runs.json")[which]


@pytest.mark.slow                                           # imports transformers, which takes seconds
@needs(*LANGUAGE)
@pytest.mark.parametrize("which", user.LANGUAGE)
def test_a_run_with_an_own_transformer_keeps_its_name(which):
    assert named(user.LANGUAGE, which) == recorded("transformers.json")[which]


def test_the_name_of_a_run_follows_its_parts():
    """Different parts have different names, but for what is the same in other words."""
    same = {
        ("a module", "lazy layers", "NumPy arrays"), ("an algorithm", "an algorithm as a class"),
    }
    names: dict[str, list[str]] = {}
    for which, parts in recorded("runs.json").items():
        names.setdefault(parts["run"], []).append(which)
    assert {tuple(several) for several in names.values() if len(several) > 1} == same


COMMAND = [
    "--data", "version2_user:data", "--model", "version2_user:Net", "--loss", "version2_user:sharp",
    "--metric", "version2_user:wrong", "version2_user:by_module", "--algorithm", "version2_user:Heavy:beta=0.5",
    "--topology", "version2_user:weighted_path", "--partition", "iid", "--epochs", "1", "--steps", "1", "--batch", "4",
    "--lr", "0.125", "--device", "cpu",
]


def trained_by_command(runs: Path) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["qg", "train", *COMMAND, "--runs", str(runs)])
        main()
    (folder,) = runs.iterdir()
    return {"run": folder.name, "objects": json.loads((folder / "experiment.json").read_text())["objects"]}


@needs(*BASIC)
def test_a_command_with_own_parts_keeps_the_name_and_the_digests_of_its_run(tmp_path):
    """A run is not resumed if the digest of its model, loss, metric or data has changed."""
    assert trained_by_command(tmp_path) == recorded("command.json")


# ------------------------------------------------------------------------------------------------ the package's parts

PUBLIC = {
    "quasiglobal": [
        "ALGORITHMS", "Algorithm", "CheckFailed", "Diverged", "InputError", "Node", "Result", "State", "Task",
        "Topology", "algorithm", "callbacks", "check_algorithm", "data", "metrics", "minimize", "optim", "topology",
        "train",
    ],
    "quasiglobal.metrics": [
        "accuracy", "auc", "f1", "is_lower", "lower", "mae", "mse", "name_of", "percent", "top5",
    ],
    "quasiglobal.topology": [
        "RandomTopology", "base", "chain", "complete", "d_cliques", "double_trees", "epidemic", "equidyn",
        "erdos_renyi", "exponential", "from_file", "from_function", "from_graph", "from_matrices", "from_neighbours",
        "hypercube", "k_regular", "matching", "one_peer_exponential", "parse", "ring", "small_world", "social", "star",
        "stl_fw", "torus", "tree",
    ],
    "quasiglobal.data": ["Dataset", "from_arrays", "load", "split"],
    "quasiglobal.callbacks": ["CSV", "EarlyStopping", "KeepBest", "MLflow", "TensorBoard", "WandB"],
    "quasiglobal.optim": ["GossipOptimizer"],
    "quasiglobal.algorithms": [
        "Edges", "Needs", "Overlap", "Wrapper", "name_of", "numeric_options", "text_of", "with_option",
    ],
    "quasiglobal.models": ["Model", "build"],
}
"""What is public, but for modules of these names."""

INTERNAL = {
    "quasiglobal.algorithms": ["Recorded"],
    "quasiglobal.algorithms.base": [
        "NodeView", "checked", "descend", "momentum", "named", "option_types", "unnamed", "zeros",
    ],
    "quasiglobal.algorithms.complete_window": ["CompleteWindow"],
    "quasiglobal.algorithms.gossip": ["UnitStep"],
    "quasiglobal.algorithms.local_base": ["Local", "check_local", "refuses_optimizer"],
    "quasiglobal.data.dataset": ["Examples", "Splits"],
    "quasiglobal.data.fresh": ["Fresh"],
    "quasiglobal.data.records": ["ExampleShards", "Form", "Place"],
    "quasiglobal.data.shards": ["Blank", "Shards"],
    "quasiglobal.errors": ["unknown", "whole"],
    "quasiglobal.metrics": ["Auc", "F1", "_LowerFunction", "_OfAll"],
    "quasiglobal.models.language.loading": ["LanguageModel", "language_model"],
    "quasiglobal.models.layers": ["convolution", "scaled"],
    "quasiglobal.models.norms": ["EvoNormS0", "Norm", "batch_statistics", "group_norm"],
    "quasiglobal.models.resnet": ["BasicBlock", "ResNet", "cifar_resnet", "resnet18"],
    "quasiglobal.models.small": ["cnn", "mlp"],
    "quasiglobal.models.stacking": ["Stacking", "stacking_of"],
    "quasiglobal.models.vgg": ["VGG11", "VGG11Dropout"],
}
"""What is not public, but lies in a user's objects, or is easily reached from there."""

MODULES = [*PUBLIC, "quasiglobal.errors", "quasiglobal.models.layers", "quasiglobal.models.norms"]
"""Modules that a user's function may refer to as a whole: `from quasiglobal import metrics`."""


def found(place: str) -> Any:
    return resolve_name(PLACES.get(place, place))


def made(place: str, *arguments: Any, **options: Any) -> Callable[[], Any]:
    return lambda: found(place)(*arguments, **options)


THINGS: dict[str, Callable[[], Any]] = {
    **{
        f"{module}:{name}": (lambda place=f"{module}:{name}": found(place))
        for places in (PUBLIC, INTERNAL) for module, names in places.items() for name in names
        if name != "ALGORITHMS"                             # grows
    },
    **{f"module {name}": (lambda name=name: found(name)) for name in MODULES},
    **{f"algorithm {name}": (lambda name=name: qg.algorithm(name)) for name in recorded("algorithms.json")},
    **{
        f"class of algorithm {name}": (lambda name=name: type(qg.algorithm(name)))
        for name in recorded("algorithms.json")
    },
    "f1 with options": lambda: qg.metrics.f1(average="micro"),
    "auc": lambda: qg.metrics.auc(),
    "f1 as lower": lambda: qg.metrics.lower(qg.metrics.f1),
    "accuracy as lower": lambda: qg.metrics.lower(qg.metrics.accuracy),
    "a method as lower": lambda: qg.metrics.lower(qg.metrics.f1.update),
    "Needs": made("quasiglobal.algorithms:Needs", fixed=True, loss="harmed"),
    "Stacking": made("quasiglobal.models.stacking:Stacking", autograd="alone"),
    "Norm": made("quasiglobal.models.norms:Norm", torch.nn.BatchNorm2d, torch.nn.Identity),
    "EvoNormS0": made("quasiglobal.models.norms:EvoNormS0", 4),
    "BasicBlock": lambda: user.settled(
        found("quasiglobal.models.resnet:BasicBlock")(
            2, 4, 2, found("quasiglobal.models.norms:Norm")(torch.nn.BatchNorm2d, torch.nn.BatchNorm2d)
        )
    ),
    "Topology": lambda: qg.topology.one_peer_exponential(4),
    "RandomTopology": lambda: qg.topology.from_function(user.drawn, name="drawn"),
    "Dataset": lambda: qg.data.from_arrays(*user.images()),
    "Dataset of parts": lambda: user.plain(train=[user.images(12), user.images(15)]).data,
    "Dataset read anew": lambda: user.plain(train=user.Flipped(*user.images()), cache=False).data,
    "EarlyStopping": lambda: qg.callbacks.EarlyStopping(patience=3),
    "KeepBest": lambda: qg.callbacks.KeepBest(),
}
"""Classes, functions, modules and objects of the package by their places in version 2."""


@cache
def task() -> qg.Task:
    """A task that many runs share: its trial takes longer than all else."""
    return user.plain()


def referring_to(thing: str) -> str:
    """The text of a schedule that refers to a thing."""
    text: str = begun(task=task(), schedule=user.holding(THINGS[thing]()))[1]["schedule"]
    return text


@needs(*BASIC)
@pytest.mark.parametrize("thing", THINGS)
def test_what_a_users_function_refers_to_keeps_its_name(thing):
    """A user's model, loss, metric, data, algorithm, partition or schedule refers to parts of the package alike."""
    assert referring_to(thing) == recorded("things.json")[thing]


def test_all_that_is_public_has_a_recorded_name():
    """Names that later versions add need none; the registry of algorithms has one for each algorithm."""
    for module, names in PUBLIC.items():
        assert set(names) <= set(found(module).__all__ if hasattr(found(module), "__all__") else dir(found(module)))
    assert set(recorded("algorithms.json")) <= set(qg.ALGORITHMS)


def write() -> None:
    def keep(name: str, value: Any) -> None:
        (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n")

    folder = RESULTS / "leaderboard"
    runs, records = (RESULTS / "runs").iterdir(), folder.rglob("*.json")
    (HERE / "recorded-runs.txt").write_text("".join(sorted(f"{run.name}\n" for run in runs)))
    (HERE / "recorded-leaderboard.txt").write_text("".join(sorted(f"{one.relative_to(folder)}\n" for one in records)))
    keep("versions.json", versions(*LANGUAGE))
    keep("runs.json", {which: named(user.RUNS, which) for which in user.RUNS})
    keep("transformers.json", {which: named(user.LANGUAGE, which) for which in user.LANGUAGE})
    with tempfile.TemporaryDirectory() as runs:
        keep("command.json", trained_by_command(Path(runs)))
    keep("things.json", {thing: referring_to(thing) for thing in THINGS})


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
