"""Experiments: names, hashes, files and equality."""

import json
from dataclasses import asdict, dataclass, replace

import pytest
from small_runs import SHORT, settled

import quasiglobal as qg
from quasiglobal.runs.local import simulate
from quasiglobal.runs.store import find_runs
from quasiglobal.training.experiment import Experiment, from_mapping, from_toml, group_by_seed


def test_runs_are_compared_by_what_sets_them_apart(tmp_path):
    for algorithm in ("dsgd", "qg-dsgdm"):
        simulate(replace(SHORT, algorithm=algorithm, epochs=1), settled(tmp_path, seeds=2))
    groups = group_by_seed(list(find_runs(tmp_path)), lambda run: run.experiment)
    assert {label: len(group) for label, group in groups.items()} == {"dsgd": 2, "qg-dsgdm": 2}


def test_the_hash_covers_what_changes_the_result():
    assert SHORT.hash == replace(SHORT).hash
    for field, value in {"seed": 1, "precision": "bf16", "lr": 0.06, "alpha": 0.2}.items():
        assert replace(SHORT, **{field: value}).hash != SHORT.hash


def test_toml_and_flags_are_the_same_fields(tmp_path):
    path = tmp_path / "exp.toml"
    path.write_text('recipe = "cifar10"\nalgorithm = "dsgdm-n"\nepochs = 10\nmilestones = [0.5]\nlr = 1\n')
    experiment = from_toml(path)
    assert (experiment.data, experiment.model, experiment.epochs) == ("cifar10", "resnet20", 10)
    assert (experiment.milestones, experiment.lr) == ((0.5,), 1.0)
    assert from_mapping(json.loads(json.dumps(asdict(experiment))), "json") == experiment


def test_a_field_that_came_later_is_not_hashed_at_its_default():
    @dataclass(frozen=True, kw_only=True)
    class Later(Experiment):
        later: float | None = None

    values = asdict(SHORT)
    assert Later(**values).name == SHORT.name
    assert Later(**values, later=1.0).name != SHORT.name


def test_a_whole_number_names_the_same_run_as_the_number_it_is():
    assert Experiment(alpha=1, lr=2, warmup=0).name == Experiment(alpha=1.0, lr=2.0, warmup=0.0).name
    assert isinstance(Experiment(epochs=3).epochs, int)


BAD = {
    'epocs = 3': "unknown key in .*; did you mean 'epochs'",
    'epochs = "three"': "epochs in .* must be a whole number, got 'three'",
    'epochs = 0': "epochs must be a whole number >= 1, got 0",
    'lr = true': "lr in .* must be a number, got True",
    'milestones = 3': "milestones in .* must be a list",
    'precision = "fp16"': "unknown precision in .*; did you mean",
    'algorithm = "qgdsgdm"': "unknown algorithm 'qgdsgdm'",
    'recipe = "cifar"': "unknown recipe in .*; did you mean 'cifar10'",
    'epochs = ': "is not TOML",
}


@pytest.mark.parametrize("text", BAD)
def test_a_bad_file_is_one_sentence(tmp_path, text):
    path = tmp_path / "exp.toml"
    path.write_text(text)
    with pytest.raises(qg.InputError, match=BAD[text]):
        from_toml(path)
