"""Export of models from runs."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_runs import SHORT, settled

import quasiglobal as qg
from quasiglobal.data.sources import load
from quasiglobal.runs.export import ALWAYS_WRITTEN, Exported, export, read, save
from quasiglobal.runs.local import simulate
from quasiglobal.training.experiment import Experiment


@pytest.mark.parametrize("bn", ["shared", "local"])
def test_an_exported_model_scores_as_its_node_did(tmp_path, bn):
    data = load("digits")
    (run,) = simulate(replace(SHORT, model="cnn", norm="bn", bn=bn, lr=0.02), settled(tmp_path))
    scores = []
    for node in range(4):
        save(export(run, str(node)), tmp_path / "model.safetensors")
        model = read(tmp_path / "model.safetensors")
        scores.append(float((model.outputs(data).argmax(dim=-1) == data.test.y).double().mean()))
    for name in ("classes", "shape", "mean", "std"):
        assert getattr(model.experiment, name) == getattr(data, name), "records its classes, shape and normalisation"
    last = run.summary.last
    assert np.mean(scores) == pytest.approx(last["accuracy"], abs=1e-3)
    assert min(scores) == pytest.approx(last["accuracy_worst"], abs=1e-3)
    averaged = export(run, "average")
    right = (averaged.outputs(data).argmax(dim=-1) == data.test.y).double().mean()
    assert float(right) == pytest.approx(last["accuracy_averaged"], abs=1e-3)


def test_a_bad_export_is_one_sentence(tmp_path):
    (run,) = simulate(replace(SHORT, epochs=1), settled(tmp_path))
    with pytest.raises(qg.InputError, match="node must be average or one of 0 to 3, got '4'"):
        export(run, "4")
    (tmp_path / "junk").write_bytes(b"junk")
    for path in (tmp_path / "junk", tmp_path / "nowhere"):
        with pytest.raises(qg.InputError, match="cannot read a model from"):
            read(path)


@pytest.mark.parametrize("metadata", [{"experiment": "[" * 100_000}, {"experiment": "{}", "features": "[" * 100_000}])
def test_metadata_by_mail_that_is_nested_without_end_is_one_sentence(tmp_path, metadata):
    save_file({"weight": torch.zeros(1)}, tmp_path / "model.safetensors", metadata)
    with pytest.raises(qg.InputError, match="was not written by `qg export`: its metadata names no model"):
        read(tmp_path / "model.safetensors")


@dataclass(frozen=True, kw_only=True)
class Later(Experiment):
    """The experiments of a version with one more setting."""

    extra: float = 0.0


@pytest.mark.parametrize("extra", [0.0, 0.5])
def test_a_setting_that_is_added_later_is_in_an_export_only_if_it_is_set(tmp_path, extra):
    save(Exported(Later(extra=extra), {"weight": torch.zeros(1)}), tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        settings = json.loads(file.metadata()["experiment"])
    assert settings.keys() - {"extra"} == set(ALWAYS_WRITTEN)
    assert settings.get("extra", 0.0) == extra
    assert ("extra" in settings) == (extra != 0.0)
