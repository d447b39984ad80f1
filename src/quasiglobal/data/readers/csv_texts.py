"""Texts from CSV files, plain or gzipped: AG News, SST-2, and a user's own.

X. Zhang, J. Zhao, Y. LeCun: Character-level convolutional networks for text classification. NeurIPS 2015.
R. Socher et al.: Recursive deep models for semantic compositionality over a sentiment treebank. EMNLP 2013.
"""

from __future__ import annotations

import csv
import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path

import numpy as np
import torch

from quasiglobal.common.files import reading
from quasiglobal.data.dataset import held_out
from quasiglobal.data.readers import fits, locate, member, opened
from quasiglobal.data.texts import Corpus, Rows, to_test
from quasiglobal.errors import InputError

SUFFIXES = (".csv", ".csv.gz", ".tsv", ".tsv.gz")

AGNEWS = ("World", "Sports", "Business", "Sci/Tech")
SST2 = ("negative", "positive")

LABELS = ("label", "class", "class index")
"""Accepted header names of the label; a first row without any of these is not a header."""

TEXTS = (("text",), ("sentence",), ("title", "description"))
"""Accepted header names of the text, in order of precedence."""

MOST_CLASSES = 1_000
"""Limit on classes; a column with more values is not a label."""


def agnews(folder: Path, memory_limit: float) -> Corpus:
    """News of four classes: 120,000 training and 7,600 test texts, or a subset of them."""
    train, test = (_table(member(folder, name, SUFFIXES), memory_limit) for name in ("train", "test"))
    return Corpus("agnews", train.rows(AGNEWS), test.rows(AGNEWS), AGNEWS)


def sst2(folder: Path, memory_limit: float) -> Corpus:
    """Phrases of film reviews: 67,349 to train, the 872 of `dev` to test; GLUE does not publish the test labels."""
    train, test = (_table(member(folder, name, SUFFIXES), memory_limit) for name in ("train", "dev"))
    return Corpus("sst2", train.rows(SST2), test.rows(SST2), SST2)


def read(path: Path, memory_limit: float, testing: bool = False) -> Corpus:
    """Read a user's file, of which a fixed fifth is held out, or a folder with train.csv and test.csv (dev, val).

    With `testing`, all rows of a file, or of a folder's test.csv, are test texts in file order.

    The columns are (label, text) or (class, title, description). With a header, columns may have any order, and other
    columns are kept. Labels are names, or numbers from 0; numbers in a `class` column with title and description start
    at 1, as in AG News. Files may be gzipped. Their separator is a tab if the name ends with .tsv or .tsv.gz.
    """
    name, is_folder = f"csv:{path}", os.path.isdir(path)
    if testing or not is_folder:
        table = _table(_tests_of(path) if is_folder else path, memory_limit)
        classes = table.classes()
        rows = table.rows(classes)
        if testing:
            return to_test(name, rows, classes)
        kept, tested = held_out(len(rows), path)
        return Corpus(name, rows.at(kept), rows.at(tested), classes)
    tests = _tests_of(path)
    train, test = (_table(file, memory_limit) for file in (member(path, "train", SUFFIXES), tests))
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
    with lines_of(path, "a CSV file of texts") as lines:
        rows = list(lines)
    if not rows:
        raise InputError(f"{path} holds no rows")
    fits(sum(len(cell) for _, cells in rows for cell in cells), memory_limit, path)
    names = [cell.strip().casefold() for cell in rows[0][1]]
    parts = _text_columns(names)
    if parts is None and any(name in LABELS for name in names):
        raise InputError(f"{path} has the columns {', '.join(names)}; it needs one called text")
    texts = []
    for line, cells in rows[1:] if parts is not None else rows:
        if len(cells) != len(names):
            raise InputError(f"{path} has {len(cells)} columns in line {line}, but {len(names)} in the first row")
        texts.append(" ".join(cells[i].strip() for i in ([-1] if parts is None else parts)).strip())
        if not texts[-1]:
            raise InputError(f"{path} has no text in line {line}; remove it")
    if not texts:
        raise InputError(f"{path} holds no rows")
    return texts


def _tests_of(folder: Path) -> Path:
    """The test file of a folder."""
    found = [file for part in ("test", "dev", "val") if (file := locate(folder, part, SUFFIXES))]
    if not found:
        raise InputError(f"{folder} has neither test.csv nor dev.csv nor val.csv, plain or .gz; add one or name a file")
    return found[0]


