"""Data that a user gives in Python: torch Datasets, arrays, Hugging Face data sets, or a list with one per node."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.memory import USABLE, free_bytes
from quasiglobal.common.randomness import restored_generators
from quasiglobal.common.trees import Tree
from quasiglobal.data.dataset import Dataset, Examples, Indices, described, held_out, kind_of, moments
from quasiglobal.data.fresh import Example, Fresh
from quasiglobal.data.shards import store
from quasiglobal.errors import InputError


class Indexed(Protocol):
    """A map-style data set: a torch Dataset with a length, a list of examples, a Hugging Face data set."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


ArrayTree: TypeAlias = "ArrayLike | tuple[ArrayTree, ...] | Mapping[str, ArrayTree]"
"""A tensor or array with one example per row, or a tuple or dict of them."""

Source: TypeAlias = "Indexed | tuple[ArrayTree, ArrayTree]"
"""Examples that a user gives: a data set of pairs (input, target), or a pair (inputs, targets) of arrays."""

Given: TypeAlias = "Dataset | Source | list[Dataset | Source]"
"""The training or test data of a task: one of the library's data sets, a source, or a list with one per node."""

Columns: TypeAlias = "tuple[str | Sequence[str], str | Sequence[str]] | None"
"""Names of the input and the target in examples that are dicts; the input may be several names."""

NEEDED = (
    "a torch Dataset of (input, target), a pair (x, y) of tensors or arrays, a data set of qg.data.load, or a list "
    "with one of these for each node"
)

MOST_CLASSES = 100_000
"""Whole numbers above this are numbers, not classes."""


def dataset_of(
    train: Given, test: Given | None = None, columns: Columns = None, cache: bool = True,
    memory_limit: float | None = None,
) -> Dataset:
    """The data set of a task; see `quasiglobal.Task` for what `train` and `test` may be.

    Datasets beyond the memory limit in bytes stay on disk; the default follows from the free memory.

    >>> data = dataset_of([(torch.zeros(5, 2), [0, 1, 0, 1, 2]), (torch.zeros(10, 2), np.arange(10))])
    >>> len(data.train), len(data.test), [len(part) for part in data.parts], data.classes[-1]
    (12, 3, [4, 8], '9')
    """
    if memory_limit is not None and not (isinstance(memory_limit, int | float) and memory_limit >= 0):
        raise InputError(f"memory_limit is a number of bytes >= 0, got {memory_limit!r}")
    whole, trains, tests = test is not None, _several(train), _several(test)
    own = [source for source in (*trains, *tests) if not isinstance(source, Dataset)]
    if cache and len(own) == len(trains) + len(tests) and _exceeds(memory_limit, own, columns):
        data = _on_disk(train, test, own[: len(trains)], own[len(trains) :], columns)
    else:
        data = _joined(train, columns, cache, whole) if isinstance(train, list) else _one(train, columns, cache, whole)
        if whole:
            found = [one.test if isinstance(one, Dataset) else _read_all(one, columns, "test") for one in tests]
            joined, parts = _concatenated(found, "test")
            data = replace(data, test=joined, test_parts=parts if isinstance(test, list) else None, own=True)
    if data.parts is not None and data.test_parts is not None and len(data.parts) != len(data.test_parts):
        raise InputError(
            f"train has {len(data.parts)} parts, but test has {len(data.test_parts)}; give each node one of both"
        )
    return replace(data, classes=_classes(data)) if data.own else data


def _several(given: Given | None) -> list[Dataset | Source]:
    return given if isinstance(given, list) else [] if given is None else [given]


