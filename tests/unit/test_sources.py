"""Search order for data sets: the disk, then the hub."""

import inspect
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from data_files import RNG, refused, replace, write_cifar, write_fashion
from PIL import Image
from sklearn.datasets import load_digits

import quasiglobal as qg
from quasiglobal.data import sources as datasets
from quasiglobal.data.dataset import Splits
from quasiglobal.data.readers import Reader, labelled
from quasiglobal.training.experiment import Experiment

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("no_data_here")


def test_the_data_folder_is_the_argument_else_the_environment_else_data(tmp_path, monkeypatch):
    write_cifar(tmp_path / "data" / "cifar-10-batches-py", size=1)
    write_cifar(tmp_path / "mine" / "cifar-10-batches-py", size=2)
    write_cifar(tmp_path / "given", size=3)
    assert len(datasets.load("cifar10").train) == 5
    monkeypatch.setenv("QG_DATA", str(tmp_path / "mine"))
    assert len(datasets.load("cifar10").train) == 10
    assert len(datasets.load("cifar10", "given").train) == 15


def test_available_lists_what_is_found_and_how_to_get_the_rest(tmp_path):
    write_cifar(tmp_path / "cifar-10-batches-py")
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").unlink()
    write_fashion(tmp_path / "fashion-mnist", ending=".gz")
    found = {line.name: line for line in datasets.available(tmp_path)}
    assert list(found) == ["digits", "fashion-mnist", "cifar10", "imagenet32", "imagenet", "agnews", "sst2"]
    assert found["digits"].where == "embedded"
    assert found["fashion-mnist"].where == str(tmp_path / "fashion-mnist")
    assert found["fashion-mnist"].missing == ()
    assert found["fashion-mnist"].examples == 70_000
    assert found["cifar10"].where == str(tmp_path / "cifar-10-batches-py")
    assert found["cifar10"].missing == ("data_batch_3",)
    assert found["imagenet32"].where is found["imagenet"].where is None
    assert f"tar xz -C {tmp_path}" in found["cifar10"].steps
    assert f"unzip -j -d {tmp_path}/imagenet32" in found["imagenet32"].steps
    assert "-{images" not in found["fashion-mnist"].steps
    assert "{train-images-idx3," in found["fashion-mnist"].steps


def test_the_digits_are_those_of_scikit_learn():
    features, labels = load_digits(return_X_y=True)
    found = datasets.load("digits")
    images, digits = (np.concatenate([getattr(part, name) for part in (found.train, found.test)]) for name in "xy")
    order = [np.lexsort((*rows.reshape(len(rows), -1).T, of)) for rows, of in ((images, digits), (features, labels))]
    assert np.array_equal(images.reshape(-1, 64)[order[0]], features[order[1]])
    assert np.array_equal(digits[order[0]], labels[order[1]])


def test_a_whole_set_is_preferred_to_a_torn_one(tmp_path):
    write_cifar(tmp_path, size=2)
    write_cifar(tmp_path / "cifar-10-batches-py", size=1)
    (tmp_path / "cifar-10-batches-py" / "test_batch").unlink()
    assert len(datasets.load("cifar10", tmp_path).test) == 2


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("fashion-mnist", "apt-get install dataset-fashion-mnist"),
        ("cifar10", "curl https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz | tar xz -C 'my data'"),
        ("imagenet32", "unzip -j -d 'my data'/imagenet32"),
        ("imagenet", "'my data'/imagenet/train/CLASS/"),
    ],
)
def test_what_is_not_there_is_refused_with_the_command_to_get_it(name, command):
    folder = datasets.SOURCES[name].folders[0]
    looked = f"{name} is not in my data/{folder} or my data; get it: "
    refused(name, looked, command, data_dir=Path("my data"))


def test_the_debian_package_is_the_last_place(monkeypatch):
    monkeypatch.undo()
    assert datasets.SOURCES["fashion-mnist"].folders[-1] == "/usr/share/datasets/fashion-mnist"


def test_unknown_names_get_the_nearest():
    refused("cifar-10", "unknown data set 'cifar-10'; did you mean 'cifar10'?")
    refused("zzz", "unknown data set 'zzz'; known: digits, fashion-mnist, ", "folder:PATH")


def test_a_users_own_source_is_a_line_in_the_table(monkeypatch):
    source = replace(datasets.SOURCES["digits"], augmentation="flip-crop")
    monkeypatch.setitem(datasets.SOURCES, "mine", source)
    assert datasets.load("mine").augmentation == "flip-crop"


