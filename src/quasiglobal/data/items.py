"""One example of a user's data set as tensors, with a sentence for whatever cannot be one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import DataLoader, IterableDataset

from quasiglobal.data.dataset import Indices
from quasiglobal.errors import InputError

Columns = tuple[Any, Any] | None
"""Names of the input and the target in examples that are dicts; the input may be several names."""

NEEDED = (
    "a torch Dataset of (input, target), a pair (x, y) of tensors or arrays, a data set of qg.data.load, or a list "
    "with one of these for each node"
)


def item_of(source: Any, columns: Columns, what: str, row: int) -> tuple[Any, Any]:
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


def _of_columns(item: Mapping[str, Any], wanted: Any, where: str) -> Any:
    """The value of a column, or a dict of the values of several."""
    if isinstance(wanted, list | tuple):
        return {name: _of_columns(item, name, where) for name in wanted}
    if wanted not in item:
        raise InputError(f"{where} has no {wanted!r}; its columns are {', '.join(map(str, item))}")
    return item[wanted]


def _tree(value: Any, where: str) -> Any:
    """Convert an input or target to tensors: tuples and dicts keep their structure."""
    if isinstance(value, Mapping):
        return {name: _tree(one, where) for name, one in value.items()}
    if isinstance(value, tuple):
        return tuple(_tree(one, where) for one in value)
    return as_tensor(value, where)


def as_tensor(value: Any, where: str) -> Tensor:
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
        if isinstance(value, str) or _is_texts(value):
            raise InputError(f"{where} has text; turn inputs into token ids and labels into class numbers") from None
        hint = "; give train and test apart, test=…" if hasattr(value, "__getitem__") else ""
        raise InputError(f"{where} has a {type(value).__name__}, not a tensor, an array or a number{hint}") from None


def _is_texts(value: Any) -> bool:
    """Whether a value is a list or an array of strings."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US"
    return isinstance(value, list | tuple) and bool(value) and isinstance(value[0], str)


def as_targets(y: Any) -> Any:
    """Whole numbers as int64, yes and no as 1.0 and 0.0: the types that torch's losses take."""
    def one(value: Tensor) -> Tensor:
        if value.dtype == torch.bool:
            return value.float()
        return value if value.is_floating_point() or value.is_complex() else value.long()

    return tree_map(one, y)


def length_of(source: Any, what: str) -> int:
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


def is_pair(source: Any) -> bool:
    """Whether the source is (x, y): tensors or arrays with one example per row."""
    return isinstance(source, tuple) and len(source) == 2 and not isinstance(source[1], str)


def check_finite(x: Any, y: Any, rows: Indices, what: str) -> None:
    """Raise InputError for a value that is not a finite number; `rows` are the user's numbers of the examples."""
    for part, values in (("input", x), ("target", y)):
        for value in tree_leaves(values):
            if (value.is_floating_point() or value.is_complex()) and not value.isfinite().all():
                row = rows[int((~value.isfinite()).reshape(len(value), -1).any(dim=1).nonzero()[0])]
                raise InputError(
                    f"the {part} of example {row} of {what} has a value that is not a finite number; remove it"
                )