def from_arrays(
    x: ArrayTree, y: ArrayTree, x_test: ArrayTree | None = None, y_test: ArrayTree | None = None, *,
    name: str = "arrays", normalise: bool = False,
) -> Dataset:
    """A data set from tensors or NumPy arrays with one example per row.

    x and y may be tuples or dicts of arrays. Without x_test and y_test a fixed fifth of the examples is held out.
    `normalise` subtracts each channel's mean over the training examples and divides by its standard deviation (x is
    one array [m, channels, …]; uint8 pixels are first divided by 255). Otherwise the model gets x unchanged.

    >>> data = from_arrays(np.random.rand(100, 3), np.arange(100) % 2)
    >>> len(data.train), len(data.test), data.shape, data.classes
    (80, 20, (3,), ('0', '1'))
    """
    if (x_test is None) != (y_test is None):
        raise InputError("x_test and y_test belong together; give both or neither")
    test = None if x_test is None or y_test is None else (x_test, y_test)
    data = replace(dataset_of((x, y), test), name=name)
    if not normalise:
        return data
    stored = data.train.x
    is_bytes = isinstance(stored, Tensor) and stored.dtype == torch.uint8
    if not isinstance(stored, Tensor) or stored.ndim < 2 or not (stored.is_floating_point() or is_bytes):
        raise InputError(f"normalise needs one array [m, channels, …] of floats or uint8 pixels, got {described(x)}")
    scale = 255.0 if is_bytes else 1.0
    mean, std = moments(stored, scale)
    return replace(data, scale=scale, mean=mean, std=std)


# ------------------------------------------------------------------------------------------------ one data set


def _one(source: Dataset | Source, columns: Columns, cache: bool, whole: bool, what: str = "train") -> Dataset:
    """The data set of one source; if `whole`, all examples are for training, and the test set is still empty."""
    if isinstance(source, Dataset):
        return source
    name = "arrays" if is_pair(source) else type(source).__name__
    if cache or is_pair(source):
        examples = _read_all(source, columns, what)
        rows, tests = _cut(len(examples), whole, what)
        data = Dataset(name, examples.at(rows), examples.at(tests), (), own=True)
        return data if cache else replace(data, fresh=_kept(data.train))
    rows, tests = _cut(length_of(source, what), whole, what)
    first = _read(source, columns, what, rows[:2])
    train = Examples(first.x, _targets(source, columns, what, rows))
    test = _read(source, columns, what, tests) if len(tests) else first.at(tests)
    fresh = Fresh(lambda row: item_of(source, columns, what, int(rows[row])), rows.tolist(), (source,))
    return Dataset(name, train, test, (), own=True, fresh=fresh)


def _kept(examples: Examples) -> Fresh:
    """Reader of examples in memory, for a list with others that are read anew."""
    return Fresh(lambda row: tree_map(lambda values: values[row], (examples.x, examples.y)), range(len(examples)))


def _cut(m: int, whole: bool, what: str) -> tuple[Indices, Indices]:
    """The rows for training and for the test."""
    return (np.arange(m), np.arange(0)) if whole else held_out(m, what)


def _read_all(source: Source, columns: Columns, what: str) -> Examples:
    if not is_pair(source):
        return _read(source, columns, what, np.arange(length_of(source, what)))
    x, y = (
        # a list is an array, not a tree of arrays
        tree_map(lambda values: as_tensor(values, what), part, is_leaf=lambda one: not isinstance(one, tuple | dict))
        for part in source
    )
    sizes = {tuple(values.shape[:1]) for values in tree_leaves((x, y))}
    if len(sizes) != 1 or () in sizes:
        counts = ", ".join(str(list(values.shape)) for values in tree_leaves((x, y)))
        raise InputError(f"x and y of {what} need one row per example, got the shapes {counts}")
    if (0,) in sizes:
        raise InputError(f"{what} holds no examples")
    check_finite(x, y, np.arange(len(tree_leaves(y)[0])), what)
    return Examples(x, as_targets(y))


def _read(source: Indexed, columns: Columns, what: str, rows: Indices) -> Examples:
    """The examples in these rows, read once; random transforms are drawn from the row's number."""
    reader = Fresh(lambda row: item_of(source, columns, what, row), ())
    with restored_generators():
        items = [reader.example(int(row), (0, 0, 0, int(row))) for row in rows]
    shapes = [str(tree_map(lambda values: list(values.shape), item)) for item in items]
    for row, shape in zip(rows, shapes, strict=True):
        if shape != shapes[0]:
            raise InputError(
                f"example {row} of {what} has the shapes {shape}, but example {rows[0]} has {shapes[0]}; "
                "resize or pad them in the Dataset"
            )
    x, y = tree_map(lambda *values: torch.stack(values), *items)
    check_finite(x, y, rows, what)
    return Examples(x, y)


