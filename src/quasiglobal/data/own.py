"""Data that a user gives in Python: torch Datasets, arrays, Hugging Face data sets, or a list with one per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.fingerprint import fingerprint
from quasiglobal.common.memory import USABLE, free_bytes
from quasiglobal.data.dataset import Dataset, Examples, Indices, described, held_out, kind_of, moments
from quasiglobal.data.fresh import Fresh
from quasiglobal.data.items import NEEDED, Columns, as_targets, as_tensor, check_finite, is_pair, item_of, length_of
from quasiglobal.data.randomness import restored_generators
from quasiglobal.data.records import store
from quasiglobal.errors import InputError

MOST_CLASSES = 100_000
"""Whole numbers above this are numbers, not classes."""

def dataset_of(
    train: Any, test: Any = None, columns: Columns = None, cache: bool = True, memory_limit: float | None = None
) -> Dataset:
    """The data set of a task; see `quasiglobal.Task` for what `train` and `test` may be.

    Datasets beyond the memory limit in bytes stay on disk; by default as many are kept as the free memory allows.

    >>> data = dataset_of([(torch.zeros(5, 2), [0, 1, 0, 1, 2]), (torch.zeros(10, 2), np.arange(10))])
    >>> len(data.train), len(data.test), [len(part) for part in data.parts], data.classes[-1]
    (12, 3, [4, 8], '9')
    """
    if memory_limit is not None and not (isinstance(memory_limit, int | float) and memory_limit >= 0):
        raise InputError(f"memory_limit is a number of bytes >= 0, got {memory_limit!r}")
    whole = test is not None
    if cache and _exceeds(memory_limit, [*_several(train), *(_several(test) if whole else [])], columns):
        return _on_disk(train, test, columns)
    data = _joined(train, columns, cache, whole) if isinstance(train, list) else _one(train, columns, cache, whole)
    if whole:
        found = [one.test if isinstance(one, Dataset) else _read_all(one, columns, "test") for one in _several(test)]
        joined, parts = _concatenated(found, "test")
        data = replace(data, test=joined, test_parts=parts if isinstance(test, list) else None, own=True)
    return _completed(data)


def _several(given: Any) -> list[Any]:
    return given if isinstance(given, list) else [given]


def _completed(data: Dataset) -> Dataset:
    """The data set with its classes; raise InputError if train and test have different numbers of parts."""
    if data.parts is not None and data.test_parts is not None and len(data.parts) != len(data.test_parts):
        raise InputError(
            f"train has {len(data.parts)} parts, but test has {len(data.test_parts)}; give each node one of both"
        )
    return replace(data, classes=_classes(data)) if data.own else data


def from_arrays(
    x: Any, y: Any, x_test: Any = None, y_test: Any = None, *, name: str = "arrays", normalise: bool = False
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
    data = replace(dataset_of((x, y), None if x_test is None else (x_test, y_test)), name=name)
    if not normalise:
        return data
    stored = data.train.x
    if not isinstance(stored, Tensor) or stored.ndim < 2 or not (stored.is_floating_point() or _is_bytes(stored)):
        raise InputError(f"normalise needs one array [m, channels, …] of floats or uint8 pixels, got {described(x)}")
    scale = 255.0 if _is_bytes(stored) else 1.0
    mean, std = moments(stored, scale)
    return replace(data, scale=scale, mean=mean, std=std)


def _is_bytes(x: Tensor) -> bool:
    return x.dtype == torch.uint8


# ------------------------------------------------------------------------------------------------ one data set


def _one(source: Any, columns: Columns, cache: bool, whole: bool, what: str = "train") -> Dataset:
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
    """A reader of examples that are in memory, for a list in which others are read anew."""
    return Fresh(lambda row: tree_map(lambda values: values[row], (examples.x, examples.y)), range(len(examples)))


def _cut(m: int, whole: bool, what: str) -> tuple[Indices, Indices]:
    """The rows for training and for the test."""
    return (np.arange(m), np.arange(0)) if whole else held_out(m, what)


def _read_all(source: Any, columns: Columns, what: str) -> Examples:
    """All examples of a source."""
    if not is_pair(source):
        return _read(source, columns, what, np.arange(length_of(source, what)))
    x, y = (tree_map(lambda values: as_tensor(values, what), part, is_leaf=_is_leaf) for part in source)
    sizes = {tuple(values.shape[:1]) for values in tree_leaves((x, y))}
    if len(sizes) != 1 or () in sizes:
        counts = ", ".join(str(list(values.shape)) for values in tree_leaves((x, y)))
        raise InputError(f"x and y of {what} need one row per example, got the shapes {counts}")
    if (0,) in sizes:
        raise InputError(f"{what} holds no examples")
    check_finite(x, y, np.arange(len(tree_leaves(y)[0])), what)
    return Examples(x, as_targets(y))


def _is_leaf(value: Any) -> bool:
    """Whether a value is an array, or a list of numbers: not a tuple or dict of arrays."""
    return isinstance(value, list) or not isinstance(value, tuple | dict)


def _read(source: Any, columns: Columns, what: str, rows: Indices) -> Examples:
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


def _targets(source: Any, columns: Columns, what: str, rows: Indices) -> Any:
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


def _joined(sources: Sequence[Any], columns: Columns, cache: bool, whole: bool) -> Dataset:
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


def _terms(data: Dataset) -> tuple[Any, ...]:
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


def _exceeds(memory_limit: float | None, sources: Sequence[Any], columns: Columns) -> bool:
    """Whether Datasets need more memory than the limit, judged by the first example of each."""
    if any(isinstance(source, Dataset) for source in sources):
        return False
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


def _on_disk(train: Any, test: Any, columns: Columns) -> Dataset:
    """The data set of Datasets in shards on disk."""
    whole, several = test is not None, isinstance(train, list)
    named = [(source, f"part {k} of train" if several else "train") for k, source in enumerate(_several(train))]
    cuts = [_cut(_count(source, what), whole, what) for source, what in named]
    examples, parts = _stored([(*one, rows) for one, (rows, _) in zip(named, cuts, strict=True)], columns)
    tests = [(*one, rows) for one, (_, rows) in zip(named, cuts, strict=True)]
    if whole:
        tests = [(source, "test", np.arange(_count(source, "test"))) for source in _several(test)]
    held, test_parts = _stored(tests, columns)
    each = isinstance(test, list) if whole else several
    name = f"{len(named)}-parts" if several else type(train).__name__
    return _completed(Dataset(
        name, examples, held, (), own=True, parts=parts if several else None, test_parts=test_parts if each else None
    ))


def _count(source: Any, what: str) -> int:
    return len(_read_all(source, None, what)) if is_pair(source) else length_of(source, what)


def _stored(sources: Sequence[tuple[Any, str, Indices]], columns: Columns) -> tuple[Examples, tuple[Indices, ...]]:
    """Store the rows of all sources, (source, what, rows), one after the other; also return the rows of each."""
    readers = [Fresh(_reader(source, columns, what), ()) for source, what, _ in sources]
    owner = np.repeat(np.arange(len(sources)), [len(rows) for _, _, rows in sources])
    index = np.concatenate([rows for _, _, rows in sources])
    first = ""

    def read(place: int) -> tuple[Any, Any]:
        nonlocal first
        row, what = int(index[place]), sources[owner[place]][1]
        x, y = readers[owner[place]].example(row, (0, 0, 0, row))
        one: tuple[Any, Any] = tree_map(lambda leaf: leaf[None], (x, y))
        found = described(one)
        first = first or found
        if found != first:
            raise InputError(f"example {row} of {what} is {found}, but the first one is {first}; give all one form")
        check_finite(*one, np.array([row]), what)
        return x, y

    key = fingerprint(columns, [(source, rows) for source, _, rows in sources])
    with restored_generators():
        records = store(read, len(index), key)
    return Examples(records.inputs, records.targets, shards=records), tuple(
        np.flatnonzero(owner == k) for k in range(len(sources))
    )


def _reader(source: Any, columns: Columns, what: str) -> Callable[[int], tuple[Any, Any]]:
    if is_pair(source):
        return _kept(_read_all(source, columns, what)).read
    return lambda row: item_of(source, columns, what, row)


# ------------------------------------------------------------------------------------------------ checks


def _classes(data: Dataset) -> tuple[str, ...]:
    """Names of the classes 0, 1, … up to the largest label; empty if the targets are not class numbers."""
    labels = [split.labels for split in (data.train, data.test) if len(split)]
    if any(found is None for found in labels):
        return ()
    highest = max(int(found.max()) for found in labels if found is not None)
    return tuple(map(str, range(1 + highest))) if highest < MOST_CLASSES else ()
