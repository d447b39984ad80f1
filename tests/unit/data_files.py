"""Small data files in each format, and helpers for the tests that read them."""

import gzip
import os
import pickle
import struct
import sys

import numpy as np
import pytest
from PIL import Image

import quasiglobal as qg
from quasiglobal.data import sources as datasets

RNG = np.random.default_rng(0)


def hide_data(monkeypatch, folder):
    """Hide local data sets and the hub; make `folder` the working directory."""
    monkeypatch.delenv("QG_DATA", raising=False)
    monkeypatch.chdir(folder)
    monkeypatch.setitem(sys.modules, "datasets", None)
    fashion = datasets.SOURCES["fashion-mnist"]
    here = [place for place in fashion.folders if not os.path.isabs(place)]
    monkeypatch.setitem(datasets.SOURCES, "fashion-mnist", replace(fashion, folders=tuple(here)))


def replace(source, **changes):
    return type(source)(**{**vars(source), **changes})


def refused(name, *parts, data_dir=None, **options):
    """Check that loading raises a one-line `InputError` that contains all parts."""
    with pytest.raises(qg.InputError) as caught:
        datasets.load(name, data_dir, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert str(part) in sentence


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
    """Write class folders; return the images [m, height, width, 3] and labels in reading order."""
    images, labels = [], []
    for label, name in enumerate(sorted(classes)):
        (folder / name).mkdir(parents=True)
        for k in range(each):
            shape = (size[1], size[0], 3) if mode == "RGB" else (size[1], size[0])
            images.append(RNG.integers(0, 256, shape, dtype=np.uint8))
            labels.append(label)
            Image.fromarray(images[-1]).save(folder / name / f"{k}.{ending}")
    return np.stack(images), labels


def python2_pickle(data, labels):
    """{'data': array, 'labels': list} as pickled by Python 2: text and array content are bytes."""
    shape = struct.pack("<cicic", b"J", data.shape[0], b"J", data.shape[1], b"\x86")
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R(K\x01" + shape
    array += b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNNJ" + b"\xff" * 4 + b"J" + b"\xff" * 4
    array += b"K\x00tb\x89T" + struct.pack("<i", data.nbytes) + data.tobytes() + b"tb"
    numbers = b"](" + b"".join(b"K" + bytes([y]) for y in labels) + b"e"
    return b"\x80\x02}(U\x04data" + array + b"U\x06labels" + numbers + b"u."