def test_a_format_is_a_line_in_the_table_of_readers(tmp_path, monkeypatch):
    """Names, the names of bare paths, and messages follow from it."""
    def read(path, memory_limit):
        x = np.load(path)
        examples = labelled(x, np.arange(len(x)) % 2, 2, path)
        return Splits(examples, examples, ("0", "1"))

    monkeypatch.setattr(datasets, "READERS", (Reader(prefix="npy", suffixes=(".npy",), splits=read), *datasets.READERS))
    x = np.random.default_rng(0).random((6, 3), dtype=np.float32)
    np.save(tmp_path / "mine.npy", x)
    data = datasets.load(f"npy:{tmp_path / 'mine.npy'}")
    assert torch.equal(data.train.x, torch.from_numpy(x))
    assert data.classes == ("0", "1")
    assert datasets.named("mine.npy") == "npy:mine.npy"
    refused(str(tmp_path / "mine.npy"), f"write npy:{tmp_path / 'mine.npy'}")
    with pytest.raises(qg.InputError, match="cannot be streamed"):
        datasets.check_streams("npy:mine.npy")


@pytest.mark.parametrize("prefix", datasets.PREFIXES)
def test_the_help_and_the_documents_name_every_format(prefix):
    assert f"{prefix}:PATH" in inspect.getsource(Experiment)
    for page in ("index.md", "your-own.md", "extending.md"):
        assert f"{prefix}:" in (ROOT / "docs" / page).read_text()


class Rows(list):
    """Stand-in for a split of the `datasets` package."""

    def __init__(self, images, labels, image, names):
        super().__init__({image: x, "label": y} for x, y in zip(images, labels, strict=True))
        self.features = {"label": types.SimpleNamespace(names=names)}

    def __getitem__(self, key):
        return [row[key] for row in self] if isinstance(key, str) else super().__getitem__(key)


def fake_hub(monkeypatch, load_dataset):
    package = types.ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)


@pytest.mark.parametrize(
    ("name", "repository", "image", "test", "size", "shape"),
    [
        ("fashion-mnist", "zalando-datasets/fashion_mnist", "image", "test", (28, 28), (1, 28, 28)),
        ("cifar10", "uoft-cs/cifar10", "img", "test", (32, 32, 3), (3, 32, 32)),
        ("imagenet", "ILSVRC/imagenet-1k", "image", "validation", (50, 70, 3), (3, 224, 224)),
    ],
)
def test_the_hub_helps_where_the_disk_has_nothing(monkeypatch, name, repository, image, test, size, shape):
    images = RNG.integers(0, 256, (4, *size), dtype=np.uint8)
    labels, names = [3, 1, 0, 9], list("abcdefghij")

    def load_dataset(path, split):
        assert (path, split) == (repository, ["train", test])
        pictures = [Image.fromarray(x) for x in images]
        return [Rows(pictures, labels, image, names), Rows(pictures[:2], labels[:2], image, names)]

    fake_hub(monkeypatch, load_dataset)
    data = datasets.load(name)
    assert (data.shape, data.classes, len(data.test)) == (shape, tuple("abcdefghij"), 2)
    assert data.train.y.tolist() == labels
    if name != "imagenet":
        pixels = data.train.x.permute(0, 2, 3, 1).reshape(images.shape)
        np.testing.assert_array_equal(pixels.numpy(), images)
    refused(name, "needs", "above the limit of 1e-06 GB", memory_limit=1000)


def test_a_hub_that_cannot_be_reached_is_one_sentence(monkeypatch):
    def load_dataset(path, split):
        raise ConnectionError("Couldn't reach the hub\nand much more")

    fake_hub(monkeypatch, load_dataset)
    refused("cifar10", "not in data/cifar-10", "Couldn't reach the hub", "curl")


def test_a_folder_called_datasets_is_not_the_hubs_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", types.ModuleType("datasets"))
    refused("cifar10", "is not in data/cifar-10-batches-py or data; get it")


def test_the_disk_comes_before_the_hub(monkeypatch, tmp_path):
    fake_hub(monkeypatch, lambda *_, **__: pytest.fail("asked the hub"))
    write_cifar(tmp_path / "data")
    datasets.load("cifar10")
    (tmp_path / "data" / "test_batch").unlink()
    refused("cifar10", "data/test_batch is missing")


def test_owners_who_lack_classes_share_one_list(tmp_path):
    for name in ("cat", "owl"):
        (tmp_path / name).mkdir()
        for k in range(5):
            Image.new("L", (4, 4), k).save(tmp_path / name / f"{k}.png")
    own = datasets.load(f"folder:{tmp_path}")
    data = datasets.agreed(own, ("ant", "owl", "cat"), (1, 4, 4), (0.5,), (0.25,))
    assert data.classes == ("ant", "owl", "cat")
    assert torch.equal(data.train.y, torch.tensor([2, 1])[own.train.y])
    assert (data.mean, data.std) == ((0.5,), (0.25,))
    with pytest.raises(qg.InputError, match="has the class 'cat', but the agreed classes are dog, owl"):
        datasets.agreed(own, ("dog", "owl"), (), (), ())
