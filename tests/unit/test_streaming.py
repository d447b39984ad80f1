"""Images that stay on disk: equal to images in memory, made once, checked, and resumed."""

import errno
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from small_runs import CPU

import quasiglobal as qg
from quasiglobal.data import shards as module
from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.data.readers import folders
from quasiglobal.data.shards import Shards, showing
from quasiglobal.data.sources import load
from quasiglobal.runs import checkpoints
from quasiglobal.runs.building import make_task
from quasiglobal.runs.estimate import estimate, prepare
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.loop import Loop
from quasiglobal.training.program import Program

IMAGES, SIDE = 60, 12


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Class folders of small images; shards of four images in a cache of the test's own."""
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(module, "SHARD", 4 * 3 * SIDE * SIDE)
    rng = np.random.default_rng(0)
    for k in range(IMAGES):
        path = tmp_path / "images" / f"class{k % 3}" / f"{k}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 256, size=(SIDE, SIDE, 3)) // (1 + k % 3)
        Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "images"


def shards_of(data):
    assert data.train.shards is not None
    return data.train.shards


def experiment_on(folder):
    return Experiment(data=f"folder:{folder}", model="cnn", topology="ring:4", batch=4, epochs=3, partition="iid")


def test_images_beyond_the_memory_limit_stay_on_disk_and_are_the_same(folder):
    size = IMAGES * 3 * SIDE * SIDE
    kept, streamed = load(f"folder:{folder}", memory_limit=size), load(f"folder:{folder}", memory_limit=size - 1)
    assert kept.train.shards is None
    for ours, theirs in ((streamed.train, kept.train), (streamed.test, kept.test)):
        assert ours.shards is not None
        assert ours.x.equal(theirs.x)
        assert ours.y.equal(theirs.y)
    assert (streamed.mean, streamed.std) == (kept.mean, kept.std)


@pytest.mark.parametrize("how", [{"stream": True}, {"memory_limit": 1e-6}])
def test_a_streamed_run_equals_one_in_memory_bit_for_bit(folder, tmp_path, how):
    one = experiment_on(folder)
    (kept,) = simulate(one, Options(runs=tmp_path / "kept", device="cpu"))
    (streamed,) = simulate(one, Options(runs=tmp_path / "streamed", device="cpu", **how))
    assert streamed.folder.name == kept.folder.name
    ours, theirs = (checkpoints.newest(run.folder / "checkpoint").rows for run in (streamed, kept))
    assert all(ours[name].equal(theirs[name]) for name in theirs)
    for new, old in zip(streamed.records(), kept.records(), strict=True):
        assert {**new, "images_per_second": 0} == {**old, "images_per_second": 0}


@pytest.mark.parametrize("augmentation", ["none", "flip-crop", "resize-crop"])
def test_augmentation_and_resume_are_exact(folder, augmentation):
    one = replace(experiment_on(folder), partition="shards:2")
    kept, streamed = (replace(load(f"folder:{folder}", stream=on), augmentation=augmentation) for on in (False, True))
    whole = Program(make_task(one, kept), [one], CPU)
    Loop(whole).run()
    first, second = (Program(make_task(one, streamed), [one], CPU) for _ in range(2))
    first.train_epoch()
    second.restore([first.checkpoint(0)])
    Loop(second).run()
    assert second.state.x.equal(whole.state.x)


def test_a_captured_step_finds_its_batch_in_a_fixed_place(folder):
    one = experiment_on(folder)
    places = {}

    def run(key, step):
        inputs = program.feed.streamed._places
        for size, placed in inputs.items():
            assert places.setdefault(size, placed.x.data_ptr()) == placed.x.data_ptr()
        step()

    program = Program(make_task(one, load(f"folder:{folder}", stream=True)), [one], CPU, capture=lambda: run)
    Loop(program).run()
    assert places


def test_shards_are_made_once_with_progress_and_taken_up_where_they_stopped(folder, monkeypatch):
    told, decoded = [], []
    real = Shards._make_shard

    def counted(self, shard, read):
        decoded.append((self.shape[0], shard))
        if len(decoded) == 5:
            raise KeyboardInterrupt
        real(self, shard, read)

    monkeypatch.setattr(Shards, "_make_shard", counted)
    with pytest.raises(KeyboardInterrupt), showing(lambda *what: told.append(what)):
        load(f"folder:{folder}", stream=True)
    load(f"folder:{folder}", stream=True)
    assert told[:2] == [("storing 48 images", 0, 12), ("storing 48 images", 1, 12)]
    assert len(decoded) == 1 + len(set(decoded)) == 16      # the interrupted one twice; 12 of training, 3 of test
    load(f"folder:{folder}", stream=True)
    assert len(decoded) == 16


