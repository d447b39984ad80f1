"""Texts: labelled, and converted to ids once (tokenised)."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quasiglobal.common.files import write_tensors
from quasiglobal.data.dataset import Dataset, Examples, Indices
from quasiglobal.errors import InputError

LENGTH = 128
"""Default length of a text in tokens, as in the paper."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One split: m texts and their labels."""

    texts: list[str]
    y: Tensor
    """Labels 0, 1, …, int64 [m]."""
    columns: dict[str, NDArray[np.generic]] = field(default_factory=dict)
    """Additional columns of the file, each of length m."""

    def __len__(self) -> int:
        return len(self.texts)

    def at(self, rows: Indices) -> Rows:
        """The texts in these rows."""
        columns = {name: column[rows] for name, column in self.columns.items()}
        return Rows([self.texts[row] for row in rows], self.y[torch.from_numpy(rows)], columns)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and test texts before tokenisation."""

    name: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]

    def terms(self) -> dict[str, list[object]]:
        """Properties on which all owners of such texts must agree; the shape is in tokens."""
        return {"classes": list(self.classes), "shape": [LENGTH]}


def to_test(name: str, rows: Rows, classes: Sequence[str]) -> Corpus:
    """Build a corpus of test texts only."""
    return Corpus(name, Rows([], torch.zeros(0, dtype=torch.int64)), rows, tuple(classes))


class Tokenizer(Protocol):
    """Tokenizer interface; the tokenizers of `transformers` implement it."""

    @property
    def pad_token_id(self) -> int | None:
        """The padding id."""

    def __call__(self, texts: list[str], *, truncation: bool, max_length: int) -> Mapping[str, Sequence[list[int]]]:
        """Return `input_ids`, one list per text, truncated to `max_length`."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token."""


def tokenised(corpus: Corpus, tokenizer: Tokenizer, length: int, cache: Path | None) -> Dataset:
    """Tokenise the corpus to padded ids [m, length]; truncate longer texts, and warn with their number.

    Ids are read from the cache if present: one file per `ids_key`, written atomically.
    """
    if length < 2:
        raise InputError(f"a text needs 2 tokens or more, got {length}; give shape as one number, such as 128")
    pad = tokenizer.pad_token_id
    if pad is None:
        raise InputError(
            f"the tokenizer for {corpus.name} has no padding token, which marks the end of a text; set pad_token in "
            "its tokenizer_config.json, or use another model"
        )
    splits = {"train": corpus.train, "test": corpus.test}
    path = cache / f"{ids_key(corpus, tokenizer, length)}.safetensors" if cache else None
    found = _cached(path, splits, length) if path else None
    if found is None:
        ids = {name: _ids(rows.texts, tokenizer, length, pad) for name, rows in splits.items()}
        for name, (x, _) in ids.items():
            if bare := int((x == pad).all(dim=1).sum()):
                raise InputError(f"the tokenizer finds no tokens in {bare} of the {name} texts of {corpus.name}")
        found = {name: x for name, (x, _) in ids.items()}, sum(cut for _, cut in ids.values())
        if path:
            try:
                write_tensors(path, found[0], {"cut": str(found[1])})
            except InputError as error:
                warnings.warn(
                    f"the tokenised texts are not cached: {error}; set QG_CACHE to another folder", stacklevel=2
                )
    tensors, cut = found
    if cut:
        warnings.warn(
            f"{cut:,} of the {len(corpus.train) + len(corpus.test):,} texts of {corpus.name} are longer than "
            f"{length} tokens and were cut; set another length with --shape, up to the model's maximum",
            stacklevel=2,
        )
    train, test = (Examples(tensors[name], rows.y, rows.columns) for name, rows in splits.items())
    return Dataset(corpus.name, train, test, corpus.classes, 1.0, (), (), "none", pad=pad)


def check_vocabulary(data: Dataset, size: int, model: str) -> None:
    """Raise an error if an id is outside of the vocabulary of a model with `size` tokens."""
    largest = max(int(split.x.max()) for split in (data.train, data.test) if split.x.numel())
    if largest >= size:
        raise InputError(
            f"{data.name} has the token id {largest}, but {model} has {size} ids, from 0 to {size - 1}; "
            "the tokenizer belongs to another model"
        )


AT_ONCE = 10_000
"""Texts per call of the tokenizer."""


def _ids(texts: Sequence[str], tokenizer: Tokenizer, length: int, pad: int) -> tuple[Tensor, int]:
    """Ids [m, length] of the texts, and the number of truncated texts."""
    x, cut = np.full((len(texts), length), pad, np.int32), 0
    for first in range(0, len(texts), AT_ONCE):
        some = list(texts[first : first + AT_ONCE])
        rows = list(tokenizer(some, truncation=True, max_length=length + 1)["input_ids"])
        longer = [i for i, row in enumerate(rows) if len(row) > length]
        if longer:                                          # again, so that the tokenizer adds its end tokens
            again = tokenizer([some[i] for i in longer], truncation=True, max_length=length)["input_ids"]
            for i, row in zip(longer, again, strict=True):
                rows[i] = row
        cut += len(longer)
        for i, row in enumerate(rows):
            x[first + i, : len(row)] = row
    return torch.from_numpy(x), cut


def ids_key(corpus: Corpus, tokenizer: Tokenizer, length: int) -> str:
    """Hash of all inputs that determine the ids."""
    digest = hashlib.sha256(json.dumps([_described(tokenizer), tokenizer.pad_token_id, length]).encode())
    for rows in (corpus.train, corpus.test):
        digest.update(len(rows).to_bytes(8, "little"))
        for text in rows.texts:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]


def _described(tokenizer: Tokenizer) -> object:
    """The tokenizer's configuration, without truncation and padding, which its last call may have changed."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    described: dict[str, object] = json.loads(backend.to_str())
    return {name: value for name, value in described.items() if name not in ("truncation", "padding")}


def _cached(path: Path, splits: Mapping[str, Rows], length: int) -> tuple[dict[str, Tensor], int] | None:
    """The ids in a cache file, and the number of truncated texts; None if it is missing or damaged."""
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in splits}
            cut = int((file.metadata() or {})["cut"])
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    fits = all(
        tensors[name].shape == (len(rows), length) and tensors[name].dtype == torch.int32
        for name, rows in splits.items()
    )
    return (tensors, cut) if fits else None
