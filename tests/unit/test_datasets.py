"""Every format is read back exactly, and a bad file gives one sentence that names it."""

import builtins
import gzip
import io
import os
import pickle
import struct
import sys
import types
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import quasiglobal as qg
from quasiglobal.data import sources as datasets
from quasiglobal.data.dataset import moments
from quasiglobal.data.randomness import generator
from quasiglobal.data.readers import folders, pickles

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """No data of this machine, and no hub."""
    monkeypatch.delenv("QG_DATA", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    fashion = datasets.SOURCES["fashion-mnist"]
    here = [folder for folder in fashion.folders if not os.path.isabs(folder)]
    monkeypatch.setitem(datasets.SOURCES, "fashion-mnist", replace(fashion, folders=tuple(here)))


def replace(source, **changes):
    return type(source)(**{**vars(source), **changes})


def refused(name, *parts, data_dir=None, **options):
    """Loading is refused in one sentence with all of these parts."""
    with pytest.raises(qg.InputError) as caught:
        datasets.load(name, data_dir, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert str(part) in sentence


# Writing small files of each format


def idx_bytes(array):
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write_fashion(folder, m=(7, 5), ending=""):
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for split, size in zip(("train", "t10k"), m, strict=True):
        x = RNG.integers(0, 256, (size, 28, 28), dtype=np.uint8)
        y = RNG.integers(0, 10, size, dtype=np.uint8)
        for kind, array in (("images-idx3", x), ("labels-idx1", y)):
            content = idx_bytes(array)
            content = gzip.compress(content, mtime=0) if ending else content
            (folder / f"{split}-{kind}-ubyte{ending}").write_bytes(content)
        written[split] = x, y
    return written


def dump(path, record, protocol=2):
    path.write_bytes(pickle.dumps(record, protocol=protocol))


NAMES = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


def batch(size, lowest, highest, key=str.encode):
    data = RNG.integers(0, 256, (size, 3072), dtype=np.uint8)
    labels = RNG.integers(lowest, highest + 1, size).tolist()
    return {key("batch_label"): key("a batch"), key("data"): data, key("labels"): labels}


def write_cifar(folder, size=4):
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]
    batches = [batch(size, 0, 9) for _ in names]
    for name, content in zip(names, batches, strict=True):
        dump(folder / name, content)
    dump(folder / "batches.meta", {b"label_names": [name.encode() for name in NAMES], b"num_vis": 3072})
    return batches


def write_imagenet32(folder, form):
    folder.mkdir(parents=True, exist_ok=True)
    names = [*(f"train_data_batch_{k}" for k in range(1, 11)), "val_data"]
    batches = [{**batch(3, 1, 1000, key=str), "mean": RNG.normal(size=3072)} for _ in names]
    for name, content in zip(names, batches, strict=True):
        if form == "npz":
            np.savez(folder / f"{name}.npz", data=content["data"], labels=content["labels"])
        else:
            dump(folder / name, content)
    return batches


def write_images(folder, classes=("ant", "bee"), each=3, size=(5, 4), mode="RGB", ending="png"):
    """Images [m, height, width, 3] and labels in the order in which they are read."""
    images, labels = [], []
    for label, name in enumerate(sorted(classes)):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
            images.append(RNG.integers(0, 256, shape, dtype=np.uint8))
            labels.append(label)
            Image.fromarray(images[-1]).save(folder / name / f"{k}.{ending}")
    return np.stack(images), labels


# Round trips


def test_digits_are_embedded_and_always_split_alike():
    data = datasets.load("digits")
    assert (len(data.train), len(data.test), data.shape) == (1437, 360, (1, 8, 8))
    assert data.train.x.dtype == torch.uint8
    assert data.train.x.max() == data.scale == 16
    assert torch.equal(datasets.load("digits").train.x, data.train.x)
    assert data.train.y[:10].tolist() == [7, 6, 1, 1, 3, 9, 5, 2, 8, 0]
    assert data.classes == tuple("0123456789")
    seen = (data.train.x / data.scale - data.mean[0]) / data.std[0]
    assert abs(float(seen.mean())) < 1e-6
    assert float(seen.std()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("folder", ["fashion-mnist", "."])
def test_fashion_mnist(tmp_path, folder, ending):
    written = write_fashion(tmp_path / folder, ending=ending)
    data = datasets.load("fashion-mnist", tmp_path)
    for split, examples in (("train", data.train), ("t10k", data.test)):
        x, y = written[split]
        np.testing.assert_array_equal(examples.x.numpy(), x[:, None])
        np.testing.assert_array_equal(examples.y.numpy(), y)
        assert examples.y.dtype == torch.int64
    assert (data.shape, data.scale, data.augmentation) == ((1, 28, 28), 255, "none")
    assert data.classes[9] == "Ankle boot"


@pytest.mark.parametrize("folder", ["cifar-10-batches-py", "."])
def test_cifar10(tmp_path, folder):
    *train, test = write_cifar(tmp_path / folder)
    data = datasets.load("cifar10", tmp_path)
    pixels = np.concatenate([b[b"data"] for b in train])
    np.testing.assert_array_equal(data.train.x.flatten(1).numpy(), pixels)
    assert data.train.x[3, 2, 1, 7] == pixels[3, 2 * 1024 + 1 * 32 + 7]
    assert data.train.y.tolist() == [y for b in train for y in b[b"labels"]]
    np.testing.assert_array_equal(data.test.x.flatten(1).numpy(), test[b"data"])
    assert (data.classes, data.shape, data.augmentation) == (tuple(NAMES), (3, 32, 32), "flip-crop")
    assert data.mean == (0.4914, 0.4822, 0.4465)
    assert data.std == (0.2023, 0.1994, 0.2010)


def python2_pickle(data, labels):
    """{'data': array, 'labels': list} as Python 2 wrote it: text is bytes, and so is the array's content."""
    shape = struct.pack("<cicic", b"J", data.shape[0], b"J", data.shape[1], b"\x86")
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ" + b"\xff" * 4 + b"J" + b"\xff" * 4
    array += b"K\x00tb\x89T" + struct.pack("<i", data.nbytes) + data.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."


@pytest.mark.parametrize("protocol", ["python 2", 2, 3, 4])
def test_pickles_of_old_and_new_pythons_are_read(tmp_path, protocol):
    data, labels = np.arange(24, dtype=np.uint8).reshape(2, 12), [3, 5]
    path = tmp_path / "batch"
    if protocol == "python 2":
        path.write_bytes(python2_pickle(data, labels))
        assert pickle.loads(path.read_bytes(), encoding="bytes")[b"labels"] == labels  # it is a true pickle
    else:
        dump(path, {"data": data, "labels": labels}, protocol)
    content = pickles.read(path)
    np.testing.assert_array_equal(content["data"], data)
    assert content["labels"] == labels


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickled_arrays_are_what_numpy_makes_of_them(tmp_path, dtype, order):
    array = np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype, order=order)
    dump(tmp_path / "batch", {"a": array})
    back = pickles.read(tmp_path / "batch")["a"]
    np.testing.assert_array_equal(back, array)
    assert back.dtype == array.dtype


@pytest.mark.parametrize("form", ["pickle", "npz"])
@pytest.mark.parametrize("folder", ["imagenet32", "."])
def test_imagenet32_counts_its_classes_from_one(tmp_path, form, folder):
    *train, test = write_imagenet32(tmp_path / folder, form)
    data = datasets.load("imagenet32", tmp_path)
    np.testing.assert_array_equal(data.train.x.flatten(1).numpy(), np.concatenate([b["data"] for b in train]))
    assert data.train.y.tolist() == [y - 1 for b in train for y in b["labels"]]
    assert data.test.y.tolist() == [y - 1 for y in test["labels"]]
    assert (len(data.classes), data.shape, data.augmentation) == (1000, (3, 32, 32), "flip-crop")


def test_imagenet_pictures_become_squares(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "imagenet" / split, ["n01", "n02"], each=1, size=(300, 280), ending="JPEG")
    red_left = np.zeros((100, 400, 3), dtype=np.uint8)
    red_left[:, :200, 0] = 255
    Image.fromarray(red_left).save(tmp_path / "imagenet" / "val" / "n02" / "a.png")
    Image.new("L", (40, 256), 77).save(tmp_path / "imagenet" / "val" / "n02" / "b.jpg")
    data = datasets.load("imagenet", tmp_path)
    assert (data.shape, data.augmentation, data.classes) == ((3, 224, 224), "resize-crop", ("n01", "n02"))
    assert data.test.y.tolist() == [0, 1, 1, 1]
    _, _, wide, gray = data.test.x
    assert wide[0, :, :126].min() == 255
    assert wide[0, :, 130:].max() == wide[1:].max() == 0
    assert (gray == 77).all()


def test_imagenet_squares_are_scaled_pictures_cut_in_the_middle():
    image = Image.fromarray(RNG.integers(0, 256, (512, 600, 3), dtype=np.uint8))
    expected = np.asarray(image.resize((300, 256), Image.Resampling.BILINEAR))[:, 22:278].transpose(2, 0, 1)
    # The outermost columns do not see their neighbours beyond the cut.
    np.testing.assert_array_equal(folders.middle(image)[:, :, 1:-1], expected[:, :, 1:-1])
    assert folders.middle(Image.new("L", (1, 60_000), 9)).tolist() == np.full((3, 256, 256), 9).tolist()


@pytest.mark.parametrize("held", ["test", "val"])
def test_class_folders_with_a_test_set(tmp_path, held):
    x, y = write_images(tmp_path / "train")
    x_test, y_test = write_images(tmp_path / held, each=2)
    (tmp_path / "train" / "ant" / "notes.txt").write_text("not an image")
    data = datasets.load(f"folder:{tmp_path}")
    np.testing.assert_array_equal(data.train.x.numpy(), x.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(data.test.x.numpy(), x_test.transpose(0, 3, 1, 2))
    assert (data.train.y.tolist(), data.test.y.tolist()) == (y, y_test)
    assert (data.shape, data.classes, data.augmentation) == ((3, 4, 5), ("ant", "bee"), "none")
    np.testing.assert_allclose(data.mean, (x / 255).mean(axis=(0, 1, 2)), rtol=1e-12)
    np.testing.assert_allclose(data.std, (x / 255).std(axis=(0, 1, 2)), rtol=1e-12)


def test_class_folders_without_a_test_set_are_split_alike_every_time(tmp_path):
    x, y = write_images(tmp_path, each=5, mode="L")
    data = datasets.load(f"folder:{tmp_path}")
    order = generator(0).permutation(10)
    np.testing.assert_array_equal(data.train.x.numpy(), x[order[:8], None])
    np.testing.assert_array_equal(data.test.x.numpy(), x[order[8:], None])
    assert data.test.y.tolist() == [y[i] for i in order[8:]]
    assert data.shape == (1, 4, 5)


def test_one_colour_image_makes_all_of_them_colour(tmp_path):
    write_images(tmp_path, each=5, mode="L")
    Image.new("RGB", (5, 4), (1, 2, 3)).save(tmp_path / "bee" / "z.png")
    assert datasets.load(f"folder:{tmp_path}").shape == (3, 4, 5)


def test_an_npz_of_images_with_its_own_test_set_and_columns(tmp_path):
    x, y = RNG.integers(0, 256, (6, 3, 4, 5), dtype=np.uint8), np.array([0, 1, 2, 0, 1, 2], dtype=np.uint8)
    writer, client = np.array(list("aabbcc")), np.arange(6)
    test = {"x_test": x[:2], "y_test": [1, 3], "client_test": [7, 8]}
    np.savez(tmp_path / "a.npz", x=x, y=y, writer=writer, client=client, **test)
    data = datasets.load(f"folder:{tmp_path}/a.npz")
    np.testing.assert_array_equal(data.train.x.numpy(), x)
    assert data.train.y.tolist() == y.tolist()
    assert {name: column.tolist() for name, column in data.train.columns.items()} == {
        "writer": list("aabbcc"), "client": list(range(6)),
    }  # fmt: skip
    assert {name: column.tolist() for name, column in data.test.columns.items()} == {"client": [7, 8]}
    assert (data.classes, data.scale, data.shape) == (tuple("0123"), 255, (3, 4, 5))


def test_an_npz_without_a_test_set_is_split_with_its_columns(tmp_path):
    m = 25
    x, client = RNG.normal(3, 2, (m, 4)), np.arange(m)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=client % 3, client=client)
    data = datasets.load("folder:a.npz")
    assert (len(data.train), len(data.test), data.scale, data.shape) == (20, 5, 1, (4,))
    assert data.train.x.dtype == torch.float32
    for examples in (data.train, data.test):
        np.testing.assert_array_equal(examples.columns["client"] % 3, examples.y.numpy())
    rows = np.concatenate([data.train.columns["client"], data.test.columns["client"]])
    assert rows.tolist() == generator(0).permutation(m).tolist()
    np.testing.assert_allclose(data.mean, data.train.x.numpy().mean(axis=0), rtol=1e-5)
    np.testing.assert_allclose(data.std, data.train.x.numpy().std(axis=0), rtol=1e-5)


def test_gray_images_of_an_npz_get_a_channel(tmp_path):
    x = np.asfortranarray(RNG.integers(0, 256, (4, 6, 7), dtype=np.uint8))
    np.savez(tmp_path / "a.npz", x=x, y=[0, 1, 0, 1])
    data = datasets.load("folder:a.npz")
    np.testing.assert_array_equal(data.train.x.numpy(), x[generator(0).permutation(4)[:3], None])
    assert data.shape == (1, 6, 7)


def test_features_of_any_byte_order_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((4, 2), dtype=">f8"), y=np.zeros(4, dtype=">i2"))
    data = datasets.load("folder:a.npz")
    assert data.train.x.tolist() == [[1, 1]] * 3
    assert data.std == (1, 1)  # constant: nothing to divide by


