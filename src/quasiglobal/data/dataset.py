"""Data sets: examples in memory or on disk, their normalisation, and held-out parts of them."""

from __future__ import annotations

import hmac
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.randomness import generator
from quasiglobal.common.trees import Tree
from quasiglobal.errors import InputError

if TYPE_CHECKING:
    from quasiglobal.data.fresh import Fresh
    from quasiglobal.data.shards import Shards

Indices = NDArray[np.int64]

PIECE = 2**26
"""Bytes of examples that are copied at once for a fingerprint, if they are not contiguous."""


@dataclass(frozen=True, eq=False)
class Examples:
    """One split: m examples and their targets."""

    x: Tree
    """Images, uint8 [m, channels, height, width]; texts, ids int32 [m, length]; features, float32 [m, …]; or, for a
    user's own data, any tensor, tuple or dict of tensors with m rows."""
    y: Tree
    """Class numbers 0, 1, …, int64 [m]; or, for a user's own data, any tensor, tuple or dict of tensors with m rows."""
    columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    """Additional columns of a user's file, each of length m."""
    features: tuple[str, ...] = ()
    """Names of the columns of x, if it is a table of numbers."""
    shards: Shards | None = None
    """The file of x, if it is too large for the memory: batches are read from it."""

    def __len__(self) -> int:
        return len(tree_leaves(self.y)[0])

    @property
    def labels(self) -> Tensor | None:
        """The class numbers [m]; None if the targets are something else."""
        whole = isinstance(self.y, Tensor) and self.y.ndim == 1 and not self.y.is_floating_point()
        return self.y if whole and (len(self.y) == 0 or int(self.y.min()) >= 0) else None

    def at(self, rows: Indices) -> Examples:
        """The examples in these rows."""
        at = torch.from_numpy(rows)
        x, y = (tree_map(lambda values: values[at], values) for values in (self.x, self.y))
        return Examples(x, y, {name: column[rows] for name, column in self.columns.items()}, self.features)


class Splits(NamedTuple):
    """The result of a reader: training examples, test examples and class names."""

    train: Examples
    test: Examples
    classes: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Training and test examples, with their normalisation and augmentation.

    The model input is (x / scale − mean) / std, with mean and std per channel; it is x itself if mean is empty.
    """

    name: str
    train: Examples
    test: Examples
    classes: tuple[str, ...]
    """Class names; empty if the targets are not class numbers."""
    scale: float = 1.0
    """The pixel value that means 1: 255, or 16 for the digits; 1 for features."""
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    augmentation: str = "none"
    """Augmentation of training images: none, flip-crop (pad 4, crop) or resize-crop (ImageNet)."""
    pad: int | None = None
    """Padding id of texts: the attention mask is x != pad. None: the data are not texts."""
    own: bool = False
    """Whether a user gave the data in Python: their content identifies them, not their name."""
    parts: tuple[Indices, ...] | None = None
    """The training examples of each node, if the data came as one data set per node."""
    test_parts: tuple[Indices, ...] | None = None
    """The test examples of each node, likewise."""
    fresh: Fresh | None = None
    """Reads the training examples anew each epoch; `train.x` then holds the first two inputs only."""

    def __post_init__(self) -> None:
        train, test = ((split.x, split.y) if self.own else split.x for split in (self.train, self.test))
        if kind_of(train) != kind_of(test):
            raise InputError(
                f"{self.name}: a training example is {described(train)}, but a test example is {described(test)}; "
                "give both in one form"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one example as model input, (channels, height, width) for images; () for several inputs."""
        if not isinstance(self.train.x, Tensor):
            return ()
        stored = tuple(self.train.x.shape[1:])
        return (stored[0], *map(side_shown, stored[1:])) if self.augmentation == "resize-crop" else stored

    @property
    def numbers(self) -> bool:
        """Whether a target is one number that is not a class, as in a regression."""
        return not self.classes and isinstance(self.train.y, Tensor) and self.train.y.ndim == 1

    def terms(self) -> dict[str, list[object]]:
        """Class names, shape and normalisation: the properties on which all owners of data must agree.

        An exported model needs them to preprocess other data in the same way.
        """
        return {name: list(getattr(self, name)) for name in ("classes", "shape", "mean", "std")}


def agreed(
    data: Dataset, classes: Sequence[str], shape: Sequence[int], mean: Sequence[float], std: Sequence[float]
) -> Dataset:
    """Convert the data to the classes, shape and normalisation that all owners agreed on; ignore empty arguments.

    An owner may lack some classes; its labels become indices into the shared list. If its class names are
    numbers, as in an .npz archive, they are these indices already.
    """
    if shape and tuple(shape) != data.shape:
        raise InputError(f"{data.name} has examples of shape {list(data.shape)}, but the agreed shape is {list(shape)}")
    for name, values in (("mean", mean), ("std", std)):
        if values and data.pad is not None:
            raise InputError(f"{data.name} is text, which has no {name}; leave it out")
        if values and len(values) != data.shape[0]:
            raise InputError(f"{data.name} has {data.shape[0]} channels, but {name} has {len(values)} numbers")
    if not all(value > 0 for value in std):
        raise InputError(f"std must be > 0, got {list(std)}")
    train, test = data.train, data.test
    if classes:
        numbered = data.classes == tuple(map(str, range(len(data.classes))))
        known = [str(place) for place in range(len(classes))] if numbered else list(classes)
        for name in data.classes:
            if name not in known:
                raise InputError(f"{data.name} has the class {name!r}, but the agreed classes are {', '.join(classes)}")
        places = torch.tensor([known.index(name) for name in data.classes])
        train, test = (replace(split, y=places[split.y]) for split in (train, test))
    return replace(
        data, train=train, test=test, classes=tuple(classes) or data.classes,
        mean=tuple(mean) or data.mean, std=tuple(std) or data.std,
    )


