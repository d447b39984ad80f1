"""Predictions of an exported model for data that need no labels."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from quasiglobal.data.readers import csv_files, folders
from quasiglobal.data.sources import MEMORY_LIMIT, SOURCES, TEXT_SOURCES, DataName, Dataset, Examples, reader_of
from quasiglobal.data.texts import Rows, to_test
from quasiglobal.errors import InputError
from quasiglobal.runs.building import as_tokens, data_of
from quasiglobal.runs.export import Exported

AT_ONCE = 256
"""Number of image files to read at a time."""

FAR = 100
"""Maximum distance of an input from the mean of the training data, in standard deviations."""


@dataclass(frozen=True)
class Predictions:
    """The outputs of a model, one row per example."""

    kind: str
    """The kind of an example's name: file, or row (from 1)."""
    names: list[str]
    outputs: Tensor
    """Float64 [m, outputs]: the probability of each class, or the numbers of a regression."""
    columns: tuple[str, ...]
    """Names of the outputs: the classes, or the target."""
    classifies: bool
    """Whether each example belongs to one of the classes."""

    def objects(self) -> list[dict[str, object]]:
        """One object per example: its name, and its class and the probability of each class, or its outputs."""
        return [
            {self.kind: name, **({"class": of, "probabilities": values} if self.classifies else {"outputs": values})}
            for name, of, values in self._examples()
        ]

    def rows(self) -> list[dict[str, object]]:
        """The same as rows of a CSV file; the columns of probabilities are called p(CLASS)."""
        if not self.classifies:
            return [{self.kind: name, **values} for name, _, values in self._examples()]
        return [
            {self.kind: name, "class": of, **{f"p({column})": share for column, share in values.items()}}
            for name, of, values in self._examples()
        ]

    def _examples(self) -> Iterator[tuple[str | int, str, dict[str, float]]]:
        """The name of each example, the column of its largest output, and its outputs."""
        for name, values in zip(self.names, self.outputs.tolist(), strict=True):
            by_name = {column: float(f"{value:.7g}") for column, value in zip(self.columns, values, strict=True)}
            yield name if self.kind == "file" else int(name), self.columns[values.index(max(values))], by_name


def predict(model: Exported, given: Sequence[str], data_dir: Path | None = None, resize: bool = False) -> Predictions:
    """Predict for image files and folders of images; or for one archive, table, file of texts or data set."""
    names: list[str] = []
    found: list[Tensor] = []
    module = None
    kind = "file" if all(map(_holds_images, given)) else "row"
    for chosen, data in _read(model, given, data_dir, resize, kind):
        names += chosen or [str(len(names) + k + 1) for k in range(len(data.test))]
        module = module or model.module(data.pad)
        found.append(model.outputs(data, module))
    outputs = torch.cat(found).double()
    if not outputs.isfinite().all():
        raise InputError("the model's outputs are not finite; it has diverged, or the data are unlike its own")
    classes, loss = model.experiment.classes, model.experiment.loss
    if classes:
        return Predictions(kind, names, outputs.softmax(dim=1), tuple(classes), True)
    columns = tuple(f"output {k}" for k in range(outputs.shape[1]))
    if outputs.shape[1] == 1:
        columns = (model.experiment.label or "output",)
    return Predictions(kind, names, outputs.sigmoid() if loss == "bce" else outputs, columns, False)