def test_moments_count_large_sets_in_parts():
    x = torch.from_numpy(RNG.integers(0, 256, (5000, 2, 3, 3), dtype=np.uint8))
    mean, std = moments(x, 255)
    np.testing.assert_allclose(mean, (x.numpy() / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (x.numpy() / 255).std(axis=(0, 2, 3)), rtol=1e-12)


# Where data sets are looked for


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


# The hub


class Rows(list):
    """What `datasets` gives for a split."""

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


# Pickles that are programs


class Command:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


class Innocent:
    pass


MALICIOUS = {
    "os.system": lambda mark: Command(os.system, f"touch {mark}"),
    "builtins.eval": lambda mark: Command(builtins.eval, f"open({str(mark)!r}, 'w')"),
    "builtins.getattr": lambda mark: Command(getattr, "a", "upper"),
    "pathlib": lambda mark: Command(Path.touch, mark),
    "numpy.load": lambda mark: Command(np.load, str(mark)),
    "class": lambda mark: Innocent(),
}


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("kind", MALICIOUS)
@pytest.mark.parametrize("name", ["data_batch_2", "batches.meta"])
def test_malicious_pickles_are_refused_and_do_nothing(tmp_path, kind, protocol, name):
    write_cifar(tmp_path, size=1)
    mark = tmp_path / "mark"
    path = tmp_path / name
    record = pickle.loads(path.read_bytes())
    dump(path, {**record, b"more": MALICIOUS[kind](mark)}, protocol)
    refused("cifar10", path, "only arrays are admitted", data_dir=tmp_path)
    assert not mark.exists()


@pytest.mark.parametrize(
    "program",
    [
        b"cnumpy\nndarray\n(K\x01tR.",  # calls ndarray itself
        b"cnumpy.core.multiarray\n_reconstruct\nN}U\x0c__setstate__Ns\x86b.",  # edits a stand-in
        b"cnumpy\ndtype\n}U\x01xNs\x86b.",
        b"c_codecs\nencode\n(U\x01aU\x05rot13tR.",
        b"cnumpy.core.multiarray\n_reconstruct\n)R.",
        b"P1\n.",  # a persistent id
        b"\x82\x01.",  # an extension
        b"\x80\x02}r\xff\xff\xff\x7f.",  # remembers it as number 2 billion
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # 8 exabytes follow
        b"I9" + b"9" * 5000 + b"\n.",
        b"(" * 10000 + b".",
        b"]" * 9999 + b"a" * 9998 + b".",
    ],
)
def test_odd_programs_are_refused_and_leave_the_reader_as_it_was(tmp_path, program):
    *_, test = write_cifar(tmp_path, size=1)
    good = (tmp_path / "test_batch").read_bytes()
    (tmp_path / "test_batch").write_bytes(program)
    refused("cifar10", tmp_path / "test_batch", data_dir=tmp_path)
    (tmp_path / "test_batch").write_bytes(good)
    data = datasets.load("cifar10", tmp_path)
    np.testing.assert_array_equal(data.test.x.flatten(1).numpy(), test[b"data"])


def test_nested_labels_are_not_unfolded(tmp_path):
    write_cifar(tmp_path, size=1)
    labels = [0]
    for _ in range(60):
        labels = [labels, labels]  # 2⁶⁰ numbers, if somebody counted
    dump(tmp_path / "test_batch", {"data": np.zeros((2, 3072), np.uint8), "labels": labels})
    refused("cifar10", "test_batch has no list 'labels' of whole numbers", data_dir=tmp_path)


# Damaged and wrong files


def ubytes(*shape, value=0):
    return np.full(shape, value, dtype=np.uint8)


@pytest.mark.parametrize(
    ("images", "labels", "parts"),
    [
        (b"", None, ["images-idx3", "cannot read"]),
        (b"\x00\x00\x08", None, ["images-idx3"]),
        (b"\x00\x00\x0d\x03" + bytes(12), None, ["images-idx3", "not an IDX file of bytes in 3 dimensions"]),
        (idx_bytes(ubytes(4, 28)), None, ["images-idx3", "in 3 dimensions"]),
        (idx_bytes(ubytes(4, 27, 28)), None, ["images-idx3", "27 x 28 pixels, expected 28 x 28"]),
        (idx_bytes(ubytes(4, 28, 28))[:-1], None, ["images-idx3", "3136 bytes, but holds only 3135"]),
        (idx_bytes(ubytes(4, 28, 28)) + b"x", None, ["images-idx3", "but holds more"]),
        (idx_bytes(ubytes(0, 28, 28)), idx_bytes(ubytes(0)), ["holds no examples"]),
        (idx_bytes(ubytes(4, 28, 28)), None, ["labels-idx1", "has 4 examples, but 5 labels"]),
        (None, idx_bytes(ubytes(5, value=10)), ["labels-idx1", "has the label 10; labels are 0 to 9"]),
        (None, gzip.compress(idx_bytes(ubytes(5)), mtime=0)[:-9], ["labels-idx1", "cannot read"]),
        (struct.pack(">HBBIII", 0, 8, 3, 2**32 - 1, 28, 28), None, ["needs 3.37e+03 GB of memory"]),
    ],
)
def test_wrong_idx_files_are_named(tmp_path, images, labels, parts):
    write_fashion(tmp_path)
    for kind, content in (("images-idx3", images), ("labels-idx1", labels)):
        if content is not None:
            (tmp_path / f"t10k-{kind}-ubyte").write_bytes(content)
    refused("fashion-mnist", tmp_path, *parts, data_dir=tmp_path)


GOOD = ubytes(2, 3072)


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        ([1, 2], ["it does not hold a dictionary"]),
        ({}, ["has no array 'data'"]),
        ({"data": GOOD}, ["has no list 'labels'"]),
        ({"data": GOOD[:, :3071], "labels": [0, 1]}, ["has no array 'data' of bytes in the shape [m, 3072]"]),
        ({"data": GOOD.astype(np.float32), "labels": [0, 1]}, ["has no array 'data' of bytes"]),
        ({"data": GOOD.tolist(), "labels": [0, 1]}, ["has no array 'data' of bytes"]),
        ({"data": np.array([None]), "labels": [0, 1]}, ["something else than plain numbers"]),
        ({"data": GOOD, "labels": [0]}, ["has 2 examples, but 1 labels"]),
        ({"data": GOOD, "labels": [0, -1]}, ["has the label -1; labels are 0 to 9"]),
        ({"data": GOOD, "labels": [0, 10]}, ["has the label 10; labels are 0 to 9"]),
        ({"data": GOOD, "labels": [0, 10**30]}, ["has no list 'labels' of whole numbers"]),
        ({"data": GOOD, "labels": [0, 1.5]}, ["has no list 'labels' of whole numbers"]),
        ({"data": GOOD, "labels": [0, "1"]}, ["has no list 'labels' of whole numbers"]),
        ({"data": GOOD[:0], "labels": []}, [""]),
        ({1: 2}, ["a name that is not text"]),
    ],
)
def test_wrong_batches_are_named(tmp_path, record, parts):
    write_cifar(tmp_path, size=1)
    dump(tmp_path / "data_batch_4", record)
    refused("cifar10", tmp_path / "data_batch_4", *parts, data_dir=tmp_path)