def _targets(source: Indexed, columns: Columns, what: str, rows: Indices) -> Tree:
    """The targets of these rows: from the attribute `targets` that many Datasets have, else by reading all examples."""
    known = getattr(source, "targets", None)
    if columns is None and isinstance(known, Tensor | np.ndarray | list) and len(known) == len(source):
        targets = as_targets(as_tensor(known, what))
        some = np.linspace(0, len(known) - 1, num=min(8, len(known))).astype(np.int64)
        with restored_generators():
            read = [item_of(source, columns, what, int(row))[1] for row in some]
        if all(isinstance(y, Tensor) and y.equal(targets[row]) for row, y in zip(some, read, strict=True)):
            return targets[torch.from_numpy(rows)]
    return _read(source, columns, what, rows).y


# ------------------------------------------------------------------------------------------------ one per node


def _joined(sources: Sequence[Dataset | Source], columns: Columns, cache: bool, whole: bool) -> Dataset:
    """One data set from a list with one source per node."""
    if not sources:
        raise InputError(f"train is an empty list; it needs to be {NEEDED}")
    for k, source in enumerate(sources):
        if isinstance(source, Tensor | np.ndarray):
            raise InputError(f"part {k} of train is an array; write a pair as (x, y), in parentheses")
    found = [_one(source, columns, cache, whole, f"part {k} of train") for k, source in enumerate(sources)]
    first = found[0]
    for k, data in enumerate(found):
        if data.own != first.own or (not data.own and _terms(data) != _terms(first)):
            raise InputError(
                f"part {k} of train has other classes, shapes or normalisation than part 0; load all with the same "
                "classes, mean and std"
            )
    train, parts = _concatenated([data.train for data in found], "train")
    test, test_parts = _concatenated([data.test for data in found], "test")
    readers = [data.fresh for data in found if data.fresh is not None]
    fresh = None
    if any(reader.sources for reader in readers):
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        start = [int(part[0]) for part in parts]
        fresh = Fresh(
            lambda row: readers[owner[row]].read(row - start[owner[row]]),
            [index for reader in readers for index in reader.index],
            tuple(source for reader in readers for source in reader.sources),
        )
        train = replace(train, x=tree_map(lambda values: values[:2], train.x))
    name = first.name if not first.own else f"{len(found)}-parts"
    return replace(
        first, name=name, own=True, train=train, test=test, parts=parts, test_parts=None if whole else test_parts,
        fresh=fresh,
    )


def _terms(data: Dataset) -> tuple[object, ...]:
    return data.classes, data.shape, data.scale, data.mean, data.std, data.augmentation, data.pad


def _concatenated(splits: Sequence[Examples], what: str) -> tuple[Examples, tuple[Indices, ...]]:
    """Concatenate the examples of all parts; also return the rows of each part."""
    for k, split in enumerate(splits):
        if kind_of((split.x, split.y)) != kind_of((splits[0].x, splits[0].y)):
            raise InputError(
                f"part {k} of {what} has examples {described((split.x, split.y))}, but part 0 has "
                f"{described((splits[0].x, splits[0].y))}; all nodes need the same shapes and types"
            )
    ends = np.cumsum([len(split) for split in splits])
    rows = tuple(np.arange(end - len(split), end) for end, split in zip(ends, splits, strict=True))
    x, y = (tree_map(lambda *values: torch.cat(values), *of) for of in zip(*((s.x, s.y) for s in splits), strict=True))
    return Examples(x, y), rows


# ------------------------------------------------------------------------------------------------ on disk


def _exceeds(memory_limit: float | None, sources: Sequence[Source], columns: Columns) -> bool:
    """Whether Datasets need more memory than the limit, judged by the first example of each."""
    size = 0
    with restored_generators():
        for source in sources:
            if not is_pair(source):
                try:
                    first = item_of(source, columns, "train", 0)
                    size += length_of(source, "train") * sum(leaf.nbytes for leaf in tree_leaves(first))
                except InputError:                          # reported with its place when the data are read
                    return False
    limit = free_bytes(torch.device("cpu")) * USABLE / 2 if memory_limit is None else memory_limit     # stacking copies
    return size > limit