def _read(
    model: Exported, given: Sequence[str], data_dir: Path | None, resize: bool, kind: str
) -> Iterator[tuple[list[str], Dataset]]:
    """The data in pieces, as test examples, with the names of files."""
    if kind == "file":
        files = [file for path in given for file in folders.image_files(Path(path))]
        for first in range(0, len(files), AT_ONCE):
            some = files[first : first + AT_ONCE]
            yield list(map(str, some)), _images(model, some, resize)
        return
    if len(given) != 1:
        other = next(path for path in given if not _holds_images(path))
        raise InputError(f"{other} is no image; give such data alone, one at a time")
    (data,) = given
    path = data.removeprefix("csv:")
    reader = reader_of(path)
    if data == "-" or path.endswith(".txt") or (reader is not None and (reader.texts or reader.columns)):
        yield [], (_texts if model.experiment.reads_texts else _table)(model, path)
    elif reader is not None and reader.inputs is not None:
        if model.experiment.reads_texts:
            raise InputError(f"{data} has no texts, which {model.experiment.model} reads; give a .txt or .csv file")
        x = reader.inputs(Path(path), MEMORY_LIMIT)
        _check_range(model, x, data)
        yield [], _to_test(model, x, data, model.scale if x.dtype == torch.uint8 else 1.0)
    elif DataName.parse(data).kind == "named" and data not in SOURCES | TEXT_SOURCES:
        if os.path.exists(data):
            raise InputError(f"{data} is none of: images, a folder of images, .npz, .csv, .txt")
        raise InputError(f"there is no file, folder or data set {data!r}")
    else:
        yield [], data_of(model.experiment, data_dir, data, testing=True)


def _holds_images(path: str) -> bool:
    return os.path.isdir(path) or Path(path).suffix.lower() in folders.SUFFIXES


def _images(model: Exported, files: Sequence[Path], resize: bool) -> Dataset:
    shape = model.experiment.shape
    if len(shape) != 3:
        raise InputError(f"{files[0]} is an image, but the model takes inputs of shape {list(shape)}")
    x = folders.images(files, (3, folders.SIDE, folders.SIDE) if model.crops else shape, resize or model.crops)
    if not model.experiment.mean:                           # own data: images become floats, as in a Dataset
        x = x.float() / 255
    return _to_test(model, x, str(files[0].parent), 255.0)


def _table(model: Exported, path: str) -> Dataset:
    reader = reader_of(path)
    if len(model.experiment.shape) != 1 or reader is None or reader.columns is None:
        kind = "has texts" if reader is None or reader.columns is None else "is a table"
        raise InputError(f"{path} {kind}, but the model takes inputs of shape {list(model.experiment.shape)}")
    (width,) = model.experiment.shape
    x = reader.columns(Path(path), model.features, model.experiment.label, width, MEMORY_LIMIT)
    return _to_test(model, x, path, 1.0)


def _texts(model: Exported, path: str) -> Dataset:
    reader = reader_of(path)
    if reader is None or reader.texts is None:
        texts = csv_files.read_texts(path)
    else:
        texts = reader.texts(Path(path), MEMORY_LIMIT)
    rows = Rows(texts, torch.zeros(len(texts), dtype=torch.int64))
    return as_tokens(model.experiment, to_test(path, rows, model.experiment.classes), cache=None)


def _check_range(model: Exported, x: Tensor, data: str) -> None:
    """Raise InputError for floats far outside of the training data, such as pixels up to 255."""
    one = model.experiment
    if not x.is_floating_point() or not one.mean or x.ndim < 2 or len(one.mean) != x.shape[1]:
        return
    channels = (1, -1) + (1,) * (x.ndim - 2)
    mean, std = (torch.tensor(values).view(channels) for values in (one.mean, one.std))
    furthest = float(((x - mean) / std).abs().max()) if x.numel() else 0.0
    if furthest > FAR:
        raise InputError(
            f"{data} has values {furthest:.0f} standard deviations away from the training data; scale it as these were "
            "(pixels: divide by 255, or store uint8)"
        )


def _to_test(model: Exported, x: Tensor, name: str, scale: float) -> Dataset:
    """A data set of test examples with the model's normalisation."""
    one = model.experiment
    crops = "resize-crop" if model.crops and x.ndim == 4 and tuple(x.shape[1:]) != one.shape else "none"
    none = torch.zeros(len(x), dtype=torch.int64)
    data = Dataset(name, Examples(x[:0], none[:0]), Examples(x, none), one.classes, scale, one.mean, one.std, crops)
    if not len(x):
        raise InputError(f"{name} holds no examples")
    if one.shape and data.shape != one.shape:
        raise InputError(f"{name} has examples of shape {list(data.shape)}, but the model takes {list(one.shape)}")
    return data