@pytest.mark.parametrize("names", [None, [], ["a"] * 9, [1] * 10, b"0123456789"])
def test_class_names_are_checked(tmp_path, names):
    write_cifar(tmp_path, size=1)
    dump(tmp_path / "batches.meta", {"label_names": names})
    refused("cifar10", tmp_path / "batches.meta", "ten names", data_dir=tmp_path)


@pytest.mark.parametrize("label", [0, 1001])
def test_imagenet32_labels_out_of_range(tmp_path, label):
    write_imagenet32(tmp_path, "npz")
    np.savez(tmp_path / "val_data.npz", data=GOOD, labels=[1, label])
    refused("imagenet32", "val_data.npz", f"has the label {label}; labels are 1 to 1000", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "write", "file"),
    [
        ("fashion-mnist", write_fashion, "t10k-labels-idx1-ubyte"),
        ("cifar10", write_cifar, "batches.meta"),
        ("imagenet32", lambda folder: write_imagenet32(folder, "npz"), "train_data_batch_7.npz"),
    ],
)
def test_a_missing_file_is_named(tmp_path, name, write, file):
    write(tmp_path)
    (tmp_path / file).unlink()
    refused(name, tmp_path / file.removesuffix(".npz"), "is missing", data_dir=tmp_path)
    (tmp_path / file).mkdir()
    refused(name, tmp_path / file.removesuffix(".npz"), "is missing", data_dir=tmp_path)


