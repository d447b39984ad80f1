"""Predictions for data without labels, and exported folders that stand alone."""

import csv
import io
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import SHORT, settled

import quasiglobal as qg
from quasiglobal.cli import share
from quasiglobal.data.sources import load
from quasiglobal.runs import export as exports
from quasiglobal.runs.export import export, read, save, save_folder, score
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.predict import predict
from quasiglobal.training.experiment import Experiment


@pytest.fixture(scope="module")
def digits(tmp_path_factory):
    """A run on the digits, and its exported weights."""
    folder = tmp_path_factory.mktemp("digits")
    (run,) = simulate(SHORT, settled(folder))
    save(export(run, "average"), folder / "model.safetensors")
    return run, folder / "model.safetensors"


@pytest.mark.slow
def test_an_exported_folder_loads_in_plain_pytorch_and_onnx_with_the_same_outputs(digits, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    run, _ = digits
    folder = tmp_path / "model"
    written = save_folder(export(run, "average"), folder)
    assert written.left_out == {}
    assert {path.name for path in written.files} == {
        "model.safetensors", "model.json", "README.md", "model.pt2", "model.onnx"
    }
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    assert "quasiglobal" not in code
    found = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True)
    assert sum(json.loads(found.stdout.replace("'", '"')).values()) == pytest.approx(1)
    data, model = load("digits"), read(folder)
    pixels = data.test.x[:7].float() / 16
    ours = model.outputs(data)[:7]
    torch.testing.assert_close(torch.export.load(folder / "model.pt2").module()(pixels), ours, rtol=1e-5, atol=1e-5)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": pixels.numpy()})[0], ours.numpy(), rtol=1e-4, atol=1e-5)
    assert score(model).value == pytest.approx(run.summary.last["accuracy_averaged"], abs=1e-3)


def test_a_folder_has_what_the_network_allows(digits, tmp_path, monkeypatch):
    """Files whose outputs differ are left out, with the reason; the rest of the folder stands."""
    monkeypatch.setattr(exports, "_program", lambda ready, x, path: path.write_bytes(b""))
    monkeypatch.setattr(exports, "_onnx", lambda ready, x, path: path.write_bytes(b""))
    monkeypatch.setattr(exports, "_opened", lambda path: lambda x: torch.zeros(len(x), 10))
    written = save_folder(export(digits[0], "1"), tmp_path / "model")
    assert sorted(path.name for path in written.files) == ["README.md", "model.json", "model.safetensors"]
    assert "its outputs differ from the model's by" in written.left_out["model.pt2"]
    assert "load_state_dict" in (tmp_path / "model" / "README.md").read_text()
    assert read(tmp_path / "model").experiment.classes == tuple("0123456789")
    terms = json.loads((tmp_path / "model" / "model.json").read_text())
    assert (terms["shape"], terms["classes"][:2]) == ([1, 8, 8], ["0", "1"])


def test_image_files_folders_and_archives_get_the_same_classes(digits, tmp_path, capsys):
    _, folder = digits
    x = load("digits").test.x[:6]
    for k, image in enumerate(x):
        path = tmp_path / "images" / ("a" if k < 3 else "b") / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray((image[0].double() / 16 * 255).round().byte().numpy()).save(path)
    np.savez(tmp_path / "x.npz", x=x.numpy())
    model = read(folder)
    archive = predict(model, [str(tmp_path / "x.npz")])
    images = predict(model, [str(tmp_path / "images" / "a"), str(tmp_path / "images" / "b")])
    assert [one["class"] for one in images.objects()] == [one["class"] for one in archive.objects()]
    assert archive.outputs.sum(dim=1).tolist() == pytest.approx([1] * 6)
    torch.testing.assert_close(images.outputs, archive.outputs, rtol=0, atol=0.01)      # 8 bits instead of 4
    share.predict(folder, (str(tmp_path / "images"),))
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert [row["file"] for row in rows] == [str(file) for file in sorted((tmp_path / "images").rglob("*.png"))]
    assert float(rows[0]["p(3)"]) == pytest.approx(float(images.outputs[0, 3]), rel=1e-6)
    share.predict(folder, (str(tmp_path / "x.npz"),), out=tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text()) == archive.objects()
    big = tmp_path / "big.png"
    Image.new("L", (20, 30)).save(big)
    with pytest.raises(qg.InputError, match=r"big.png has 20 x 30 pixels, but the model takes 8 x 8; .*--resize"):
        predict(model, [str(big)])
    assert predict(model, [str(big)], resize=True).names == [str(big)]


