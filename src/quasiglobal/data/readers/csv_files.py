"""CSV files, plain or gzipped: labelled texts (AG News, SST-2, a user's own), and a user's tables of numbers.

X. Zhang, J. Zhao, Y. LeCun: Character-level convolutional networks for text classification. NeurIPS 2015.
R. Socher et al.: Recursive deep models for semantic compositionality over a sentiment treebank. EMNLP 2013.
"""

from __future__ import annotations

import csv
import io
import math
import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import chain, islice
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import Examples, Splits, held_out
from quasiglobal.data.readers import fits, locate, member, opened
from quasiglobal.data.texts import Corpus, Rows, to_test
from quasiglobal.errors import InputError, unknown

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

AGNEWS = ("World", "Sports", "Business", "Sci/Tech")
SST2 = ("negative", "positive")

LABELS = ("label", "class", "class index")
"""Accepted header names of the label; a first row without any of these is not a header."""

TEXTS = (("text",), ("sentence",), ("title", "description"))
"""Accepted header names of the text, in order of precedence."""

MISSING = ("na", "n/a", "nan", "null", "none", "?", "-", ".")
"""Marks of a missing value; in a column of numbers they are an error, not text."""

MOST_CLASSES = 1_000
"""Limit on classes; a column with more values is not a label."""

CHUNK = 4096
"""Rows that are converted to numbers together."""

_Row: TypeAlias = tuple[int, list[str]]
"""The line in which a row ends, and its cells without surrounding spaces."""

_Targets: TypeAlias = NDArray[np.float32] | NDArray[np.int64]


# ---------------------------------------------------------------------------------------------- texts


def read_pair(folder: Path, memory_limit: float, *, name: str, tests: str, classes: tuple[str, ...]) -> Corpus:
    """Read a published data set of texts: the files `train` and `tests` of a folder, with these classes."""
    train, test = (_labelled_texts(member(folder, part, SUFFIXES), memory_limit) for part in ("train", tests))
    return Corpus(name, train.rows(classes), test.rows(classes), classes)


def read_corpus(path: Path, memory_limit: float, testing: bool = False) -> Corpus:
    """Read a user's file, holding out a fixed fifth, or a folder with train.csv and test.csv (dev, val).

    With `testing`, all rows of a file, or of a folder's test.csv, are test texts in file order.

    The columns are (label, text) or (class, title, description). With a header, columns may have any order, and other
    columns are kept. Labels are names, or numbers from 0; numbers in a `class` column with title and description start
    at 1, as in AG News. Files may be gzipped. Their separator is a tab if the name ends with .tsv or .tsv.gz.
    """
    name, is_folder, tests = f"csv:{path}", os.path.isdir(path), _test_file(path)
    if is_folder and tests is None:
        raise InputError(f"{path} has neither test.csv nor dev.csv nor val.csv, plain or .gz; add one or name a file")
    if testing or not is_folder:
        table = _labelled_texts(tests or path, memory_limit)
        classes = table.classes()
        rows = table.rows(classes)
        if testing:
            return to_test(name, rows, classes)
        kept, tested = held_out(len(rows), path)
        return Corpus(name, rows.at(kept), rows.at(tested), classes)
    train, test = (_labelled_texts(file, memory_limit) for file in (member(path, "train", SUFFIXES), tests or path))
    classes = train.classes()
    if train.numbers is not None and test.numbers is not None:
        classes = max(classes, test.classes(), key=len)
    return Corpus(name, train.rows(classes), test.rows(classes), classes)


def read_texts(path: str) -> list[str]:
    """Read unlabelled texts, one per line; - is the standard input."""
    name = "the standard input" if path == "-" else path
    with reading(name, "a file of texts"):
        content = sys.stdin.buffer.read() if path == "-" else Path(path).read_bytes()
        texts = [line.removesuffix("\n") for line in io.StringIO(content.decode("utf-8-sig"), newline=None)]
    if not texts:
        raise InputError(f"{name} holds no texts")
    if empty := [line for line, text in enumerate(texts, 1) if not text.strip()]:
        raise InputError(f"{name} has nothing in line {empty[0]} ({len(empty):,} such lines in all); remove them")
    return texts