def _on_disk(
    train: Given, test: Given | None, trains: Sequence[Source], tests: Sequence[Source], columns: Columns
) -> Dataset:
    """The data set of Datasets in shards on disk."""
    whole, several = test is not None, isinstance(train, list)
    named = [(source, f"part {k} of train" if several else "train") for k, source in enumerate(trains)]
    cuts = [_cut(_count(source, what), whole, what) for source, what in named]
    examples, parts = _stored([(*one, rows) for one, (rows, _) in zip(named, cuts, strict=True)], columns)
    held, test_parts = _stored(
        [(source, "test", np.arange(_count(source, "test"))) for source in tests] if whole
        else [(*one, rows) for one, (_, rows) in zip(named, cuts, strict=True)], columns
    )
    each = isinstance(test, list) if whole else several
    name = f"{len(named)}-parts" if several else type(train).__name__
    return Dataset(
        name, examples, held, (), own=True, parts=parts if several else None, test_parts=test_parts if each else None
    )


def _count(source: Source, what: str) -> int:
    return len(_read_all(source, None, what)) if is_pair(source) else length_of(source, what)


def _stored(sources: Sequence[tuple[Source, str, Indices]], columns: Columns) -> tuple[Examples, tuple[Indices, ...]]:
    """Store the rows of all sources, (source, what, rows), one after the other; also return the rows of each."""
    readers = [
        _kept(_read_all(one, columns, what)) if is_pair(one) else Fresh(partial(item_of, one, columns, what), ())
        for one, what, _ in sources
    ]
    owner = np.repeat(np.arange(len(sources)), [len(rows) for _, _, rows in sources])
    index = np.concatenate([rows for _, _, rows in sources])
    first = ""

    def read(place: int) -> Example:
        nonlocal first
        row, what = int(index[place]), sources[owner[place]][1]
        x, y = readers[owner[place]].example(row, (0, 0, 0, row))
        one: Example = tree_map(lambda leaf: leaf[None], (x, y))
        found = described(one)
        first = first or found
        if found != first:
            raise InputError(f"example {row} of {what} is {found}, but the first one is {first}; give all one form")
        check_finite(*one, np.array([row]), what)
        return x, y

    key = fingerprint(columns, [(source, rows) for source, _, rows in sources])
    with restored_generators():
        records = store(read, len(index), key)
    return Examples(records.inputs, records.targets(), shards=records), tuple(
        np.flatnonzero(owner == k) for k in range(len(sources))
    )


# ------------------------------------------------------------------------------------------------ one example


def item_of(source: Indexed, columns: Columns, what: str, row: int) -> Example:
    """Example `row` as (input, target), as tensors."""
    where = f"example {row} of {what}"
    try:
        item = source[row]
    except Exception as error:
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise InputError(f"{where} cannot be read: {type(source).__name__} raises {said}") from None
    if isinstance(item, Mapping):
        if columns is None or len(columns) != 2:
            names = list(item)
            raise InputError(f"{where} is a dict; name its input and target, columns=({names[0]!r}, {names[-1]!r})")
        item = tuple(_of_columns(item, wanted, where) for wanted in columns)
    elif not isinstance(item, tuple | list) or len(item) != 2:
        count = f" of {len(item)}" if isinstance(item, tuple | list) else ""
        raise InputError(f"{where} is a {type(item).__name__}{count}; it needs to be a pair (input, target)")
    x, y = (_tree(part, where) for part in item)
    return x, as_targets(y)


def _of_columns(item: Mapping[object, object], wanted: str | Sequence[str], where: str) -> object:
    """The value of a column, or a dict of the values of several."""
    if isinstance(wanted, list | tuple):
        return {name: _of_columns(item, name, where) for name in wanted}
    if wanted not in item:
        raise InputError(f"{where} has no {wanted!r}; its columns are {', '.join(map(str, item))}")
    return item[wanted]


def _tree(value: object, where: str) -> Tree:
    """Convert an input or target to tensors: tuples and dicts keep their structure."""
    if isinstance(value, Mapping):
        return {name: _tree(one, where) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_tree(one, where) for one in value)
    return as_tensor(value, where)