X, Y = np.zeros((4, 2)), np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({}, ["has no array x;"]),
        ({"x": X}, ["has no array y;"]),
        ({"x": X, "y": Y, "x_test": X}, ["has no array y_test;"]),
        ({"x": X, "y": Y[:3]}, ["x, y in", "has 4 examples, but 3 labels"]),
        ({"x": X, "y": Y, "x_test": X, "y_test": Y[:3]}, ["x_test, y_test in", "4 examples, but 3 labels"]),
        ({"x": X, "y": Y / 2}, ["y in", "is float64 [4]; it needs whole numbers [m]"]),
        ({"x": X, "y": Y[:, None]}, ["y in", "is int64 [4, 1]"]),
        ({"x": X, "y": Y - 1}, ["has the label -1"]),
        ({"x": X, "y": Y * 10**9}, ["has the label 1000000000"]),
        ({"x": X, "y": Y.astype(np.uint64) * np.uint64(2**63)}, ["has the label 9223372036854775808"]),
        ({"x": X[:0], "y": Y[:0]}, ["holds no examples"]),
        ({"x": X[:1], "y": Y[:1]}, ["needs 2 examples or more for a training and a test set, got 1"]),
        ({"x": X + np.nan, "y": Y}, ["x in", "not a finite number"]),
        ({"x": X + 1e300, "y": Y}, ["x in", "not a finite number"]),
        ({"x": X.astype(int), "y": Y}, ["x in", "is int64 [4, 2]; it needs uint8 images"]),
        ({"x": X.astype(np.uint8), "y": Y}, ["is uint8 [4, 2]"]),
        ({"x": X[:, 0], "y": Y}, ["is float64 [4]"]),
        ({"x": np.array(list("abcd")), "y": Y}, ["is <U1 [4]"]),
        ({"x": ubytes(4, 32, 32, 3), "y": Y}, ["put channels first, x.transpose(0, 3, 1, 2)"]),
        ({"x": X, "y": Y, "client": Y[:3]}, ["column client in", "is [3]", "each of the 4 examples"]),
        ({"x": X, "y": Y, "client": np.array(1)}, ["column client in", "is []"]),
        ({"x": X, "y": np.array([0, None, 0, 1])}, ["cannot read", "a.npz", "allow_pickle=False"]),
        ({"x": X, "y": Y, "x_test": X[:, :1], "y_test": Y}, ["torch.float32 [2], but a test example"]),
    ],
)
def test_wrong_npz_files_are_named(tmp_path, arrays, parts):
    np.savez(tmp_path / "a.npz", **arrays)
    refused("folder:a.npz", "a.npz", *parts)


