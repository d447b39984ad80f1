"""The training loop: what it equals, and that it survives."""

import json
import random
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, replace

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from torch import nn

import quasiglobal as qg
from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.common import files
from quasiglobal.data.batches import Owner, Plan
from quasiglobal.data.images import PAD, Images, random_boxes
from quasiglobal.data.sources import Dataset, Examples, load
from quasiglobal.models import build
from quasiglobal.runs import export as exports
from quasiglobal.runs.estimate import estimate
from quasiglobal.runs.local import (
    Options,
    Run,
    checkpoints,
    find,
    group_by_setting,
    make_task,
    model_state,
    prepare,
    train,
)
from quasiglobal.runs.memory import bytes_of_run
from quasiglobal.training.experiment import Experiment, from_mapping, from_toml
from quasiglobal.training.metrics import combined
from quasiglobal.training.program import Task, Training, epochs

CPU = torch.device("cpu")
SHORT = Experiment(model="mlp", topology="ring:4", epochs=3, lr=0.05, alpha=1.0, batch=64)


def seeded(experiment, seeds):
    return [experiment.with_seed(seed) for seed in seeds]


def run_all(experiment, seeds=(0,), task=None):
    training = Training(task or make_task(experiment, load("digits")), seeded(experiment, seeds), CPU)
    records = [[combined([part]) for part in measures] for measures in epochs(training)]
    return training, records


# ------------------------------------------------------------------------------------------------ equalities


@pytest.mark.parametrize("model", ["mlp", "cnn"])
def test_a_single_node_is_a_plain_pytorch_loop(model):
    experiment = replace(
        SHORT, model=model, topology="complete:1", partition="iid", algorithm="dsgdm-n", precision="fp64", epochs=3,
        milestones=(0.5,), weight_decay=1e-3,
    )
    task = make_task(experiment, load("digits"))
    training, _ = run_all(experiment, task=task)
    module = task.module(0).double()
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9, nesterov=True, weight_decay=1e-3)
    data = task.data
    steps = 0
    for epoch in range(3):
        draws = training.plan.epoch(epoch, CPU)
        for step, size in enumerate(training.plan.sizes):
            steps += 1
            optimizer.param_groups[0]["lr"] = training.schedules[0](steps)
            index = draws.index[step, 0, :size]
            x = (data.train.x[index].double() / data.scale - data.mean[0]) / data.std[0]
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), data.train.y[index]).backward()
            optimizer.step()
    assert steps > 50
    expected = training.layout.row(dict(module.named_parameters()))
    assert (training.x[0] - expected).norm() <= 1e-10 * expected.norm()


def test_seeds_as_rows_equal_seeds_alone():
    together, records = run_all(replace(SHORT, precision="fp64"), seeds=(0, 1))
    for k, seed in enumerate((0, 1)):
        alone, alone_records = run_all(replace(SHORT, precision="fp64"), seeds=(seed,))
        torch.testing.assert_close(together.x[4 * k : 4 * k + 4], alone.x, rtol=0, atol=1e-10)
        assert records[-1][k]["accuracy"] == alone_records[-1][0]["accuracy"]


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n:tau=2", "slowmo:tau=3", "mimelite", "dmsgd", "d2+", "dsgdm-n-gt"])
def test_steps_that_write_into_their_storage_are_the_same(algorithm):
    """As captured steps do on a GPU."""
    experiment = replace(SHORT, algorithm=algorithm, topology="ring:5", partition="iid", precision="fp64")
    training = Training(make_task(experiment, load("digits")), [experiment], CPU)
    training._captured = lambda key, step: step()
    storage = training.x.data_ptr()
    for _ in epochs(training):
        pass
    assert training.x.data_ptr() == storage
    assert training.x.equal(run_all(experiment)[0].x)


def test_everybody_starts_from_the_same_weights_and_seeds_differ():
    training = Training(make_task(SHORT, load("digits")), seeded(SHORT, (0, 1)), CPU)
    rows = training.x.view(2, 4, -1)
    assert (rows == rows[:, :1]).all()
    assert not rows[0].equal(rows[1])


def test_fedbn_keeps_batch_norm_at_the_node():
    experiment = replace(SHORT, model="cnn", norm="bn", algorithm="dsgd", epochs=1)
    shared, _ = run_all(replace(experiment, topology="complete:4"))
    local, _ = run_all(replace(experiment, topology="complete:4", bn="local"))
    assert local.layout.shared < local.layout.size == shared.layout.shared
    assert local.x[:, : local.layout.shared].std(dim=0).max() < 1e-5, "the rest is averaged"
    assert local.x[:, local.layout.shared :].std(dim=0).max() > 1e-4, "batch norm is not"
    assert shared.x.std(dim=0).max() < 1e-5


