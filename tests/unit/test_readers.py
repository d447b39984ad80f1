"""Every format is read back exactly."""

import os
import pickle

import numpy as np
import pytest
import torch
from data_files import NAMES, RNG, dump, python2_pickle, write_cifar, write_fashion, write_imagenet32, write_images
from PIL import Image

from quasiglobal.common.randomness import generator
from quasiglobal.data import sources as datasets
from quasiglobal.data.dataset import moments
from quasiglobal.data.readers import folders
from quasiglobal.data.readers import published as cifar

pytestmark = pytest.mark.usefixtures("no_data_here")


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


@pytest.mark.parametrize("protocol", ["python 2", 2, 3, 4])
def test_pickles_of_old_and_new_pythons_are_read(tmp_path, protocol):
    data, labels = np.arange(24, dtype=np.uint8).reshape(2, 12), [3, 5]
    path = tmp_path / "batch"
    if protocol == "python 2":
        path.write_bytes(python2_pickle(data, labels))
        assert pickle.loads(path.read_bytes(), encoding="bytes")[b"labels"] == labels  # a valid pickle
    else:
        dump(path, {"data": data, "labels": labels}, protocol)
    content = cifar.read_pickle(path)
    np.testing.assert_array_equal(content["data"], data)
    assert content["labels"] == labels


@pytest.mark.parametrize("dtype", ["u1", "<i4", ">i8", "<f8", ">f4"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_pickled_arrays_are_what_numpy_makes_of_them(tmp_path, dtype, order):
    array = np.array([[1, 2, 3], [4, 5, 6]], dtype=dtype, order=order)
    dump(tmp_path / "batch", {"a": array})
    back = cifar.read_pickle(tmp_path / "batch")["a"]
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
    # The outermost columns differ: they are resampled without their neighbours beyond the crop.
    np.testing.assert_array_equal(folders.middle(image)[:, :, 1:-1], expected[:, :, 1:-1])
    assert folders.middle(Image.new("L", (1, 60_000), 9)).tolist() == np.full((3, 256, 256), 9).tolist()
    assert folders.middle(Image.new("L", (181, 169), 9), (1, 37, 6)).tolist() == np.full((1, 37, 6), 9).tolist()


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
    assert data.std == (1, 1)  # a constant feature is not scaled


def test_moments_count_large_sets_in_parts():
    x = torch.from_numpy(RNG.integers(0, 256, (5000, 2, 3, 3), dtype=np.uint8))
    mean, std = moments(x, 255)
    np.testing.assert_allclose(mean, (x.numpy() / 255).mean(axis=(0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std, (x.numpy() / 255).std(axis=(0, 2, 3)), rtol=1e-12)


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
