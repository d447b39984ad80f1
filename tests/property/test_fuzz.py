"""Any file content gives an experiment or a one-sentence error, never a partial run."""

import string
from dataclasses import fields

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import quasiglobal as qg
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment, from_toml

NAMES = [field.name for field in fields(Experiment)]

WORDS = ["ring:4", "dsgd", "qg-dsgdm:tau=2", "mlp", "cnn", "resnet20", "gn", "bn", "digits", "iid", "shards:2"]

values = st.one_of(
    st.integers(-5, 70), st.integers(), st.floats(), st.booleans(), st.text(string.printable, max_size=8),
    st.sampled_from(WORDS), st.lists(st.floats(0, 2), max_size=3),
)
keys = st.one_of(st.sampled_from(NAMES), st.text(string.ascii_letters, min_size=1, max_size=9))


def outcome(function, *arguments):
    """Return the function's result or its `InputError` as text. Any other exception fails the test."""
    try:
        return function(*arguments)
    except qg.InputError as error:
        return str(error)


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n") + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return repr(value)


@given(st.dictionaries(keys, values))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_toml_is_an_experiment_or_one_sentence(tmp_path_factory, entries):
    path = tmp_path_factory.getbasetemp() / "fuzz.toml"
    path.write_text("".join(f"{name} = {toml(value)}\n" for name, value in entries.items()))
    assert outcome(from_toml, path)


@given(st.binary(max_size=60))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_any_bytes_are_an_experiment_or_one_sentence(tmp_path_factory, content):
    path = tmp_path_factory.getbasetemp() / "fuzz.bin"
    path.write_bytes(content)
    assert outcome(from_toml, path)


RIGHT = {"data": "digits", "model": "mlp", "topology": "ring:4", "partition": "iid", "alpha": 0.1, "lr": 0.1}
WRONG = {
    "data": ["digit", "folder:/nowhere", "cifar10"],
    "model": ["vgg11", "resnet21", "no.module:Net", "transformer"],
    "norm": ["layer", "gn"],
    "topology": ["ring:2", "ring:1500", "star"],
    "partition": ["shards", "by:site", "random"],
    "width": [0.0, -2.0],
    "lr": [0.0, -1.0, float("inf"), float("nan")],
    "milestones": [(5.0,)],
    "batch": [0],
    "weight_decay": [-1.0, float("nan")],
    "algorithm": ["dsgdd"],
}


def start(root, entries):
    return simulate(Experiment(**{"epochs": 1} | RIGHT | entries), Options(runs=root, data_dir=root, device="cpu"))


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in WRONG for value in WRONG[field]])
def test_each_wrong_setting_is_one_sentence_and_leaves_nothing_behind(tmp_path, field, value):
    said = outcome(start, tmp_path, {field: value})
    assert isinstance(said, str)
    assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


@given(st.fixed_dictionaries({}, optional={name: st.sampled_from(options) for name, options in WRONG.items()}))
@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
def test_several_wrong_settings_are_no_worse(tmp_path_factory, entries):
    root = tmp_path_factory.mktemp("runs")
    said = outcome(start, root, entries)
    assert isinstance(said, str) == bool(entries)
    assert bool(entries) == (list(root.iterdir()) == [])