@pytest.mark.parametrize("algorithm", ["mimelite:tau=3", "slowmo:tau=4", "d2+", "qg-dadam", "dsgdm-n-gt"])
def test_every_kind_of_algorithm_trains(algorithm):
    experiment = replace(SHORT, algorithm=algorithm, topology="lazy/ring:4", lr=0.01)
    _, records = run_all(experiment)
    assert records[-1][0]["loss"] < records[0][0]["loss"]


@pytest.mark.parametrize("norm", ["evonorm-released", "bn"])
def test_a_score_is_each_models_own_in_test_order(norm):
    experiment = replace(SHORT, model="cnn", norm=norm, epochs=1)
    training, records = run_all(experiment)
    data = training.task.data
    x = (data.test.x / data.scale - data.mean[0]) / data.std[0]
    accuracies = []
    for i in range(4):
        module = training.task.module(0)
        module.load_state_dict(model_state(training.rows_of(0), training.layout, i))
        module.eval()
        with torch.no_grad():
            outputs = torch.cat([module(batch) for batch in x.split(32)])
        accuracies.append(float((outputs.argmax(dim=1) == data.test.y).float().mean()))
    assert records[-1][0]["accuracy"] == pytest.approx(np.mean(accuracies), abs=1e-6)
    assert records[-1][0]["accuracy_worst"] == pytest.approx(min(accuracies), abs=1e-6)


def test_your_own_module_trains():
    data = load("digits")
    task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.functional.cross_entropy, data)
    run = qg.train(task, algorithm="qg-dsgdm-n", topology="ring:4", epochs=4, lr=0.05, alpha=10.0)
    assert run.records[-1]["accuracy"] > 0.8
    model = run.model(2)
    with torch.no_grad():
        output = model((data.test.x / data.scale - data.mean[0]) / data.std[0])
    accuracy = (output.argmax(dim=1) == data.test.y).double().mean()
    assert run.records[-1]["accuracy_worst"] - 1e-6 <= accuracy <= run.records[-1]["accuracy_best"] + 1e-6


def test_the_test_loss_is_the_tasks_own():
    def hundredfold(output, target):
        return 100 * nn.functional.cross_entropy(output, target)

    module, data = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), load("digits")
    plain, scaled = (
        qg.train(qg.Task(module, loss, data), algorithm="dsgd", topology="ring:4", epochs=1, lr=lr, partition="iid")
        for loss, lr in ((nn.functional.cross_entropy, 0.5), (hundredfold, 0.005))
    )
    assert scaled.records[-1]["test_loss"] == pytest.approx(100 * plain.records[-1]["test_loss"], rel=1e-3)
    assert scaled.records[-1]["loss"] == pytest.approx(100 * plain.records[-1]["loss"], rel=1e-3)


def test_from_python_the_learning_rate_is_constant_unless_a_schedule_is_asked_for():
    def rates(**settings):
        task = qg.Task(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), nn.functional.cross_entropy, load("digits"))
        run = qg.train(task, algorithm="dsgd", topology="ring:4", epochs=4, lr=0.5, batch=512, **settings)
        return [record["lr"] for record in run.records]

    assert rates() == [0.5] * 4
    assert rates(milestones=(0.5,), warmup=0.0) == pytest.approx([0.5, 0.5, 0.05, 0.05])
    assert rates(warmup=2.0) == pytest.approx([0.1, 0.3, 0.05, 0.005])


def test_your_own_dropout_is_drawn_anew_each_step_and_again_on_resume():
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    task = qg.Task(module, nn.functional.cross_entropy, load("digits"))
    plain = qg.Task(nn.Sequential(module[0], nn.Identity(), module[2]), nn.functional.cross_entropy, load("digits"))
    whole, _ = run_all(SHORT, task=task)
    first, second = (Training(task, [SHORT], CPU) for _ in range(2))
    first.train_epoch()
    second.restore([first.rows_of(0)], 1)
    for _ in epochs(second):
        pass
    assert second.x.equal(whole.x)
    assert not whole.x.isclose(run_all(SHORT, task=plain)[0].x).all()


# ----------------------------------------------------------------------------------------------- data on its way


def test_nodes_of_unequal_size_cycle_their_own_examples():
    owners = [Owner(0, 0, np.arange(10)), Owner(0, 1, np.arange(10, 14))]
    plan = Plan(owners, batch=4)
    assert plan.sizes == [4, 4]
    index = plan.epoch(0, CPU).index
    assert sorted(index[:, 1].flatten().tolist()) == sorted([*range(10, 14)] * 2)
    assert len(set(index[:, 0].flatten().tolist())) == 8