def test_files_that_are_no_archives_are_named(tmp_path):
    for content in (b"", b"x, y\n", pickle.dumps({"x": 1}), b"PK\x03\x04" + bytes(100)):
        (tmp_path / "a.npz").write_bytes(content)
        refused("folder:a.npz", "cannot read a.npz as an .npz archive")
    np.save(tmp_path / "b.npy", X)
    refused("folder:b.npy", "cannot read b.npy as an .npz archive")
    with zipfile.ZipFile("c.npz", "w") as archive:
        archive.writestr("x", b"no array")
        archive.writestr("y", b"no array")
    refused("folder:c.npz", "x in c.npz is")


def test_wrong_class_folders_are_named(tmp_path):
    refused("folder:nowhere", "nowhere is neither an .npz file nor a folder of class folders")
    refused("folder:", "")
    refused("folder:a\0b", "")
    refused("folder:" + "a" * 5000, "neither")
    (tmp_path / "empty").mkdir()
    refused("folder:empty", "empty has no folders")
    (tmp_path / "empty" / "ant").mkdir()
    refused("folder:empty", "empty holds no images in its class folders")
    write_images(tmp_path / "a" / "train")
    refused("folder:a", "a has train alone")
    write_images(tmp_path / "a" / "test", classes=("ant", "cow"))
    refused("folder:a", "a/test has the class 'cow', which a/train has not")
    write_images(tmp_path / "one", classes=("ant",), each=1)
    refused("folder:one", "one needs 2 examples or more")