def keyed_fingerprint(data: Dataset, key: bytes) -> str:
    """HMAC-SHA256 of the examples, targets and class names, in their order; without the key it reveals nothing.

    It covers every byte that the training reads, before augmentation. Of data in shards it covers the checksums
    (CRC-32) of the examples, which are verified when an example is first read: they need not be read here.
    """
    made = hmac.new(key, repr(data.classes).encode(), "sha256")
    for split in (data.train, data.test):
        made.update(f"{described((split.x, split.y))} {len(split)}\n".encode())
        leaves = tree_leaves((split.x, split.y))
        if split.shards is not None:
            made.update(split.shards.checksums.tobytes())
            leaves = [] if split.shards.has_targets else tree_leaves(split.y)
        for values in leaves:
            for piece in torch.split(values, max(1, PIECE // max(1, values[:1].nbytes))):
                made.update(piece.contiguous().view(-1).view(torch.uint8).numpy().data)
    return made.hexdigest()


def described(x: Tree) -> str:
    """Dtype and shape of one example.

    >>> described({"a": torch.zeros(7, 2), "b": torch.zeros(7, dtype=torch.int64)})
    "{'a': 'torch.float32 [2]', 'b': 'torch.int64 []'}"
    """
    return str(tree_map(lambda values: f"{values.dtype} {list(values.shape[1:])}", x))


def kind_of(x: Tree) -> str:
    """Kind of numbers and shape of one example; float32 and float64 are one kind, since training converts them."""
    return str(tree_map(
        lambda values: f"{'float' if values.is_floating_point() else values.dtype} {list(values.shape[1:])}", x
    ))


def side_shown(side: int) -> int:
    """Side of the model input for a stored side under resize-crop: 224 for 256 pixels."""
    return side * 7 // 8


def held_out(m: int, where: object, share: float = 0.2) -> tuple[Indices, Indices]:
    """Fixed random split of m examples into training examples and a `share` of test examples, rounded up."""
    kept = math.floor(m * (1 - share) + 1e-9)
    if not 0 < kept < m:
        fewest = math.ceil(1 / (1 - share))
        raise InputError(f"{where} needs {fewest} examples or more for a training and a test set, got {m}")
    order = generator(0).permutation(m)
    return order[:kept], order[kept:]


def validating(data: Dataset, share: float) -> Dataset:
    """The data with a fixed random share of the training examples as test examples, in place of the test set."""
    if data.train.shards or data.fresh or data.parts:
        raise InputError("validation needs one training set in memory; leave it out with streamed data or data by node")
    rest, held = held_out(len(data.train), data.name, share)
    return replace(data, train=data.train.at(rest), test=data.train.at(held), test_parts=None)


def moments(x: Tensor, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / scale, per channel. A constant channel gets std 1.

    >>> moments(torch.tensor([[[[0, 255]]], [[[255, 0]]]], dtype=torch.uint8), 255)
    ((0.5,), (0.5,))
    """
    mean, variance = spread(x, scale)
    return mean, deviations(variance)


def spread(x: Tensor, scale: float) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and variance of x / scale, per channel."""
    if x.dtype == torch.uint8:  # from a histogram of 256 values: exact, and without a floating-point copy
        counts = torch.zeros(x.shape[1], 256, dtype=torch.float64)
        for images in torch.split(x, 4096):
            for channel, total in zip(images.unbind(dim=1), counts, strict=True):
                total += torch.bincount(channel.flatten(), minlength=256)
        values = torch.arange(256, dtype=torch.float64) / scale
        share = counts / counts.sum(dim=1, keepdim=True)
        mean = (share * values).sum(dim=1)
        variance = (share * (values - mean[:, None]) ** 2).sum(dim=1)
    else:
        numbers = x.double().transpose(0, 1).flatten(1) / scale
        mean, variance = numbers.mean(dim=1), numbers.var(dim=1, correction=0)
    return tuple(mean.tolist()), tuple(variance.tolist())


def pooled(
    parts: Sequence[tuple[int, Sequence[float], Sequence[float]]]
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and variance of all examples, from the number of examples, mean and variance of each part.

    n v = Σ n_k (v_k + (m_k − m)²): sums of squares would lose digits if the mean is large.

    >>> pooled([(1, [0.0], [0.0]), (3, [4.0], [0.0])])
    ((3.0,), (3.0,))
    """
    examples = torch.tensor([m for m, _, _ in parts], dtype=torch.float64)
    means, variances = (torch.tensor([part[at] for part in parts], dtype=torch.float64) for at in (1, 2))
    share = examples / examples.sum()
    mean = share @ means
    return tuple(mean.tolist()), tuple((share @ (variances + (means - mean) ** 2)).tolist())


def deviations(variance: Sequence[float]) -> tuple[float, ...]:
    """The standard deviations to divide by: 1 for a constant channel."""
    return tuple(math.sqrt(one) if one > 0 else 1.0 for one in variance)