PICTURES = torch.randint(0, 256, (5, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
MEAN, STD = (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)


def images(augmentation, moving):
    return Images(PICTURES, scale=255.0, mean=MEAN, std=STD, augmentation=augmentation, moving=moving, device=CPU)


def normalised(picture):
    return (picture / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize("augmentation", ["flip-crop", "resize-crop"])
def test_an_epoch_is_a_function_of_seed_node_and_epoch(augmentation):
    def draws(owners, epoch):
        drawn = Plan(owners, 8, images(augmentation, moving=True).draw).epoch(epoch, CPU)
        return [drawn.index, *drawn.moves]

    owner, other = Owner(3, 1, np.arange(50)), Owner(3, 0, np.arange(50))
    both, alone, later = draws([other, owner], 2), draws([owner], 2), draws([owner], 3)
    assert len(alone) == 3
    for ours, same, new in zip(alone, both, later, strict=True):
        assert ours.equal(same[:, 1:])
        assert not ours.equal(new)


def test_images_are_mirrored_then_moved_then_normalised():
    index, flip = torch.tensor([[3, 1]]), torch.tensor([[True, False]])
    shift = torch.tensor([[[0, 8], [5, 2]]])
    shown = images("flip-crop", moving=True).show(index, flip, shift)
    for k in range(2):
        image = PICTURES[index[0, k]].float()
        image = image.flip(-1) if flip[0, k] else image
        padded = nn.functional.pad(image, (PAD, PAD, PAD, PAD))
        dy, dx = shift[0, k].tolist()
        torch.testing.assert_close(shown[0, k], normalised(padded[:, dy : dy + 24, dx : dx + 32]))
    still = torch.zeros(1, 2, dtype=torch.bool), torch.full((1, 2, 2), PAD)
    unmoved = images("flip-crop", moving=False).show(index)
    torch.testing.assert_close(images("flip-crop", moving=True).show(index, *still), unmoved)


def test_boxes_are_scaled_as_pytorch_scales_a_crop_then_mirrored():
    index, flip = torch.tensor([[3, 1, 0]]), torch.tensor([[True, False, False]])
    box = torch.tensor([[[2, 5, 7, 9], [0, 0, 24, 32], [23, 31, 1, 1]]])
    shown = images("resize-crop", moving=True).show(index, flip, box)
    assert shown.shape == (1, 3, 3, 21, 28)
    for k in range(3):
        top, left, tall, wide = box[0, k].tolist()
        cut = PICTURES[index[0, k], :, top : top + tall, left : left + wide].float()
        scaled = nn.functional.interpolate(cut[None], size=(21, 28), mode="bilinear", align_corners=False)[0]
        expected = normalised(scaled.flip(-1) if flip[0, k] else scaled)
        torch.testing.assert_close(shown[0, k], expected, rtol=0, atol=1e-5)
    middle = PICTURES[index[0, 0], :, 1:22, 2:30].float()
    torch.testing.assert_close(images("resize-crop", moving=False).show(index)[0, 0], normalised(middle))


def test_random_boxes_lie_in_the_picture_and_have_the_stated_sizes():
    boxes = random_boxes(np.random.default_rng(0), 20_000, 256, 200)
    top, left, tall, wide = boxes.T
    assert top.min() == left.min() == 0
    assert (top + tall).max() == 256
    assert (left + wide).max() == 200
    share = tall * wide / (256 * 200)
    assert share.min() > 0.075
    assert share.max() <= 1
    assert 0.35 < share.mean() < 0.55
    whole = (tall == 256) & (wide == 200)
    assert whole.mean() < 0.02
    ratio = (wide / tall)[~whole]
    assert ratio.min() > 0.73
    assert ratio.max() < 1.37


def test_large_pictures_are_trained_on_boxes_and_tested_in_the_middle():
    x = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    examples = Examples(x, torch.arange(40) % 4)
    data = Dataset("pictures", examples, examples, tuple("abcd"), 255.0, MEAN, STD, "resize-crop")
    assert data.shape == (3, 28, 28)
    experiment = replace(SHORT, model="cnn", partition="iid", batch=5, epochs=2)
    training, records = run_all(experiment, task=make_task(experiment, data))
    assert training.test_inputs.x.shape == (40, 3, 28, 28)
    assert 0 < records[-1][0]["loss"] < 10
    whole, _ = run_all(experiment, task=make_task(experiment, data))
    assert whole.x.equal(training.x)


# ------------------------------------------------------------------------------------------------ runs on disk


def settled(tmp_path, **options):
    return Options(runs=tmp_path, device="cpu", **{"checkpoint_seconds": 0.0} | options)


def test_a_run_is_a_folder_and_is_not_run_twice(tmp_path):
    (run,) = train(SHORT, settled(tmp_path))
    assert {path.name for path in run.folder.iterdir()} == {
        "experiment.json", "metrics.jsonl", "summary.json", "checkpoint"}
    assert run.status == "finished"
    assert len(run.records) == 3
    assert run.summary["last"] == run.records[-1]
    assert run.summary["best"]["accuracy"] == max(record["accuracy"] for record in run.records)
    assert Run.at(run.folder).experiment == SHORT
    stamp = (run.folder / "metrics.jsonl").stat().st_mtime_ns
    train(SHORT, settled(tmp_path))
    assert (run.folder / "metrics.jsonl").stat().st_mtime_ns == stamp


@pytest.mark.parametrize("algorithm", ["slowmo:tau=1", *ALGORITHMS])
def test_what_an_algorithm_keeps_can_be_saved_and_loaded(tmp_path, algorithm):
    """slowmo's x and x0 are one tensor after an outer step."""
    experiment = replace(SHORT, algorithm=algorithm, topology="ring:5", partition="iid", epochs=1)
    (run,) = train(experiment, settled(tmp_path))
    training, _ = run_all(experiment)
    assert {name: value.tolist() for name, value in final(run).items()} == {
        name: value.tolist() for name, value in training.rows_of(0).items()}


def test_a_record_has_the_promised_measures(tmp_path):
    (run,) = train(SHORT, settled(tmp_path))
    record = run.records[-1]
    for name in ("loss", "train_accuracy", "accuracy", "accuracy_std", "accuracy_worst", "accuracy_best",
                 "accuracy_averaged", "consensus_distance", "weight_norm", "effective_step", "images_per_second"):
        assert np.isfinite(record[name]), name
    assert record["accuracy_worst"] <= record["accuracy"] <= record["accuracy_best"]
    counts = torch.bincount(load("digits").test.y)
    answers = (torch.tensor(record["recall_worst"]) * counts).sum()
    assert float(answers / counts.sum()) == pytest.approx(record["accuracy_worst"], rel=1e-6)
    parameters = run.summary["parameters"]
    assert record["bytes_sent"] == 2 * 4 * parameters * record["step"]
    assert record["effective_step"] == pytest.approx(record["lr"] / record["weight_norm"] ** 2, rel=1e-2)


def final(run):
    rows, progress = checkpoints.newest(run.folder / "checkpoint")
    assert progress.epochs == run.experiment.epochs
    return rows


def assert_same_run(a, b):
    ours, theirs = final(a), final(b)
    assert set(ours) == set(theirs)
    assert all(ours[name].equal(theirs[name]) for name in ours)
    timing = "images_per_second"
    assert [{k: v for k, v in r.items() if k != timing} for r in a.records] == [
        {k: v for k, v in r.items() if k != timing} for r in b.records]


class Stop(Exception):
    pass


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n", "d2+", "slowmo:tau=5", "dadam", "mimelite:tau=2"])
def test_a_stopped_run_goes_on_bit_for_bit(tmp_path, algorithm):
    experiment = replace(SHORT, algorithm=algorithm, topology="lazy/ring:4", lr=0.01, model="cnn", norm="bn", epochs=4)
    (whole,) = train(experiment, settled(tmp_path / "whole"))

    def stop(runs, records):
        if records[0]["epoch"] == 2:
            raise Stop

    with pytest.raises(Stop):
        train(experiment, settled(tmp_path / "cut"), stop)
    (cut,) = train(experiment, settled(tmp_path / "cut"))
    assert_same_run(whole, cut)


def train_and_kill(folder, algorithm, kills, epochs):
    """Start a training again and again, kill -9 it at random moments, then let it end; and once without."""
    words = ["--model", "mlp", "--topology", "ring:5", "--partition", "iid", "--lr", "0.02", "--eval-every", "5"]
    words += ["--epochs", str(epochs), "--algorithm", algorithm, "--checkpoint-seconds", "0", "--device", "cpu"]
    command = [sys.executable, "-m", "quasiglobal", "train", *words]
    moments = random.Random(0)
    for kill in range(kills):
        process = subprocess.Popen([*command, "--runs", str(folder / "cut")], stdout=subprocess.DEVNULL)
        before = set((folder / "cut").glob("*/checkpoint/*.json"))
        deadline = time.monotonic() + (moments.uniform(0, 4) if kill % 4 == 3 else 60)
        while set((folder / "cut").glob("*/checkpoint/*.json")) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        assert process.poll() is None, "it ended before it was killed"
        process.send_signal(signal.SIGKILL)
        process.wait()
    for place in ("cut", "whole"):
        subprocess.run([*command, "--runs", str(folder / place)], check=True, stdout=subprocess.DEVNULL)
    (cut,), (whole,) = find(folder / "cut"), find(folder / "whole")
    assert_same_run(whole, cut)


def test_three_kills_change_nothing(tmp_path):
    train_and_kill(tmp_path, "qg-dsgdm-n", kills=3, epochs=100)


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    ["dsgdm-n", "qg-dsgdm-n:tau=3", "qg-dadam", "d2+", "dsgdm-n-gt", "dmsgd", "slowmo:tau=5", "mimelite", "sgdm-n"],
)
def test_twenty_kills_change_nothing(tmp_path, algorithm):
    train_and_kill(tmp_path, algorithm, kills=20, epochs=400)


def test_ctrl_c_saves_the_epoch_and_says_how_to_go_on(tmp_path):
    words = ["--model", "mlp", "--topology", "ring:4", "--epochs", "400", "--lr", "0.05", "--eval-every", "400"]
    command = [sys.executable, "-m", "quasiglobal", "train", *words, "--device", "cpu", "--runs", str(tmp_path)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not any(p.stat().st_size for p in tmp_path.glob("*/metrics.jsonl")):
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == "qg: stopped; run the same command again to go on\n"
    (run,) = find(tmp_path)
    _, progress = checkpoints.newest(run.folder / "checkpoint")
    assert progress.epochs == len(run.records) > 0


def test_seeds_that_stopped_at_different_epochs_all_finish(tmp_path):
    def stop(runs, records):
        if records[0]["epoch"] == 1:
            raise Stop

    with pytest.raises(Stop):
        train(SHORT, settled(tmp_path), stop)
    runs = train(SHORT, settled(tmp_path, seeds=2))
    assert [run.status for run in runs] == ["finished", "finished"]
    (alone,) = train(SHORT.with_seed(1), settled(tmp_path / "alone"))
    assert runs[1].summary["last"]["accuracy"] == pytest.approx(alone.summary["last"]["accuracy"], abs=0.02)


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove"])
def test_a_damaged_checkpoint_falls_back_and_says_so(tmp_path, damage):
    experiment = replace(SHORT, epochs=4)
    (whole,) = train(experiment, settled(tmp_path / "whole"))

    def stop(runs, records):
        if records[0]["epoch"] == 3:
            raise Stop

    with pytest.raises(Stop):
        train(experiment, settled(tmp_path / "cut"), stop)
    (folder,) = (tmp_path / "cut").glob("*/checkpoint")
    newest = sorted(folder.glob("*.safetensors"))[-1]
    content = bytearray(newest.read_bytes())
    if damage == "truncate":
        newest.write_bytes(content[:-100])
    elif damage == "flip":
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    else:
        newest.unlink()
    with pytest.warns(UserWarning, match="is damaged"):
        (cut,) = train(experiment, settled(tmp_path / "cut"))
    assert_same_run(whole, cut)


def test_only_two_checkpoints_are_kept(tmp_path):
    (run,) = train(SHORT, settled(tmp_path))
    assert sorted(path.name for path in (run.folder / "checkpoint").iterdir()) == [
        "000002.json", "000002.safetensors", "000003.json", "000003.safetensors"]


def test_a_diverged_seed_ends_cleanly(tmp_path):
    runs = train(replace(SHORT, lr=1e18, algorithm="dsgd"), settled(tmp_path, seeds=2))
    assert [run.status for run in runs] == ["diverged", "diverged"]
    assert runs[0].records[-1]["loss"] is None or runs[0].records[-1]["loss"] > 1e4


def test_a_full_disk_keeps_the_last_good_checkpoint(tmp_path, monkeypatch):
    (run,) = train(replace(SHORT, epochs=2), settled(tmp_path))
    before = final(run)

    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(qg.InputError, match="No space left on device"):
        run.checkpoint(before, 3)
    assert all(final(run)[name].equal(before[name]) for name in before)
    assert not list((run.folder / "checkpoint").glob(".*"))


@pytest.mark.skipif(sys.platform != "linux", reason="a limit on the size of files")
def test_a_file_that_cannot_be_written_is_one_sentence(tmp_path):
    words = f"train --model mlp --topology ring:4 --epochs 2 --device cpu --runs {tmp_path / 'runs'}"
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 400; exec {sys.executable} -m quasiglobal {words}"], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.startswith("qg: cannot write ")
    assert len(done.stderr.splitlines()) == 1
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".") or "safetensors" in path.name]


def test_tensorboard_sees_the_measures(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (run,) = train(SHORT, settled(tmp_path, tensorboard=True))
    events = EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("accuracy")] == [1, 2, 3]
    assert events.Scalars("loss")[-1].value == pytest.approx(run.records[-1]["loss"])


def test_tensorboard_that_is_not_there_is_said_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(qg.InputError, match="pip install"):
        train(SHORT, settled(tmp_path / "runs", tensorboard=True))
    assert not (tmp_path / "runs").exists()


def test_bytes_sent_count_neighbours_and_exact_means():
    sent = {
        name: run_all(replace(SHORT, algorithm=name, epochs=1))[1][-1][0]["bytes_sent"]
        for name in ("dsgd", "dsgd-gt", "sgd")
    }
    steps, d = 6, 26_122
    assert sent["dsgd"] == steps * 2 * 4 * d                  # two neighbours, float32
    assert sent["dsgd-gt"] == 2 * sent["dsgd"]
    assert sent["sgd"] == steps * 2 * 3 / 4 * 4 * d           # a ring all-reduce over four nodes


def test_an_estimate_is_what_the_run_takes(tmp_path):
    training = prepare(replace(SHORT, algorithm="dsgdm-n"), settled(tmp_path))
    taken = estimate(training, tmp_path / "not" / "there")
    d = training.layout.size
    assert (taken.parameters, taken.steps, taken.sent_a_step) == (d, 18, 2 * 4 * d)
    assert (taken.rows, taken.checkpoints) == (3 * 4 * 4 * d, 2 * 2 * 4 * 4 * d)
    assert 0 < taken.step_seconds * 18 < taken.seconds < 60
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("change", "says"),
    [({"batch": 512}, "fewer than its batch"), ({"algorithm": "sgdm-n"}, "iid"), ({"algorithm": "d2"}, "lazy/ring:4")],
)
def test_an_estimate_warns(tmp_path, change, says):
    with pytest.warns(UserWarning, match=says):
        estimate(prepare(replace(SHORT, **change), settled(tmp_path)), tmp_path)


