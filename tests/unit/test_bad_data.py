"""Any bad file raises a one-sentence error that names the file."""

import builtins
import gzip
import io
import os
import pickle
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from data_files import (
    RNG,
    dump,
    idx_bytes,
    python2_pickle,
    refused,
    write_cifar,
    write_fashion,
    write_imagenet32,
    write_images,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import quasiglobal as qg
from quasiglobal.data import sources as datasets

pytestmark = pytest.mark.usefixtures("no_data_here")


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
        b"\x82\x01.",  # an extension code
        b"\x80\x02}r\xff\xff\xff\x7f.",  # memo entry 2 billion
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.",  # claims 8 exabytes
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
        labels = [labels, labels]  # 2⁶⁰ numbers if expanded
    dump(tmp_path / "test_batch", {"data": np.zeros((2, 3072), np.uint8), "labels": labels})
    refused("cifar10", "test_batch has no list 'labels' of whole numbers", data_dir=tmp_path)


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
        ({"data": np.array([None]), "labels": [0, 1]}, ["an array that does not hold plain numbers"]),
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
    refused("folder:a", "a/test has the class 'cow', which is not in a/train")
    write_images(tmp_path / "one", classes=("ant",), each=1)
    refused("folder:one", "one needs 2 examples or more")
    write_images(tmp_path / "b")
    (tmp_path / "b" / "zebra").mkdir()
    with pytest.warns(UserWarning, match="zebra holds no images, but counts as a class"):
        datasets.load("folder:b")


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
    refused("folder:a", "a/bee/1.png has more than 8 bits per pixel")


def test_image_files_that_do_not_fit_into_memory_stay_on_disk(tmp_path, monkeypatch):
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    for split in ("train", "val"):
        write_images(tmp_path / "imagenet" / split, each=2)
    size = 8 * 3 * 256 * 256
    kept, streamed = (datasets.load("imagenet", tmp_path, memory_limit=limit) for limit in (size, size - 1))
    assert kept.train.shards is None
    assert streamed.train.shards is not None
    assert streamed.train.x.equal(kept.train.x)
    assert streamed.shape == kept.shape == (3, 224, 224)


def test_more_than_fits_into_memory_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=X, y=Y)
    refused("folder:a.npz", "above the limit", memory_limit=100)
    write_cifar(tmp_path)
    refused("cifar10", "above the limit", data_dir=tmp_path, memory_limit=100)


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
    """Write a data set in each format; return its name, its folder and one of its files."""
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
    """Load the data set with this file content; return None on a one-sentence `InputError`."""
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
    # Pillow tolerates missing last bytes in some formats and returns the whole image.
    tolerant = form in ("jpeg", "gif", "png", "webp", "bmp")
    for end in ends:
        assert outcome(name, folder, file, good[:end]) is None or (tolerant and end > len(good) // 2)


@settings(max_examples=200, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
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
