"""Numbers from CSV files, plain or gzipped: a user's own features with a column of labels."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Examples, Splits, held_out
from quasiglobal.data.readers import fits, locate
from quasiglobal.data.readers.csv_texts import MOST_CLASSES, SUFFIXES, lines_of
from quasiglobal.errors import InputError, unknown

MISSING = ("na", "n/a", "nan", "null", "none", "?", "-", ".")
"""Marks of a missing value; in a column of numbers they are an error, not text."""

CHUNK = 4096
"""Rows that are converted together."""

_Targets = NDArray[np.float32] | NDArray[np.int64]


def read(path: Path, label: str, memory_limit: float, numbers: bool = False, testing: bool = False) -> Splits:
    """Read a user's file, of which a fixed fifth is held out, or a folder with train.csv and test.csv (dev, val).

    The first row names the columns. The column `label` is y. Every other column of numbers is a feature, x float32
    [m, features]; a column with any other text is kept in `columns`. Labels that are text or whole numbers from 0 are
    classes; if any label is a fraction, or with `numbers`, y is float32 and there are no classes. A folder without a
    test file is split like a file; with `testing`, all rows of a file are test examples. Files may be gzipped. The
    separator is a tab if the name ends with .tsv or .tsv.gz.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "t.csv").write_text("width,site,label\\n1.5,north,no\\n1.5,north,no\\n")
    ...     splits = read(Path(folder, "t.csv"), "label", memory_limit=1e9)
    >>> splits.train.x, splits.train.y, splits.train.columns["site"].tolist(), splits.classes
    (tensor([[1.5000]]), tensor([0]), ['north'], ('no',))
    """
    file, tests = _files(path)
    train = _table(file, label, memory_limit)
    if tests is None:
        y, classes = _targets([train], numbers)
        everything = train.examples(y[0])
        rows = np.arange(len(everything))
        kept, tested = (rows[:0], rows) if testing else held_out(len(everything), path)
        return Splits(everything.at(kept), everything.at(tested), classes)
    test = _table(tests, label, memory_limit)
    _check_alike(train, test)
    y, classes = _targets([train, test], numbers)
    return Splits(train.examples(y[0]), test.examples(y[1]), classes)


def columns(path: Path, features: Sequence[str], label: str, width: int, memory_limit: float) -> Tensor:
    """The columns `features` of a CSV file as float32 [m, width]; without names, all but the column `label`."""
    names, cells = _cells(path, memory_limit)
    wanted = list(features) or [name for name in names if name != label]
    if missing := [name for name in wanted if name not in names]:
        raise InputError(f"{path} has no column {missing[0]!r}; the model was trained on {', '.join(wanted)}")
    found = [_column_of_numbers(path, name, cells[names.index(name)]) for name in wanted]
    if len(found) != width:
        raise InputError(f"{path} has {len(found)} columns of numbers, but the model takes {width}")
    return torch.from_numpy(np.stack(found, axis=1))


@dataclass
class NumberTable:
    """The columns of a file: the labels as text, numbers and other text."""

    path: Path
    names: list[str]
    """The header."""
    label: str
    labels: list[str]
    lines: list[int]
    """The line in which each row ends."""
    features: dict[str, NDArray[np.float32]]
    texts: dict[str, NDArray[np.str_]]

    def examples(self, y: _Targets) -> Examples:
        """The examples with these targets."""
        x = np.stack(list(self.features.values()), axis=1)
        return Examples(torch.from_numpy(x), torch.from_numpy(y), dict(self.texts), tuple(self.features))

    def wrong_label(self, row: int, remedy: str) -> InputError:
        """Build the error for the label of a row."""
        return InputError(
            f"{self.path} has the label {self.labels[row]!r} in column {self.label}, line {self.lines[row]}; {remedy}"
        )


def _files(path: Path) -> tuple[Path, Path | None]:
    """The training file and the test file, if there is one."""
    if not os.path.isdir(path):
        return path, None
    train = locate(path, "train", SUFFIXES)
    if train is None:
        raise InputError(f"{path} has no train.csv, plain or .gz; add it or name a file")
    found = [file for part in ("test", "dev", "val") if (file := locate(path, part, SUFFIXES))]
    return train, found[0] if found else None


def _cells(path: Path, memory_limit: float) -> tuple[list[str], list[list[str]]]:
    """The header of a file, and the cells of each column as text."""
    with _rows(path) as (names, rows):
        _check_names(path, names)
        cells: list[list[str]] = [[] for _ in names]
        for count, (_, row) in enumerate(rows, 1):
            fits(64 * count * len(names), memory_limit, path)
            for column, cell in zip(cells, row, strict=True):
                column.append(cell)
    if not cells[0]:
        raise InputError(f"{path} holds no rows")
    return names, cells


def _column_of_numbers(path: Path, name: str, cells: Sequence[str]) -> NDArray[np.float32]:
    """Convert a column to numbers; raise InputError if it is not one of finite numbers."""
    found = _floats(cells)
    if found is not None and np.isfinite(found).all():
        return found
    bad = next(cell for cell in cells if (one := _floats([cell])) is None or not np.isfinite(one).all())
    raise InputError(f"{path} has {bad!r} in column {name}, which the model takes as a number; correct or remove it")


# ---------------------------------------------------------------------------------------------- one file


def _table(path: Path, label: str, memory_limit: float) -> NumberTable:
    """Read a file; check its header, that every row is complete, and that every number is finite."""
    with _rows(path) as (names, rows):
        _check_header(path, names, label)
        at = names.index(label)
        numbers: dict[int, list[NDArray[np.float32]]] = {i: [] for i in range(len(names)) if i != at}
        infinite: dict[int, tuple[int, str]] = {}
        labels: list[str] = []
        lines: list[int] = []
        while chunk := list(islice(rows, CHUNK)):
            lines += [line for line, _ in chunk]
            fits(8 * len(names) * len(lines), memory_limit, path)   # float32, and once more to join the chunks
            cells = list(zip(*(cells for _, cells in chunk), strict=True))
            labels += cells[at]
            for i in list(numbers):
                found = _floats(cells[i])
                if found is None:
                    del numbers[i]
                    continue
                numbers[i].append(found)
                if not np.isfinite(found).all():
                    row = int(np.argmin(np.isfinite(found)))
                    infinite.setdefault(i, (chunk[row][0], cells[i][row]))
    if not lines:
        raise InputError(f"{path} holds no rows")
    for i, (line, cell) in infinite.items():
        if i in numbers:
            raise InputError(
                f"{path} has {cell!r} in column {names[i]}, line {line}, which is not a finite float32; "
                "correct it or remove the row"
            )
    texts = _texts(path, [i for i in range(len(names)) if i != at and i not in numbers], lines, memory_limit)
    if not numbers:
        raise InputError(f"{path} has no column of numbers besides {label}; add one")
    features = {names[i]: np.concatenate(numbers.pop(i)) for i in list(numbers)}
    return NumberTable(path, names, label, labels, lines, features, texts)


@contextmanager
def _rows(path: Path) -> Iterator[tuple[list[str], Iterator[tuple[int, list[str]]]]]:
    """Open a file: its header, and its other rows, which must have as many cells, none of them empty."""
    with lines_of(path, "a CSV file of numbers") as lines:
        first = next(lines, None)
        if first is None:
            raise InputError(f"{path} holds no rows")
        names = [cell.strip() for cell in first[1]]
        yield names, (_complete(path, names, line, cells) for line, cells in lines)


def _complete(path: Path, names: Sequence[str], line: int, cells: Sequence[str]) -> tuple[int, list[str]]:
    """The row without surrounding spaces; raise an error if it is not complete."""
    if len(cells) != len(names):
        raise InputError(
            f"{path} has {len(cells)} columns in line {line}, but {len(names)} in the header; "
            "correct the row or remove it"
        )
    stripped = [cell.strip() for cell in cells]
    if "" in stripped:
        raise InputError(
            f"{path} has an empty cell in column {names[stripped.index('')]}, line {line}; fill it or remove the row"
        )
    return line, stripped


def _texts(path: Path, which: Sequence[int], lines: Sequence[int], memory_limit: float) -> dict[str, NDArray[np.str_]]:
    """Read the columns of text, by a second pass over the file: before the first, it is unknown which they are."""
    if not which:
        return {}
    columns: list[list[str]] = [[] for _ in which]
    size = 0
    with _rows(path) as (names, rows):
        for _, cells in rows:
            for column, i in zip(columns, which, strict=True):
                column.append(cells[i])
                size += 4 * len(cells[i])
            fits(size, memory_limit, path)
    for column, i in zip(columns, which, strict=True):
        _check_missing(path, names[i], column, lines)
    return {names[i]: np.array(column) for column, i in zip(columns, which, strict=True)}


def _floats(cells: Sequence[str]) -> NDArray[np.float32] | None:
    """Convert cells to numbers; None if some are text. Python also reads 1_000 and other scripts' digits: text here."""
    joined = "".join(cells)
    if "_" in joined or not joined.isascii():
        return None
    try:
        with np.errstate(over="ignore"):
            return np.array(cells, dtype=np.float64).astype(np.float32)
    except ValueError:
        return None