def test_runs_are_compared_by_what_sets_them_apart(tmp_path):
    for algorithm in ("dsgd", "qg-dsgdm"):
        train(replace(SHORT, algorithm=algorithm, epochs=1), settled(tmp_path, seeds=2))
    groups = group_by_setting(list(find(tmp_path)))
    assert {label: len(group) for label, group in groups.items()} == {"dsgd": 2, "qg-dsgdm": 2}


@pytest.mark.parametrize("bn", ["shared", "local"])
def test_an_exported_model_scores_as_its_node_did(tmp_path, bn):
    data = load("digits")
    (run,) = train(replace(SHORT, model="cnn", norm="bn", bn=bn, lr=0.02), settled(tmp_path))
    scores = []
    for node in range(4):
        exports.save(exports.export(run, str(node)), tmp_path / "model.safetensors")
        model = exports.read(tmp_path / "model.safetensors")
        scores.append(float((model.predict(data, data.test) == data.test.y).double().mean()))
    for name in ("classes", "shape", "mean", "std"):
        assert getattr(model.experiment, name) == getattr(data, name), "it says how it saw its data"
    last = run.summary["last"]
    assert np.mean(scores) == pytest.approx(last["accuracy"], abs=1e-3)
    assert min(scores) == pytest.approx(last["accuracy_worst"], abs=1e-3)
    averaged = exports.export(run, "average")
    right = (averaged.predict(data, data.test) == data.test.y).double().mean()
    assert float(right) == pytest.approx(last["accuracy_averaged"], abs=1e-3)