def test_images_of_two_sizes_are_refused(tmp_path):
    write_images(tmp_path / "a" / "train")
    write_images(tmp_path / "a" / "test", size=(6, 4))
    refused("folder:a", "all images need one size", "has 5 x 4 pixels", "a/test/ant/0.png has 6 x 4")


def test_images_that_are_none_are_named(tmp_path):
    write_images(tmp_path / "a", each=4)
    bad = tmp_path / "a" / "bee" / "1.png"
    for content in (b"", b"not an image", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 4\n"):
        bad.write_bytes(content)
        refused("folder:a", "cannot read a/bee/1.png as an image")
    Image.fromarray(np.zeros((4, 5), dtype=np.uint16)).save(bad)
    refused("folder:a", "a/bee/1.png has more than 8 bits a pixel")


def test_more_than_fits_into_memory_is_refused(tmp_path):
    for split in ("train", "val"):
        write_images(tmp_path / "imagenet" / split, each=2)
    above = "needs 0.00157 GB of memory, above the limit of 0.001 GB"
    refused("imagenet", above, data_dir=tmp_path, memory_limit=1e6)
    datasets.load("imagenet", tmp_path, memory_limit=8 * 3 * 256 * 256)
    refused("folder:imagenet", "above the limit", memory_limit=100)
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    refused("folder:a.npz", "above the limit", memory_limit=100)
    write_cifar(tmp_path)
    refused("cifar10", "above the limit", data_dir=tmp_path, memory_limit=100)


# Any damage at all


def npz_bytes(compress):
    file = io.BytesIO()
    save = np.savez_compressed if compress else np.savez
    save(file, x=RNG.normal(size=(6, 3)), y=np.arange(6) % 2, client=np.arange(6))
    return file.getvalue()


def image_bytes(form):
    file = io.BytesIO()
    Image.fromarray(RNG.integers(0, 256, (4, 5, 3), dtype=np.uint8)).save(file, form)
    return file.getvalue()


def whole_folders(root):
    """For each format: what to load, and one of its files."""
    write_fashion(root / "plain")
    write_fashion(root / "gz", ending=".gz")
    write_cifar(root / "cifar", size=2)
    write_imagenet32(root / "in32", "pickle")
    (root / "in32" / "val_data").write_bytes(python2_pickle(ubytes(2, 3072, value=9), [1, 2]))
    write_imagenet32(root / "in32z", "npz")
    write_images(root / "png")
    for form in PICTURES:
        write_images(root / form)
        (root / form / "bee" / f"9.{form}").write_bytes(image_bytes(form))
    for name in ("stored", "packed"):
        (root / f"{name}.npz").write_bytes(npz_bytes(name == "packed"))
    return {
        "idx images": ("fashion-mnist", root / "plain", "train-images-idx3-ubyte"),
        "idx labels": ("fashion-mnist", root / "plain", "train-labels-idx1-ubyte"),
        "idx gz": ("fashion-mnist", root / "gz", "train-labels-idx1-ubyte.gz"),
        "cifar": ("cifar10", root / "cifar", "data_batch_1"),
        "cifar meta": ("cifar10", root / "cifar", "batches.meta"),
        "imagenet32 python 2": ("imagenet32", root / "in32", "val_data"),
        "imagenet32": ("imagenet32", root / "in32", "train_data_batch_2"),
        "imagenet32 npz": ("imagenet32", root / "in32z", "val_data.npz"),
        "png": (f"folder:{root}/png", root / "png", "ant/0.png"),
        **{form: (f"folder:{root}/{form}", root / form, f"bee/9.{form}") for form in PICTURES},
        "npz": (f"folder:{root}/stored.npz", root, "stored.npz"),
        "npz packed": (f"folder:{root}/packed.npz", root, "packed.npz"),
    }


PICTURES = ["jpeg", "gif", "webp", "bmp", "ppm"]
FORMATS = [
    "idx images", "idx labels", "idx gz", "cifar", "cifar meta", "imagenet32 python 2", "imagenet32",
    "imagenet32 npz", "png", *PICTURES, "npz", "npz packed",
]  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return whole_folders(tmp_path_factory.mktemp("whole"))


def outcome(name, folder, file, content):
    """Load with that content of the file: the data set, or None where it was refused in one sentence."""
    path = folder / file
    good = path.read_bytes()
    path.write_bytes(content)
    try:
        return datasets.load(name, folder)
    except qg.InputError as error:
        sentence = str(error)
    finally:
        path.write_bytes(good)
    assert "\n" not in sentence
    assert path.stem in sentence
    return None


@pytest.mark.parametrize("form", FORMATS)
def test_a_truncated_file_is_refused_wherever_it_ends(whole, form):
    name, folder, file = whole[form]
    good = (folder / file).read_bytes()
    assert outcome(name, folder, file, good) is not None
    ends = {*range(0, min(len(good), 24)), *RNG.integers(0, len(good), 16).tolist(), len(good) - 1}
    # Pillow does without the last bytes of some formats, and gives the whole picture.
    tolerant = form in ("jpeg", "gif", "png", "webp", "bmp")
    for end in ends:
        assert outcome(name, folder, file, good[:end]) is None or (tolerant and end > len(good) // 2)


@settings(max_examples=500, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(FORMATS),
    edits=st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=4),
    near_start=st.booleans(),
)
def test_flipped_bytes_never_get_past_the_reader(whole, form, edits, near_start):
    name, folder, file = whole[form]
    content = bytearray((folder / file).read_bytes())
    for place, value in edits:
        content[int(place * (min(len(content), 200) if near_start else len(content)))] = value
    data = outcome(name, folder, file, bytes(content))
    if data is not None:
        for split in (data.train, data.test):
            assert len(split.x) == len(split.y) > 0
            assert 0 <= int(split.y.min()) <= int(split.y.max()) < len(data.classes)


# The real ones, where $QG_DATA has them

DATA = os.environ.get("QG_DATA", "")


def real(name):
    there = {line.name: line.where and not line.missing for line in datasets.available(DATA)} if DATA else {}
    return pytest.mark.skipif(not there.get(name), reason=f"$QG_DATA has no {name}")


@real("cifar10")
def test_real_cifar10(monkeypatch):
    monkeypatch.undo()
    data = datasets.load("cifar10", DATA)
    assert (len(data.train), len(data.test), data.classes) == (50_000, 10_000, tuple(NAMES))
    assert torch.bincount(data.train.y).tolist() == [5000] * 10
    mean, std = moments(data.train.x, 255)
    np.testing.assert_allclose(mean, data.mean, atol=5e-5)
    np.testing.assert_allclose(std, (0.2470, 0.2435, 0.2616), atol=5e-5)
    own = (data.train.x / 255).flatten(2).std(dim=2).mean(dim=0)
    np.testing.assert_allclose(own, data.std, atol=5e-5)


@real("fashion-mnist")
def test_real_fashion_mnist(monkeypatch):
    monkeypatch.undo()
    data = datasets.load("fashion-mnist", DATA)
    assert (len(data.train), len(data.test)) == (60_000, 10_000)
    assert torch.bincount(data.train.y).tolist() == [6000] * 10
    np.testing.assert_allclose(moments(data.train.x, 255), (data.mean, data.std), atol=5e-5)


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
    with pytest.raises(qg.InputError, match="has the class 'cat', but dog, owl are agreed"):
        datasets.agreed(own, ("dog", "owl"), (), (), ())