def read_text_column(path: Path, memory_limit: float) -> list[str]:
    """Read the texts of a CSV file; it needs no labels. Without a header, the last column is the text."""
    with _rows(path, "a CSV file of texts") as (first, others):
        names = [cell.casefold() for cell in first[1]]
        parts = _text_columns(names)
        rows = _within(memory_limit, path, chain([first], others) if parts is None else others)
    if parts is None and any(name in LABELS for name in names):
        raise InputError(f"{path} has the columns {', '.join(names)}; it needs one called text")
    texts = [" ".join(cells[i] for i in parts or [-1]).strip() for _, cells in rows]
    _check_filled(path, "text", texts, [line for line, _ in rows])
    return texts


@dataclass
class LabelledTexts:
    """Rows of a file, with the number of the line in which each ends."""

    path: Path
    first: int
    """Lowest label, if labels are numbers."""
    labels: list[str]
    texts: list[str]
    lines: list[int]
    columns: dict[str, NDArray[np.str_]]

    @property
    def numbers(self) -> list[int] | None:
        """The labels shifted to start at 0; None if some are not whole numbers."""
        if not all(map(_is_number, self.labels)):
            return None
        return [int(label) - self.first for label in self.labels]

    def classes(self) -> tuple[str, ...]:
        """Class names: the sorted labels, or all numbers up to the largest."""
        numbers = self.numbers
        count = len(set(self.labels)) if numbers is None else 1 + max(numbers)
        if count > MOST_CLASSES:
            raise InputError(
                f"{self.path} has {count:,} classes, more than {MOST_CLASSES:,}; "
                "put the label first, or name its column label"
            )
        return tuple(sorted(set(self.labels))) if numbers is None else tuple(map(str, range(count)))

    def rows(self, classes: Sequence[str]) -> Rows:
        """The texts, with their labels as indices into the classes."""
        numbers = self.numbers
        places = {name: place for place, name in enumerate(classes)}
        found = [places.get(label, -1) for label in self.labels] if numbers is None else numbers
        for place, label, line in zip(found, self.labels, self.lines, strict=True):
            if not 0 <= place < len(classes):
                span = f"{self.first} to {self.first + len(classes) - 1}"
                known = ", ".join(classes) if numbers is None else span
                raise InputError(f"{self.path} has the label {label!r} in line {line}; labels are {known}")
        return Rows(self.texts, torch.tensor(found, dtype=torch.int64), dict(self.columns))


def _labelled_texts(path: Path, memory_limit: float) -> LabelledTexts:
    """Read a file; check that every row has a label and a text."""
    with _rows(path, "a CSV file of texts") as (first, rows):
        names = [cell.casefold() for cell in first[1]]
        if not any(name in LABELS for name in names):
            usual = {2: ["label", "text"], 3: ["class", "title", "description"]}
            if len(names) not in usual:
                raise InputError(
                    f"{path} has no column called label or class, and {len(names)} columns, separated by commas (in "
                    ".tsv: tabs); for a table of numbers, name its target with --label COLUMN; texts need (label, "
                    "text) or (class, title, description)"
                )
            names, rows = usual[len(names)], chain([first], rows)
        label = next(names.index(name) for name in LABELS if name in names)
        parts = _text_columns(names)
        if parts is None:
            there = ", ".join(names)
            raise InputError(
                f"{path} has the columns {there}; it needs {names[label]} and text, or class, title, description"
            )
        found = _within(memory_limit, path, rows)
    lines = [line for line, _ in found]
    labels = [cells[label] for _, cells in found]
    texts = [" ".join(cells[i] for i in parts).strip() for _, cells in found]
    if len(texts) > 1 and all(map(_is_number, (*texts[1:], *labels[1:]))):
        raise InputError(f"{path} has no column of text; for a table of numbers name its target with --label COLUMN")
    if len(labels) > 1 and not _is_number(labels[0]) and all(map(_is_number, labels[1:])):
        raise InputError(
            f"{path} has numbers as labels, but {labels[0]!r} first; "
            "if that row is a header, call the columns label and text"
        )
    _check_filled(path, "text", texts, lines)
    _check_filled(path, "label", labels, lines)
    others = [i for i in range(len(names)) if i != label and i not in parts]
    columns = {names[i]: np.array([cells[i] for _, cells in found]) for i in others}
    return LabelledTexts(path, int(len(parts) == 2), labels, texts, lines, columns)


