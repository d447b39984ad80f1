"""Trackers, torchmetrics, Hugging Face data sets and notebooks, with their real packages, offline."""

import json
import signal
import sys

import numpy as np
import own_tasks
import pytest
import torch
from torch import nn
from torch.nn import functional

import quasiglobal as qg

SHORT = {"algorithm": "dsgd", "topology": "ring:4", "epochs": 3, "lr": 0.1, "device": "cpu", "batch": 8}


@pytest.mark.slow
def test_wandb_gets_every_record_and_resumes(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    task = own_tasks.regression()
    callback = qg.callbacks.WandB("ours", mode="offline", dir=str(tmp_path))
    run = qg.train(task, **SHORT, seeds=2, runs=tmp_path / "runs", callbacks=[callback])
    for one in run.runs:
        (file,) = tmp_path.glob(f"wandb/offline-run-*/run-{one.experiment.name}.wandb")
        written = file.read_bytes()                         # values are JSON inside protobuf records
        assert all(str(record[name])[:14].encode() in written for record in one for name in ("mae", "test_loss"))
    assert wandb.run is None
    wandb.teardown()                                        # it would keep this folder for later tests


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")   # from mlflow's own use of SQLAlchemy
def test_mlflow_gets_every_record_and_resumes(tmp_path):
    mlflow = pytest.importorskip("mlflow")
    torch.manual_seed(0)
    task, uri = own_tasks.regression(), f"sqlite:///{tmp_path}/mlflow.db"

    def trained(*more):
        callbacks = [qg.callbacks.MLflow("ours", uri=uri), *more]
        return qg.train(task, **SHORT, runs=tmp_path / "runs", callbacks=callbacks, checkpoint_seconds=0)

    with pytest.warns(UserWarning, match="the same call resumes"):
        trained(Interrupt())
    run = trained()
    client = mlflow.MlflowClient(tracking_uri=uri)
    (one,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    history = client.get_metric_history(one.info.run_id, "mae")
    assert [(entry.step, entry.value) for entry in history] == [(r["epoch"], r["mae"]) for r in run.records]
    assert one.data.params["algorithm"] == "dsgd"


class Interrupt:
    def on_epoch(self, run):
        if run.epoch == 1:
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_torchmetrics_fit():
    torchmetrics = pytest.importorskip("torchmetrics")
    x = own_tasks.drawn(200, 5)
    data = (x, x[:, :3].argmax(dim=1))
    metrics = {
        "recall": torchmetrics.Recall(task="multiclass", num_classes=3, average="macro"),
        "accuracy": qg.metrics.accuracy,
        "same": torchmetrics.Accuracy(task="multiclass", num_classes=3, average="micro"),
    }
    run = qg.train(qg.Task(nn.Linear(5, 3), functional.cross_entropy, data, metrics=metrics), **SHORT)
    last = run.records[-1]
    assert last["same_nodes"] == pytest.approx(last["accuracy_nodes"], abs=1e-6)
    assert run.score.name == "recall"
    error = torchmetrics.MeanSquaredError()
    task = qg.Task(nn.Linear(5, 1), functional.mse_loss, (x, x[:, :1]), metrics={"mse": error})
    last = qg.train(task, **SHORT).records[-1]
    assert last["mse_nodes"] == pytest.approx(last["test_loss_nodes"], abs=1e-6)
    assert last["mse_best"] == min(last["mse_nodes"]), "higher_is_better = False"


@pytest.mark.slow
def test_a_hugging_face_data_set(tmp_path):
    datasets = pytest.importorskip("datasets")
    images = np.random.default_rng(0).integers(0, 255, size=(40, 8, 8), dtype=np.uint8)
    data = datasets.Dataset.from_dict(
        {"image": list(images), "label": [int(image.mean() > 127) for image in images], "text": ["t"] * 40},
        features=datasets.Features({
            "image": datasets.Image(), "label": datasets.ClassLabel(num_classes=2), "text": datasets.Value("string"),
        }),
    )
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    task = qg.Task(net, functional.cross_entropy, data, columns=("image", "label"))
    assert task.data.shape == (1, 8, 8)
    assert 0 <= float(task.data.train.x.min()) <= float(task.data.train.x.max()) <= 1
    assert len(qg.train(task, **SHORT).records) == 3
    with pytest.raises(qg.InputError, match="name its input and target, columns="):
        qg.Task(net, functional.cross_entropy, data)


@pytest.mark.slow
def test_a_notebook_shows_a_bar_and_draws_the_curves(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    code = """
import torch, quasiglobal as qg
class Net(torch.nn.Linear):
    pass
def loss(output, target):
    return torch.nn.functional.mse_loss(output, target)
x = torch.randn(80, 3)
run = qg.train(qg.Task(Net(3, 1), loss, (x, x[:, :1])), 'dsgd', 'ring:4', 3, lr=0.1, runs='runs')
run
"""
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbclient.NotebookClient(book, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    shown = [output["data"].get("text/html", "") for output in book.cells[0].outputs if "data" in output]
    assert any("<progress" in html and "3/3" in html for html in shown), json.dumps(book.cells[0].outputs)[:2000]
    assert any("<svg" in html for html in shown)


@pytest.mark.parametrize(("name", "package"), [("WandB", "wandb"), ("MLflow", "mlflow")])
def test_without_the_package_it_is_one_sentence(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(qg.InputError, match=rf"{package} is not installed: pip install 'quasiglobal\[{package}\]'"):
        getattr(qg.callbacks, name)()
