"""Labelled texts, and how they become rows of ids: tokenised once, then read from a cache."""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quasiglobal.common.files import write_tensors
from quasiglobal.data.dataset import Dataset, Examples
from quasiglobal.errors import InputError

LENGTH = 128
"""Tokens that a model sees of a text, unless told otherwise: the paper's."""


@dataclass(frozen=True, eq=False)
class Rows:
    """One split: m texts and their labels."""

    texts: list[str]
    y: Tensor
    """Labels 0, 1, …, int64 [m]."""
    columns: dict[str, NDArray[Any]] = field(default_factory=dict)
    """Further columns of the file, each of length m."""

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Training and test texts, before any model's tokenizer has seen them."""

    name: str
    train: Rows
    test: Rows
    classes: tuple[str, ...]

    def terms(self) -> dict[str, list[Any]]:
        """What several owners of such texts have to agree on; the shape is in tokens."""
        return {"classes": list(self.classes), "shape": [LENGTH]}


def to_test(name: str, rows: Rows, classes: Sequence[str]) -> Corpus:
    """Texts that nothing is learned from."""
    return Corpus(name, Rows([], torch.zeros(0, dtype=torch.int64)), rows, tuple(classes))


class Tokenizer(Protocol):
    """What is needed of a tokenizer; those of transformers have it."""

    @property
    def pad_token_id(self) -> int | None:
        """The id that fills the rest of a row."""

    def __call__(self, texts: list[str], *, truncation: bool, max_length: int) -> Mapping[str, Any]:
        """`input_ids`, a list for each text, cut to `max_length`."""

    def get_vocab(self) -> Mapping[str, int]:
        """The id of each token."""


def tokenised(corpus: Corpus, tokenizer: Tokenizer, length: int, cache: Path | None) -> Dataset:
    """The corpus as ids [m, length], padded; longer texts are cut, and how many is said.

    What was tokenised before is taken from the cache, a file for each fingerprint of (texts, tokenizer, length); it is
    written at once, when it is whole.
    """
    if length < 2:
        raise InputError(f"a text needs 2 tokens or more, got {length}; give shape as one number, such as 128")
    pad = tokenizer.pad_token_id
    if pad is None:
        raise InputError(
            f"the tokenizer for {corpus.name} has no padding token, by which a model knows where a text ends; set one "
            "(pad_token in its tokenizer_config.json), or take another model"
        )
    splits = {"train": corpus.train, "test": corpus.test}
    path = cache / f"{fingerprint_of(corpus, tokenizer, length)}.safetensors" if cache else None
    found = _cached(path, splits, length) if path else None
    if found is None:
        ids = {name: _ids(rows.texts, tokenizer, length, pad) for name, rows in splits.items()}
        for name, (x, _) in ids.items():
            if bare := int((x == pad).all(dim=1).sum()):
                raise InputError(f"the tokenizer finds nothing in {bare} of the {name} texts of {corpus.name}")
        found = {name: x for name, (x, _) in ids.items()}, sum(cut for _, cut in ids.values())
        if path:
            _keep(path, *found)
    tensors, cut = found
    if cut:
        warnings.warn(
            f"{cut:,} of the {len(corpus.train) + len(corpus.test):,} texts of {corpus.name} are longer than "
            f"{length} tokens and were cut; --shape takes another length, up to the model's own",
            stacklevel=2,
        )
    train, test = (Examples(tensors[name], rows.y, rows.columns) for name, rows in splits.items())
    return Dataset(corpus.name, train, test, corpus.classes, 1.0, (), (), "none", pad=pad)


def check_vocabulary(data: Dataset, size: int, model: str) -> None:
    """Refuse texts with an id that a model of `size` tokens does not have."""
    largest = max(int(split.x.max()) for split in (data.train, data.test) if split.x.numel())
    if largest >= size:
        raise InputError(
            f"{data.name} has the token {largest}, but {model} knows {size}, from 0 to {size - 1}; "
            "its tokenizer is another model's"
        )


def cache_folder() -> Path:
    """Where tokenised texts are kept: $QG_CACHE, or quasiglobal in the user's folder for such things."""
    own = os.environ.get("QG_CACHE")
    return Path(os.path.expanduser(own or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/quasiglobal")) / "tokens"


AT_ONCE = 10_000
"""Texts given to the tokenizer at a time."""


def _ids(texts: Sequence[str], tokenizer: Tokenizer, length: int, pad: int) -> tuple[Tensor, int]:
    """[m, length] of the texts, and how many of them were cut."""
    x, cut = np.full((len(texts), length), pad, np.int32), 0
    for first in range(0, len(texts), AT_ONCE):
        some = list(texts[first : first + AT_ONCE])
        rows = list(tokenizer(some, truncation=True, max_length=length + 1)["input_ids"])
        longer = [i for i, row in enumerate(rows) if len(row) > length]
        if longer:                                          # again, for the tokenizer to end them as it should
            again = tokenizer([some[i] for i in longer], truncation=True, max_length=length)["input_ids"]
            for i, row in zip(longer, again, strict=True):
                rows[i] = row
        cut += len(longer)
        for i, row in enumerate(rows):
            x[first + i, : len(row)] = row
    return torch.from_numpy(x), cut


def fingerprint_of(corpus: Corpus, tokenizer: Tokenizer, length: int) -> str:
    """Of all that the ids depend on."""
    digest = hashlib.sha256(json.dumps([_described(tokenizer), tokenizer.pad_token_id, length]).encode())
    for rows in (corpus.train, corpus.test):
        digest.update(len(rows).to_bytes(8, "little"))
        for text in rows.texts:
            content = text.encode("utf-8", "surrogatepass")
            digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:32]


def _described(tokenizer: Tokenizer) -> object:
    """What a tokenizer does: all of its own description, but for how long it was last asked to cut."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return [type(tokenizer).__qualname__, sorted(tokenizer.get_vocab().items())]
    described: dict[str, object] = json.loads(backend.to_str())
    return {name: value for name, value in described.items() if name not in ("truncation", "padding")}


def _cached(path: Path, splits: Mapping[str, Rows], length: int) -> tuple[dict[str, Tensor], int] | None:
    """The ids in a file of the cache, and how many texts were cut; None if it is not there, or not whole."""
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


def _keep(path: Path, tensors: dict[str, Tensor], cut: int) -> None:
    """Write a file of the cache; where that is impossible, the texts are tokenised again the next time."""
    try:
        write_tensors(path, tensors, {"cut": str(cut)})
    except InputError as error:
        warnings.warn(f"the tokenised texts are not kept: {error}; QG_CACHE names another folder", stacklevel=3)