@pytest.mark.parametrize("loss", ["mse", ""])
def test_a_table_of_numbers_is_read_by_its_columns_names(tmp_path, loss):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(80, 2))
    target = values @ [2.0, -1.0] if loss else (values[:, 0] > 0).astype(int)
    lines = [f"{a},{b},{y},north" for (a, b), y in zip(values, target, strict=True)]
    (tmp_path / "t.csv").write_text("\n".join(["age,dose,outcome,site", *lines]))
    (tmp_path / "new.csv").write_text("dose,id,age\n" + "\n".join(f"{b},x,{a}" for a, b in values))
    one = Experiment(
        data=f"csv:{tmp_path}/t.csv", label="outcome", loss=loss, model="mlp", topology="ring:3", epochs=2, lr=0.05,
        batch=8, partition="iid", metric=("test_loss",) if loss else (),
    )
    (run,) = simulate(one, Options(runs=tmp_path / "runs", device="cpu"))
    save(export(run, "average"), tmp_path / "model.safetensors")
    model = read(tmp_path / "model.safetensors")
    assert model.features == ("age", "dose")
    labelled, new = (predict(model, [str(tmp_path / name)]) for name in ("t.csv", "new.csv"))
    assert labelled.objects() == new.objects()              # the order of the columns does not matter
    assert new.columns == (("outcome",) if loss else ("0", "1"))
    (tmp_path / "turned.csv").write_text(
        "dose,outcome,id,age\n" + "\n".join(f"{b},{y},7,{a}" for (a, b), y in zip(values, target, strict=True))
    )
    all_rows, turned = (score(model, f"csv:{tmp_path}/{name}.csv") for name in ("t", "turned"))
    assert (turned.value, turned.examples) == (all_rows.value, 80)
    assert score(model).examples == 16                      # of its own data, the test examples alone
    (tmp_path / "bad.csv").write_text("dose,id\n1,2\n")
    with pytest.raises(qg.InputError, match="has no column 'age'; the model was trained on age, dose"):
        predict(model, [str(tmp_path / "bad.csv")])
    (tmp_path / "text.csv").write_text("dose,age\n1,old\n")
    with pytest.raises(qg.InputError, match="has 'old' in column age, which the model takes as a number"):
        predict(model, [str(tmp_path / "text.csv")])


def test_floats_far_from_the_training_data_are_refused(digits, tmp_path):
    np.savez(tmp_path / "x.npz", x=255 * np.random.default_rng(0).random((3, 1, 8, 8)))
    with pytest.raises(qg.InputError, match=r"x.npz has values \d+ standard deviations away .*divide by 255"):
        predict(read(digits[1]), [str(tmp_path / "x.npz")])


def test_a_folder_that_is_no_export_is_kept(digits, tmp_path):
    run, _ = digits
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(qg.InputError, match="is not an exported model; name another folder with --out"):
        save_folder(export(run, "0"), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (("nothing",), "there is no file, folder or data set 'nothing'"),
        (("x.npz", "y.png"), "x.npz is no image; give such data alone"),
        (("t.csv",), r"t.csv is a table, but the model takes inputs of shape \[1, 8, 8\]"),
        ((), "name the data to predict for"),
    ],
)
def test_what_cannot_be_predicted_is_one_sentence(digits, data, why):
    with pytest.raises(qg.InputError, match=why):
        share.predict(digits[1], data)