def _within(memory_limit: float, path: Path, rows: Iterable[_Row]) -> list[_Row]:
    """All rows, if their characters fit into the memory limit."""
    found, size = [], 0
    for line, cells in rows:
        size += sum(map(len, cells))
        fits(size, memory_limit, path)
        found.append((line, cells))
    return found


def _text_columns(names: Sequence[str]) -> list[int] | None:
    """Indices of the text columns; None if there are none."""
    return next(([names.index(name) for name in known] for known in TEXTS if set(known) <= set(names)), None)


def _is_number(label: str) -> bool:
    """Whether the label is a whole number of at most 9 characters."""
    return label.isascii() and label.removeprefix("-").isdecimal() and len(label) < 10


def _check_filled(path: Path, what: str, cells: Sequence[str], lines: Sequence[int]) -> None:
    """Raise an error if there are no rows, or if a cell is empty."""
    if not cells:
        raise InputError(f"{path} holds no rows")
    if empty := [line for line, cell in zip(lines, cells, strict=True) if not cell]:
        raise InputError(f"{path} has no {what} in line {empty[0]} ({len(empty):,} such rows in all); remove them")


# ---------------------------------------------------------------------------------------------- numbers


def read_table(path: Path, label: str, memory_limit: float, numbers: bool = False, testing: bool = False) -> Splits:
    """Read a user's file, holding out a fixed fifth, or a folder with train.csv and test.csv (dev, val).

    The first row names the columns. The column `label` is y. Every other column of numbers is a feature, x float32
    [m, features]; a column with any other text is kept in `columns`. Labels that are text or whole numbers from 0 are
    classes; if any label is a fraction, or with `numbers`, y is float32 and there are no classes. A folder without a
    test file is split like a file; with `testing`, all rows of a file are test examples. Files may be gzipped. The
    separator is a tab if the name ends with .tsv or .tsv.gz.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     size = Path(folder, "t.csv").write_text("width,site,label\\n1.5,north,no\\n1.5,north,no\\n")
    ...     splits = read_table(Path(folder, "t.csv"), "label", memory_limit=1e9)
    >>> splits.train.x, splits.train.y, splits.train.columns["site"].tolist(), splits.classes
    (tensor([[1.5000]]), tensor([0]), ['north'], ('no',))
    """
    file = locate(path, "train", SUFFIXES) if os.path.isdir(path) else path
    if file is None:
        raise InputError(f"{path} has no train.csv, plain or .gz; add it or name a file")
    tests = _test_file(path)
    tables = [_table(one, label, memory_limit) for one in (file, tests) if one is not None]
    if tests is not None:
        _check_alike(*tables)
    targets, classes = _targets(tables, numbers)
    splits = [table.examples(y) for table, y in zip(tables, targets, strict=True)]
    if tests is None:
        rows = np.arange(len(splits[0]))
        cuts = (rows[:0], rows) if testing else held_out(len(rows), path)
        splits = [splits[0].at(cut) for cut in cuts]
    return Splits(splits[0], splits[1], classes)


def read_columns(path: Path, features: Sequence[str], label: str, width: int, memory_limit: float) -> Tensor:
    """The columns `features` of a CSV file as float32 [m, width]; without names, all but the column `label`."""
    with _rows(path, "a CSV file of numbers") as ((_, names), _):
        _check_names(path, names)
    wanted = list(features) or [name for name in names if name != label]
    if missing := [name for name in wanted if name not in names]:
        raise InputError(f"{path} has no column {missing[0]!r}; the model was trained on {', '.join(wanted)}")
    found, _, _ = _numbers(path, wanted, memory_limit)
    if texts := [name for name in wanted if name not in found]:
        bad = next(cell for cell in _cells(path, texts[:1], math.inf)[texts[0]] if _floats([cell]) is None)
        raise InputError(
            f"{path} has {bad!r} in column {texts[0]}, which the model takes as a number; correct or remove it"
        )
    if len(found) != width:
        raise InputError(f"{path} has {len(found)} columns of numbers, but the model takes {width}")
    return torch.from_numpy(np.stack([found[name] for name in wanted], axis=1))


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