def _check_header(path: Path, names: Sequence[str], label: str) -> None:
    """Raise an error unless the header names every column once, and the label among them."""
    if len(names) < 2:
        raise InputError(f"{path} has one column, {names[0]!r}; separate columns by commas (in .tsv: tabs)")
    if label not in names:
        if any(_floats([name]) is not None for name in names) and not get_close_matches(label, names):
            raise InputError(f"{path} has numbers in its first row; add a header with the columns' names")
        raise unknown(f"column of {path}", label, names)
    _check_names(path, names)


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise an error unless every column has a name of its own."""
    if "" in names:
        raise InputError(
            f"{path} has no name for column {1 + names.index('')} in its header; name the column or remove it"
        )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise InputError(f"{path} has two columns {twice[0]!r} in its header; rename one of them")


def _check_missing(path: Path, name: str, column: Sequence[str], lines: Sequence[int]) -> None:
    """Raise an error if a column is of numbers but for marks of missing values."""
    if any(cell.casefold() not in MISSING and _floats([cell]) is None for cell in column):
        return
    rows = [row for row, cell in enumerate(column) if _floats([cell]) is None]
    if 0 < len(rows) < len(column):
        raise InputError(
            f"{path} has {column[rows[0]]!r} for a number in column {name}, line {lines[rows[0]]} "
            f"({len(rows):,} such rows in all); fill them or remove the rows"
        )


# ---------------------------------------------------------------------------------------------- two files


def _check_alike(train: NumberTable, test: NumberTable) -> None:
    """Raise an error unless both files have the same header and the same columns of numbers."""
    if len(train.names) != len(test.names):
        raise InputError(
            f"{test.path} has {len(test.names)} columns, but {train.path} has {len(train.names)}; "
            "give both the same header"
        )
    for k, (name, found) in enumerate(zip(train.names, test.names, strict=True), 1):
        if name != found:
            raise InputError(
                f"{test.path} has {found!r} as column {k}, but {train.path} has {name!r}; give both the same header"
            )
    for one, other in ((train, test), (test, train)):
        for name in sorted(one.features.keys() & other.texts.keys()):
            column = other.texts[name].tolist()
            row = next(row for row, cell in enumerate(column) if _floats([cell]) is None)
            raise InputError(
                f"{other.path} has the text {column[row]!r} in column {name}, line {other.lines[row]}, "
                f"but {one.path} has only numbers there; make the column numbers or text in both"
            )


def _targets(tables: Sequence[NumberTable], as_numbers: bool) -> tuple[list[_Targets], tuple[str, ...]]:
    """The targets of each file, and the class names; every class must occur in the first file."""
    numbers = [found for table in tables if (found := _label_numbers(table)) is not None]
    if as_numbers and len(numbers) < len(tables):
        raise InputError(f"column {tables[0].label} of {tables[0].path} has text; a loss of numbers needs numbers")
    if len(numbers) < len(tables):
        labels = [table.labels for table in tables]
        classes = tuple(sorted(set(labels[0])))
        if len(classes) > MOST_CLASSES:
            raise InputError(
                f"{tables[0].path} has {len(classes):,} classes in column {tables[0].label}, more than "
                f"{MOST_CLASSES:,}; name another column as label"
            )
    elif as_numbers or any((found % 1 != 0).any() for found in numbers):
        return [found.astype(np.float32) for found in numbers], ()
    else:
        for table, found in zip(tables, numbers, strict=True):
            _check_class_numbers(table, found)
        labels = [[str(int(number)) for number in found] for found in numbers]
        _warn_of_numbers(tables[0], len(set(labels[0])))
        classes = tuple(str(k) for k in range(1 + int(numbers[0].max())))
    seen = set(labels[0])
    for table, cells in zip(tables, labels, strict=True):
        for row, cell in enumerate(cells):
            if cell not in seen:
                raise table.wrong_label(row, f"{tables[0].path} lacks it; add examples with it or remove the row")
    places = dict(zip(classes, range(len(classes)), strict=True))
    return [np.array([places[cell] for cell in cells], dtype=np.int64) for cells in labels], classes


def _warn_of_numbers(table: NumberTable, different: int) -> None:
    """Warn of whole numbers that are probably not classes: many, and few examples of each."""
    if different > 20 and 5 * different > len(table.labels):
        warnings.warn(
            f"column {table.label} of {table.path} has {different:,} different whole numbers in "
            f"{len(table.labels):,} rows, which count as classes; to predict numbers, add --loss mse",
            stacklevel=2,
        )


def _check_class_numbers(table: NumberTable, numbers: NDArray[np.float64]) -> None:
    """Raise an error for whole numbers that are not class numbers."""
    for row in (int(numbers.argmin()), int(numbers.argmax())):
        if not 0 <= numbers[row] < MOST_CLASSES:
            raise table.wrong_label(
                row,
                f"classes are 0 to {MOST_CLASSES - 1}; renumber them, or use --loss mse for a regression",
            )


def _label_numbers(table: NumberTable) -> NDArray[np.float64] | None:
    """The labels as finite numbers; None if some are text."""
    single = _floats(table.labels)
    if single is None:
        _check_missing(table.path, table.label, table.labels, table.lines)
        return None
    if not np.isfinite(single).all():
        row = int(np.argmin(np.isfinite(single)))
        raise table.wrong_label(row, "it is not a finite float32: correct it or remove the row")
    return np.array(table.labels, dtype=np.float64)