def test_a_bad_export_is_one_sentence(tmp_path):
    (run,) = train(replace(SHORT, epochs=1), settled(tmp_path))
    with pytest.raises(qg.InputError, match="node must be average or one of 0 to 3, got '4'"):
        exports.export(run, "4")
    (tmp_path / "junk").write_bytes(b"junk")
    for path in (tmp_path / "junk", tmp_path / "nowhere"):
        with pytest.raises(qg.InputError, match="cannot read a model from"):
            exports.read(path)


# ----------------------------------------------------------------------------------------------- experiments


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
        clip: float | None = None

    values = asdict(SHORT)
    assert Later(**values).name == SHORT.name
    assert Later(**values, clip=1.0).name != SHORT.name


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


def test_your_own_data_by_arrays():
    x, y = torch.randn(80, 5), torch.randint(0, 3, (80,))
    data = Dataset("mine", Examples(x, y), Examples(x[:20], y[:20]), ("a", "b", "c"), 1.0, (0.0,), (1.0,), "none")
    task = Task(nn.Linear(5, 3), nn.functional.cross_entropy, data)
    run = qg.train(task, algorithm="dsgd", topology="complete:2", epochs=2, lr=0.1, partition="iid", batch=8)
    assert len(run.records) == 2


def test_models_by_their_path(tmp_path, monkeypatch):
    (tmp_path / "mynets.py").write_text(
        "from torch import nn\ndef Small():\n    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = replace(SHORT, model="mynets:Small")
    assert make_task(experiment, load("digits")).module(0)[1].out_features == 10
    assert build("mlp", shape=(1, 8, 8)) is not None


def test_what_a_killed_process_left_half_written_is_passed_over(tmp_path):
    rows = {"x": torch.zeros(2, 3)}
    checkpoints.save(tmp_path, rows, checkpoints.Progress(1, 0))
    for name in (".000002.17.json", ".000002.17.safetensors"):
        (tmp_path / name).write_bytes(b"half")
    assert checkpoints.epochs(tmp_path) == [1]
    found = checkpoints.newest(tmp_path)
    assert found is not None
    assert found[1].epochs == 1
    checkpoints.save(tmp_path, rows, checkpoints.Progress(2, 0))
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["000001", "000001", "000002", "000002"]


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n", "d2+", "slowmo", "qg-dadam"])
def test_learning_rates_and_partitions_are_rows_too(tmp_path, algorithm):
    common = replace(SHORT, algorithm=algorithm, topology="lazy/ring:4", precision="fp64", warmup=0.0, epochs=2)
    settings = [common, replace(common, lr=0.01), replace(common, lr=0.02, alpha=10.0), replace(common, milestones=())]
    rows = train(settings, settled(tmp_path / "rows"))
    alone = [run for one in settings for run in train(one, settled(tmp_path / "alone"))]
    for one, other in zip(rows, alone, strict=True):
        assert one.experiment == other.experiment
        found, expected = one.newest(), other.newest()
        assert found is not None
        assert expected is not None
        for name, value in expected[0].items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-9)
        assert one.summary["partition"] == other.summary["partition"]