def test_a_changed_image_makes_other_shards(folder):
    before = shards_of(load(f"folder:{folder}", stream=True))
    Image.new("RGB", (SIDE, SIDE)).save(folder / "class0" / "0.png")
    assert shards_of(load(f"folder:{folder}", stream=True)).folder != before.folder


def test_a_damaged_shard_is_one_sentence_and_is_made_anew(folder):
    data = load(f"folder:{folder}", stream=True)
    shards = shards_of(data)
    whole = data.train.x.clone()
    with open(shards.folder / "images", "r+b") as file:
        file.seek(9 * 3 * SIDE * SIDE + 5)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    again = shards_of(load(f"folder:{folder}", stream=True))
    again.read(torch.tensor([0, 8]))
    with pytest.raises(qg.InputError, match=r"shard 2 of .* is damaged at image 9; run the same command again"):
        again.read(torch.tensor([3, 9]))
    assert json.loads((shards.folder / "shards.json").read_text())["done"] == [k for k in range(12) if k != 2]
    assert shards_of(load(f"folder:{folder}", stream=True)).read(torch.arange(48)).equal(whole)


def test_a_truncated_file_is_made_anew(folder):
    data = load(f"folder:{folder}", stream=True)
    whole = data.train.x.clone()
    with open(shards_of(data).folder / "images", "r+b") as file:
        file.truncate(1000)
    assert load(f"folder:{folder}", stream=True).train.x.equal(whole)


def test_a_full_disk_is_one_sentence_and_nothing_is_lost(folder, monkeypatch):
    real, made = Shards._make_shard, []

    def full(self, shard, read):
        if len(made) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        made.append(shard)
        real(self, shard, read)

    monkeypatch.setattr(Shards, "_make_shard", full)
    with pytest.raises(qg.InputError, match=r"No space left on device; 4 of 12 shards are made, and the same command"):
        load(f"folder:{folder}", stream=True)
    monkeypatch.setattr(Shards, "_make_shard", real)
    assert len(shards_of(load(f"folder:{folder}", stream=True)).done()) == 12
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 10})())
    Image.new("RGB", (SIDE, SIDE)).save(folder / "class0" / "0.png")
    with pytest.raises(qg.InputError, match=r"needs .* GB, but its disk has 1e-08 GB free; set QG_CACHE"):
        load(f"folder:{folder}", stream=True)


@pytest.mark.parametrize("algorithm", ["qg-dsgdm-n", "mimelite"])
def test_an_estimate_decodes_no_images(folder, tmp_path, monkeypatch, algorithm):
    one = replace(experiment_on(folder), algorithm=algorithm)

    def estimated(**how):
        options = Options(runs=tmp_path, device="cpu", **how)
        return estimate(*prepare(one, options), options)

    real = estimated()

    def refuse(*args):
        raise AssertionError("decoded")

    monkeypatch.setattr(folders, "_decode", refuse)
    monkeypatch.setattr(folders, "_decode_to_disk", refuse)
    found = estimated()
    pixels = IMAGES * 3 * SIDE * SIDE
    assert (found.steps, found.data, found.shards) == (real.steps, pixels + 8 * IMAGES, 0)
    if algorithm != "mimelite":
        streamed = estimated(stream=True)
        assert (streamed.data, streamed.shards) == (8 * IMAGES, pixels)


def test_what_cannot_be_streamed_is_one_sentence(tmp_path):
    for name in ("digits", "cifar10", "folder:mine.npz"):
        with pytest.raises(qg.InputError, match="cannot be streamed; leave out --stream"):
            load(name, stream=True)
    with pytest.raises(qg.InputError, match="memory_limit must be > 0 GB, got 0; --stream keeps nothing"):
        Options(memory_limit=0)


class Made(torch.utils.data.Dataset):
    """Own examples of several types: a dict of tensors, and label images drawn at random when they are read."""

    def __init__(self, m, first=0):
        self.m, self.first = m, first

    def __len__(self):
        return self.m

    def __getitem__(self, row):
        rng = np.random.default_rng(self.first + row)
        if rng.random() < BAD:
            return {"a": np.full((3, 5), np.nan), "b": np.zeros(4, dtype=np.int64)}, torch.rand(3, 6) > 0.5
        return {"a": rng.normal(size=(3, 5)), "b": rng.integers(0, 9, size=4)}, torch.rand(3, 6) > 0.5