@dataclass
class LabelledTexts:
    """Rows of a file, with the number of the line in which each ends."""

    path: Path
    first: int
    """Lowest label, if labels are numbers."""
    labels: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    lines: list[int] = field(default_factory=list)
    columns: dict[str, list[str]] = field(default_factory=dict)

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
        places = dict(zip(classes, range(len(classes)), strict=True))
        numbers = self.numbers
        found = [places.get(label, -1) for label in self.labels] if numbers is None else numbers
        for place, label, line in zip(found, self.labels, self.lines, strict=True):
            if not 0 <= place < len(classes):
                span = f"{self.first} to {self.first + len(classes) - 1}"
                known = ", ".join(classes) if numbers is None else span
                raise InputError(f"{self.path} has the label {label!r} in line {line}; labels are {known}")
        columns = {name: np.array(values) for name, values in self.columns.items()}
        return Rows(self.texts, torch.tensor(found, dtype=torch.int64), columns)


def _table(path: Path, memory_limit: float) -> LabelledTexts:
    """Read a file; check that every row has a label and a text."""
    with lines_of(path, "a CSV file of texts") as lines:
        first = next(lines, None)
        if first is None:
            raise InputError(f"{path} holds no rows")
        names = [cell.strip().casefold() for cell in first[1]]
        header = any(name in LABELS for name in names)
        if not header:
            names = _usual(path, len(names))
        label = next(names.index(name) for name in LABELS if name in names)
        parts = _text_columns(names)
        if parts is None:
            there = ", ".join(names)
            raise InputError(
                f"{path} has the columns {there}; it needs {names[label]} and text, or class, title, description"
            )
        table = LabelledTexts(path, first=int(len(parts) == 2))
        others = [i for i in range(len(names)) if i != label and i not in parts]
        columns: list[list[str]] = [[] for _ in others]
        size = 0
        for line, cells in lines if header else chain([first], lines):
            if len(cells) != len(names):
                raise InputError(f"{path} has {len(cells)} columns in line {line}, but {len(names)} in the first row")
            text = " ".join(cells[i].strip() for i in parts).strip()
            table.labels.append(cells[label].strip())
            table.texts.append(text)
            table.lines.append(line)
            for column, i in zip(columns, others, strict=True):
                column.append(cells[i].strip())
            size += sum(map(len, cells))
            fits(size, memory_limit, path)
    if len(table.texts) > 1 and all(map(_is_number, (*table.texts[1:], *table.labels[1:]))):
        raise InputError(f"{path} has no column of text; for a table of numbers name its target with --label COLUMN")
    if len(table.labels) > 1 and not _is_number(table.labels[0]) and all(map(_is_number, table.labels[1:])):
        raise InputError(
            f"{path} has numbers as labels, but {table.labels[0]!r} first; "
            "if that row is a header, call the columns label and text"
        )
    table.columns = {names[i]: column for column, i in zip(columns, others, strict=True)}
    if not table.texts:
        raise InputError(f"{path} holds no rows")
    for what, cells in (("text", table.texts), ("label", table.labels)):
        if empty := [line for line, cell in zip(table.lines, cells, strict=True) if not cell]:
            raise InputError(f"{path} has no {what} in line {empty[0]} ({len(empty):,} such rows in all); remove them")
    return table


@contextmanager
def lines_of(path: Path, what: str) -> Iterator[Iterator[tuple[int, list[str]]]]:
    """Iterate over (line number, cells): the line in which each row ends; empty lines are skipped."""
    tabs = any(ending == ".tsv" for ending in path.suffixes)
    with opened(path, what) as content:
        text = io.TextIOWrapper(content, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, csv.excel_tab, quoting=csv.QUOTE_NONE) if tabs else csv.reader(text, strict=True)
        yield ((reader.line_num, cells) for cells in reader if cells)


def _usual(path: Path, columns: int) -> list[str]:
    """Default column names of a file without a header."""
    usual = {2: ["label", "text"], 3: ["class", "title", "description"]}
    if columns not in usual:
        raise InputError(
            f"{path} has no column called label or class, and {columns} columns, separated by commas (in .tsv: tabs); "
            "for a table of numbers, name its target with --label COLUMN; texts need (label, text) or (class, title, "
            "description)"
        )
    return usual[columns]


def _text_columns(names: Sequence[str]) -> list[int] | None:
    """Indices of the text columns; None if there are none."""
    return next(([names.index(name) for name in known] for known in TEXTS if set(known) <= set(names)), None)


def _is_number(label: str) -> bool:
    """Whether the label is a whole number of at most 9 characters."""
    return label.isascii() and label.removeprefix("-").isdecimal() and len(label) < 10