def test_algorithms_and_topologies_share_the_gradients_and_step_on_their_own_rows(tmp_path):
    common = replace(SHORT, precision="fp64", warmup=0.0, epochs=2)
    names = ["qg-dsgdm-n", "d2+", "mimelite", "sgdm-n", "slowmo:tau=3", "dmsgd"]
    settings = [replace(common, algorithm=name, topology="lazy/ring:4") for name in names]
    settings += [replace(common, topology=name) for name in ("one-peer-exponential:4", "complete:4")]
    programs = []
    rows = train(settings, settled(tmp_path / "rows", seeds=2), lambda runs, records: programs.append(len(runs)))
    assert set(programs) == {2 * len(settings)}, "one program"
    assert [run.experiment.algorithm for run in rows[::2]] == [one.algorithm for one in settings], "in the order asked"
    alone = [run for one in settings for run in train(one, settled(tmp_path / "alone", seeds=2))]
    for one, other in zip(rows, alone, strict=True):
        assert one.experiment == other.experiment
        found, expected = one.newest(), other.newest()
        for name, value in expected[0].items():
            torch.testing.assert_close(found[0][name], value, rtol=1e-9, atol=1e-9)
        assert one.records[-1]["bytes_sent"] == other.records[-1]["bytes_sent"]


def test_runs_that_cannot_share_a_program_train_one_after_the_other(tmp_path, monkeypatch):
    common = replace(SHORT, epochs=1)
    settings = [common, replace(common, batch=32), replace(common, topology="ring:3"), replace(common, alpha=10.0)]
    programs = []

    def watch(runs, records):
        programs.append(len(runs))

    runs = train([*settings, common], settled(tmp_path / "a"), watch)
    assert programs == [2, 1, 1]
    assert [run.experiment for run in runs] == [*settings, common]
    monkeypatch.setattr("quasiglobal.runs.local.runs_that_fit", lambda *_: 2)
    train(common, settled(tmp_path / "b", seeds=5), watch)
    assert programs[3:] == [2, 2, 1], "as many at a time as fit the memory"
    with pytest.raises(qg.InputError, match="runs that train together need one batch, got 64 and 32"):
        Training(make_task(common, load("digits")), settings[:2], CPU)