BAD = 0.0


class OfBoth(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.embedding = torch.nn.Linear(15, 18), torch.nn.Embedding(9, 18)

    def forward(self, a, b):
        return (self.linear(a.flatten(1)) + self.embedding(b).sum(dim=1)).view(-1, 3, 6)


ARRAYS = {"a": torch.zeros(7, 3, 5).double(), "b": torch.ones(7, 4).long()}, torch.ones(7, 3, 6)
PARTS = [Made(10, 100), ARRAYS, Made(8, 300)]


@pytest.mark.parametrize(
    ("nodes", "train", "test"), [(4, Made(40), None), (3, PARTS, None), (3, Made(40), [Made(9, 400)] * 3)]
)
def test_own_datasets_beyond_the_memory_limit_stay_on_disk_and_train_the_same(
    tmp_path, monkeypatch, nodes, train, test
):
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    torch.manual_seed(0)
    model, loss = OfBoth(), torch.nn.functional.binary_cross_entropy_with_logits
    kept, streamed = (qg.Task(model, loss, train, test, memory_limit=limit) for limit in (1e9, 0))
    assert kept.data.train.shards is None
    assert streamed.data.train.shards is not None
    assert streamed.data.test.shards is not None
    ours, theirs = (
        qg.train(task, topology=f"ring:{nodes}", epochs=2, batch=4, lr=0.1, device="cpu", runs=tmp_path / name)
        for name, task in (("streamed", streamed), ("kept", kept))
    )
    assert [{**new, "images_per_second": 0} for new in ours.records] == [
        {**old, "images_per_second": 0} for old in theirs.records
    ]
    assert ours.folder.name == theirs.folder.name           # the same data, wherever they are


def test_own_datasets_are_stored_once_and_checked(tmp_path, monkeypatch):
    monkeypatch.setenv("QG_CACHE", str(tmp_path))
    model, loss = OfBoth(), torch.nn.functional.binary_cross_entropy_with_logits
    first = qg.Task(model, loss, Made(40), memory_limit=0)
    made = []
    monkeypatch.setattr(Shards, "_make_shard", lambda self, shard, read: made.append(shard))
    assert qg.Task(model, loss, Made(40), memory_limit=0).data.train.shards.folder == first.data.train.shards.folder
    assert made == []
    monkeypatch.undo()
    monkeypatch.setenv("QG_CACHE", str(tmp_path))
    with open(first.data.train.shards.folder / "examples", "r+b") as file:
        file.write(b"?")
    with pytest.raises(qg.InputError, match=r"shard 0 of .* is damaged at example 0; run the same command again"):
        qg.train(qg.Task(model, loss, Made(40), memory_limit=0), topology="ring:4", epochs=1, lr=0.1, device="cpu")
    monkeypatch.setitem(globals(), "BAD", 0.1)
    with pytest.raises(qg.InputError, match=r"the input of example \d+ of train has a value that is not a finite"):
        qg.Task(model, loss, Made(39), memory_limit=0)


def test_full_gradients_need_data_in_memory(folder):
    one = replace(experiment_on(folder), algorithm="mimelite")
    program = Program(make_task(one, load(f"folder:{folder}", stream=True)), [one], CPU)
    with pytest.raises(qg.InputError, match="need data in memory; leave out --stream"):
        Loop(program).run()


def test_rows_of_large_images_are_read_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setenv("QG_CACHE", str(tmp_path))
    shards = Shards(tmp_path / "made", (64, 3, 256, 256))
    colours = np.arange(64, dtype=np.uint8)
    shards.make(lambda row: np.full((3, 256, 256), colours[row], np.uint8))
    assert shards.x.numel() == 12_582_912
    rows = torch.tensor([5, 63, 0])
    assert shards.read(rows)[:, 0, 0, 0].tolist() == [5, 63, 0]
    few = Examples(shards.x, torch.arange(64) % 2, shards=shards)
    data = Dataset("made", few, few, ("a", "b"), 255.0, (0.5,) * 3, (0.5,) * 3, "resize-crop")
    assert data.shape == (3, 224, 224)