def as_tensor(value: object, where: str) -> Tensor:
    """Convert numbers, lists, arrays and images to a tensor; an image to float32 [channels, height, width] / 255."""
    if isinstance(value, Tensor):
        usual = value.layout is torch.strided and not value.is_nested and not value.is_quantized and not value.is_meta
        if not usual or (value.is_floating_point() and value.itemsize == 1):
            kind = "nested" if value.is_nested else str(value.dtype if value.layout is torch.strided else value.layout)
            raise InputError(
                f"{where} has a tensor of the kind {'meta' if value.is_meta else kind.removeprefix('torch.')}; give a "
                "dense one of floating-point or whole numbers"
            )
        return value.detach()
    if hasattr(value, "getbands"):                          # a PIL image
        pixels = np.atleast_3d(np.asarray(value))
        return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) / 255)
    try:
        array = np.asarray(value)
        if array.dtype == np.longdouble:
            array = array.astype(np.float64)
        if array.dtype == object or array.dtype.kind not in "biufc":
            raise TypeError
        array = array.astype(array.dtype.newbyteorder("="), copy=False)
        if isinstance(value, float | list) and array.dtype == np.float64:
            array = array.astype(np.float32)
        return torch.from_numpy(np.array(array))
    except (TypeError, ValueError):
        first = value[0] if isinstance(value, list | tuple) and value else value
        if isinstance(first, str) or (isinstance(first, np.ndarray) and first.dtype.kind in "US"):
            raise InputError(f"{where} has text; turn inputs into token ids and labels into class numbers") from None
        hint = "; give train and test apart, test=…" if hasattr(value, "__getitem__") else ""
        raise InputError(f"{where} has a {type(value).__name__}, not a tensor, an array or a number{hint}") from None


def as_targets(y: Tree) -> Tree:
    """Whole numbers as int64, yes and no as 1.0 and 0.0: the types that torch's losses take."""
    def one(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            return value.float()
        return value if value.is_floating_point() or value.is_complex() else value.long()

    return tree_map(one, y)


# ------------------------------------------------------------------------------------------------ checks


def length_of(source: Indexed, what: str) -> int:
    """Number of examples of a map-style data set; raise InputError for anything else."""
    if isinstance(source, DataLoader):
        raise InputError(f"{what} is a DataLoader; give its Dataset, loader.dataset: the nodes draw their own batches")
    if isinstance(source, IterableDataset):
        raise InputError(f"{what} is an IterableDataset; give a Dataset with __len__ and __getitem__")
    if isinstance(source, Tensor | np.ndarray | str | Mapping) or not hasattr(source, "__getitem__"):
        raise InputError(f"{what} is a {type(source).__name__}; it needs to be {NEEDED}")
    try:
        length = len(source)
    except TypeError:
        raise InputError(f"{what}, a {type(source).__name__}, has no __len__; give a Dataset with a length") from None
    if length == 0:
        raise InputError(f"{what} holds no examples")
    return length


def is_pair(source: Source) -> TypeGuard[tuple[ArrayTree, ArrayTree]]:
    """Whether the source is (x, y): tensors or arrays with one example per row."""
    return isinstance(source, tuple) and len(source) == 2 and not isinstance(source[1], str)


def check_finite(x: Tree, y: Tree, rows: Indices, what: str) -> None:
    """Raise InputError for a value that is not a finite number; `rows` are the user's numbers of the examples."""
    for part, values in (("input", x), ("target", y)):
        for value in tree_leaves(values):
            if (value.is_floating_point() or value.is_complex()) and not value.isfinite().all():
                row = rows[int((~value.isfinite()).reshape(len(value), -1).any(dim=1).nonzero()[0])]
                raise InputError(
                    f"the {part} of example {row} of {what} has a value that is not a finite number; remove it"
                )


def _classes(data: Dataset) -> tuple[str, ...]:
    """Names of the classes 0, 1, … up to the largest label; empty if the targets are not class numbers."""
    labels = [split.labels for split in (data.train, data.test) if len(split)]
    if any(found is None for found in labels):
        return ()
    highest = max(int(found.max()) for found in labels if found is not None)
    return tuple(map(str, range(1 + highest))) if highest < MOST_CLASSES else ()