def test_a_program_that_stopped_goes_on_with_all_its_algorithms(tmp_path):
    common = replace(SHORT, topology="lazy/ring:4", precision="fp64")
    settings = [replace(common, algorithm=name) for name in ("dsgd", "qg-dsgdm-n", "d2+")]
    whole = train(settings, settled(tmp_path / "whole"))

    def stop(runs, records):
        if records[0]["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(settings, settled(tmp_path / "parts", checkpoint_seconds=0.0), stop)
    for one, other in zip(train(settings, settled(tmp_path / "parts")), whole, strict=True):
        assert all(value.equal(other.newest()[0][name]) for name, value in one.newest()[0].items())


@pytest.mark.parametrize("rate", [0.1, 1e30])
def test_a_stop_in_the_last_epoch_of_a_program_keeps_the_next_from_beginning(tmp_path, rate):
    first, second = replace(SHORT, lr=rate), replace(SHORT, batch=16)

    def stop(runs, records):
        if records[0]["epoch"] == SHORT.epochs or rate > 1:             # at such a rate the first epoch is the last
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train([first, second], settled(tmp_path), stop)
    assert Run.of(first, tmp_path).status == ("diverged" if rate > 1 else "finished")
    assert not Run.of(second, tmp_path).begun


def test_what_a_run_takes_grows_with_its_nodes_its_batch_and_its_algorithms_state():
    def bytes_of(**changes):
        experiment = replace(SHORT, model="cnn", **changes)
        return bytes_of_run(make_task(experiment, load("digits")), experiment)

    assert bytes_of(topology="ring:8") == 2 * bytes_of()
    assert bytes_of(batch=128) > bytes_of() > bytes_of(batch=32)
    assert bytes_of(algorithm="dadam") > bytes_of(algorithm="dsgd")
    assert bytes_of(precision="fp64") > bytes_of()


def test_partitions_whose_epochs_differ_do_not_share_a_program(tmp_path):
    common = replace(SHORT, epochs=1, precision="fp64")
    settings = [replace(common, partition=partition) for partition in ("dirichlet", "whole", "iid", "shards:2")]
    for row, alone in zip(
        train(settings, settled(tmp_path / "rows")),
        [run for one in settings for run in train(one, settled(tmp_path / "alone"))],
        strict=True,
    ):
        assert row.records[0]["step"] == alone.records[0]["step"]
        torch.testing.assert_close(row.newest()[0]["x"], alone.newest()[0]["x"], rtol=1e-9, atol=1e-9)
    task = make_task(common, load("digits"))
    with pytest.raises(qg.InputError, match="epochs of as many steps"):
        Training(task, settings[:2], CPU)


def test_a_row_that_diverged_is_not_watched_any_more(tmp_path):
    watched = []
    settings = [SHORT, replace(SHORT, lr=1e12)]
    train(settings, settled(tmp_path), lambda runs, records: watched.append(len(runs)))
    assert watched[0] == 2
    assert watched[-1] == 1


def test_a_lost_or_damaged_file_costs_no_run(tmp_path):
    """What can be made again is; what cannot be read is named."""
    options = settled(tmp_path, checkpoint_seconds=0.0)

    def stop(runs, records):
        if records[0]["epoch"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(SHORT, options, stop)
    (run,) = find(tmp_path)
    (run.folder / "metrics.jsonl").unlink()
    with pytest.warns(UserWarning, match="lost records"):
        train(SHORT, options)
    assert [record["epoch"] for record in run.records] == [2, 3]
    (run.folder / "summary.json").write_text("")
    with pytest.warns(UserWarning, match="summary.json is damaged"):
        train(SHORT, options)
    assert run.summary["status"] == "finished"
    (run.folder / "experiment.json").unlink()
    train(SHORT, options)
    assert [found.experiment for found in find(tmp_path)] == [SHORT]
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write("{\n")
    with pytest.warns(UserWarning, match="line 3 of"):
        assert len(run.records) == 2
    (run.folder / "experiment.json").write_text("[1]")
    with pytest.warns(UserWarning, match="passed over"):
        assert list(find(tmp_path)) == []


def test_two_processes_do_not_train_one_run(tmp_path):
    with files.alone(Run.of(SHORT, tmp_path).folder), pytest.raises(qg.InputError, match="another process"):
        train(SHORT, settled(tmp_path))


def test_a_model_of_ones_own_is_left_as_it_is(tmp_path, monkeypatch):
    (tmp_path / "own_network.py").write_text(
        "from torch import nn\n"
        "net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Linear(8, 10))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    experiment = replace(SHORT, model="own_network:net", epochs=1)
    train(experiment, settled(tmp_path / "runs"))
    from own_network import net

    assert net[2].num_batches_tracked == 0