def _table(path: Path, label: str, memory_limit: float) -> NumberTable:
    """Read a file; check its header, that every row is complete, and that every number is finite."""
    with _rows(path, "a CSV file of numbers") as ((_, names), _):
        if len(names) < 2:
            raise InputError(f"{path} has one column, {names[0]!r}; separate columns by commas (in .tsv: tabs)")
        if label not in names:
            if any(_floats([name]) is not None for name in names) and not get_close_matches(label, names):
                raise InputError(f"{path} has numbers in its first row; add a header with the columns' names")
            raise unknown(f"column of {path}", label, names)
        _check_names(path, names)
    others = [name for name in names if name != label]
    features, labels, lines = _numbers(path, others, memory_limit, label)
    # A second pass over the file, since the first one finds out which columns are text.
    texts = _cells(path, [name for name in others if name not in features], memory_limit)
    for name, column in texts.items():
        _check_missing(path, name, column, lines)
    if not features:
        raise InputError(f"{path} has no column of numbers besides {label}; add one")
    return NumberTable(
        path, names, label, labels, lines, features, {name: np.array(column) for name, column in texts.items()}
    )


def _numbers(
    path: Path, wanted: Sequence[str], memory_limit: float, label: str = ""
) -> tuple[dict[str, NDArray[np.float32]], list[str], list[int]]:
    """The wanted columns that are numbers, the cells of the column `label`, and the line in which each row ends."""
    numbers: dict[str, list[NDArray[np.float32]]] = {name: [] for name in wanted}
    labels: list[str] = []
    lines: list[int] = []
    with _rows(path, "a CSV file of numbers") as ((_, names), rows):
        while chunk := list(islice(rows, CHUNK)):
            for line, cells in chunk:
                if "" in cells:
                    where = f"in column {names[cells.index('')]}, line {line}"
                    raise InputError(f"{path} has an empty cell {where}; fill it or remove the row")
            lines += [line for line, _ in chunk]
            fits(8 * len(names) * len(lines), memory_limit, path)   # float32, and once more to join the chunks
            columns = dict(zip(names, zip(*(cells for _, cells in chunk), strict=True), strict=True))
            labels += columns.get(label, ())
            for name in list(numbers):
                if (found := _floats(columns[name])) is None:
                    del numbers[name]
                else:
                    numbers[name].append(found)
    if not lines:
        raise InputError(f"{path} holds no rows")
    features = {name: np.concatenate(numbers.pop(name)) for name in list(numbers)}
    for name, values in features.items():
        if not (finite := np.isfinite(values)).all():
            row = int(np.argmin(finite))
            raise InputError(
                f"{path} has {_cells(path, [name], math.inf)[name][row]!r} in column {name}, line {lines[row]}, which "
                "is not a finite float32; correct it or remove the row"
            )
    return features, labels, lines


def _cells(path: Path, which: Sequence[str], memory_limit: float) -> dict[str, list[str]]:
    columns: dict[str, list[str]] = {name: [] for name in which}
    size = 0
    if which:
        with _rows(path, "a CSV file of numbers") as ((_, names), rows):
            places = [names.index(name) for name in which]
            for _, cells in rows:
                for column, i in zip(columns.values(), places, strict=True):
                    column.append(cells[i])
                    size += 4 * len(cells[i])
                fits(size, memory_limit, path)
    return columns


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


def _check_names(path: Path, names: Sequence[str]) -> None:
    """Raise an error unless every column has a unique name."""
    if "" in names:
        raise InputError(
            f"{path} has no name for column {1 + names.index('')} in its header; name the column or remove it"
        )
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise InputError(f"{path} has two columns {twice[0]!r} in its header; rename one of them")


def _check_missing(path: Path, name: str, column: Sequence[str], lines: Sequence[int]) -> None:
    """Raise an error if a column has numbers and marks of missing values, and nothing else."""
    if any(cell.casefold() not in MISSING and _floats([cell]) is None for cell in column):
        return
    rows = [row for row, cell in enumerate(column) if _floats([cell]) is None]
    if 0 < len(rows) < len(column):
        raise InputError(
            f"{path} has {column[rows[0]]!r} for a number in column {name}, line {lines[rows[0]]} "
            f"({len(rows):,} such rows in all); fill them or remove the rows"
        )


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


def _targets(tables: Sequence[NumberTable], as_numbers: bool) -> tuple[Sequence[_Targets], tuple[str, ...]]:
    """The targets of each file, and the class names; every class must occur in the first file."""
    first, numbers = tables[0], [found for table in tables if (found := _label_numbers(table)) is not None]
    if as_numbers and len(numbers) < len(tables):
        raise InputError(f"column {first.label} of {first.path} has text; a loss of numbers needs numbers")
    if len(numbers) < len(tables):
        labels = [table.labels for table in tables]
        classes = tuple(sorted(set(labels[0])))
        if len(classes) > MOST_CLASSES:
            raise InputError(
                f"{first.path} has {len(classes):,} classes in column {first.label}, more than {MOST_CLASSES:,}; name "
                "another column as label"
            )
    elif as_numbers or any((found % 1 != 0).any() for found in numbers):
        return [found.astype(np.float32) for found in numbers], ()
    else:
        for table, found in zip(tables, numbers, strict=True):
            for row in (int(found.argmin()), int(found.argmax())):
                if not 0 <= found[row] < MOST_CLASSES:
                    remedy = f"classes are 0 to {MOST_CLASSES - 1}; renumber them, or use --loss mse for a regression"
                    raise table.wrong_label(row, remedy)
        labels = [[str(int(number)) for number in found] for found in numbers]
        different = len(set(labels[0]))
        if different > 20 and 5 * different > len(first.labels):    # many, and few examples of each
            warnings.warn(
                f"column {first.label} of {first.path} has {different:,} different whole numbers in "
                f"{len(first.labels):,} rows, which count as classes; to predict numbers, add --loss mse",
                stacklevel=2,
            )
        classes = tuple(str(k) for k in range(1 + int(numbers[0].max())))
    seen = set(labels[0])
    for table, cells in zip(tables, labels, strict=True):
        for row, cell in enumerate(cells):
            if cell not in seen:
                raise table.wrong_label(row, f"{first.path} lacks it; add examples with it or remove the row")
    places = {name: place for place, name in enumerate(classes)}
    return [np.array([places[cell] for cell in cells], dtype=np.int64) for cells in labels], classes


def _label_numbers(table: NumberTable) -> NDArray[np.float64] | None:
    """The labels as finite numbers; None if some are text."""
    single = _floats(table.labels)
    if single is None:
        _check_missing(table.path, table.label, table.labels, table.lines)
        return None
    if not (finite := np.isfinite(single)).all():
        raise table.wrong_label(int(np.argmin(finite)), "it is not a finite float32: correct it or remove the row")
    return np.array(table.labels, dtype=np.float64)


# ---------------------------------------------------------------------------------------------- rows


@contextmanager
def _rows(path: Path, what: str) -> Iterator[tuple[_Row, Iterator[_Row]]]:
    """Open a file: its first row, and the other rows, which must have equally many cells; empty lines are skipped."""
    with opened(path, what) as content:
        text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
        tabs = ".tsv" in path.suffixes
        reader = csv.reader(text, csv.excel_tab, quoting=csv.QUOTE_NONE) if tabs else csv.reader(text, strict=True)
        rows = ((reader.line_num, [cell.strip() for cell in cells]) for cells in reader if cells)
        first = next(rows, None)
        if first is None:
            raise InputError(f"{path} holds no rows")

        def others(width: int) -> Iterator[_Row]:
            for line, cells in rows:
                if len(cells) != width:
                    raise InputError(
                        f"{path} has {len(cells)} columns in line {line}, but {width} in the header or first row; "
                        "correct the row or remove it"
                    )
                yield line, cells

        yield first, others(len(first[1]))


def _test_file(path: Path) -> Path | None:
    """The test file of a folder; None if there is none, or if the path is a file."""
    return next((file for part in ("test", "dev", "val") if (file := locate(path, part, SUFFIXES))), None)
