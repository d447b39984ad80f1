"""CSV files as version 2 reads them: every number bit for bit, every array with its type and its order.

    python tests/golden/test_version2_csv.py            writes the fixtures
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quasiglobal.data.sources import corpus, load_table  # what `--data csv:FILE --label COLUMN` and `csv:FILE` use

HERE = Path(__file__).parent / "version2" / "csv"

TABLES: dict[str, tuple[str, str, dict[str, bool]]] = {
    "hard": ("hard.csv", "label", {}),
    "hard as numbers": ("hard.csv", "a", {"numbers": True}),
    "decimals": ("decimals.csv", "y", {}),
    "decimals to test": ("decimals.csv", "x1", {"testing": True}),
    "whole": ("whole.csv", "y", {}),
    "whole as numbers": ("whole.csv", "y", {"numbers": True}),
    "whole by another label": ("whole.csv", "b", {}),
    "whole floats": ("whole-floats.csv", "y", {}),
    "negative numbers": ("negative.csv", "y", {"numbers": True}),
    "byte order mark and CRLF": ("bom-crlf.csv", "label", {}),
    "quotes": ("quotes.csv", "label", {}),
    "a quoted label": ("quotes.csv", 'a "quoted" name', {}),
    "spaces": ("spaces.csv", "label", {}),
    "carriage returns": ("old-mac.csv", "label", {}),
    "texts that look like numbers": ("texts-that-look-like-numbers.csv", "label", {}),
    "labels of text": ("labels-of-text.csv", "label", {}),
    "tabs": ("tabs.tsv", "label", {}),
    "gzipped tabs": ("tabs.tsv.gz", "label", {}),
    "gzipped": ("gzipped.csv.gz", "label", {}),
    "gzipped in two parts": ("two-parts.csv.gz", "label", {}),
    "gzipped without its suffix": ("gzipped-without-its-suffix.csv", "label", {}),
    "many columns": ("many-columns.csv.gz", "label", {}),
    "many rows": ("many-rows.csv.gz", "label", {}),
    "many rows to test": ("many-rows.csv.gz", "b", {"testing": True, "numbers": True}),
    "a folder": ("folder", "label", {}),
    "a folder with dev.tsv": ("dev", "label", {}),
    "a folder without a test file": ("alone", "label", {}),
}
"""The file, the column of labels, and options."""

TEXTS: dict[str, tuple[str, bool]] = {
    "a header": ("texts/header.csv", False),
    "a header, to test": ("texts/header.csv", True),
    "columns": ("texts/columns.csv", False),
    "no header": ("texts/no-header.csv", False),
    "news": ("texts/news.csv", False),
    "a class index": ("texts/class-index.csv", False),
    "sentences": ("texts/sentences.tsv", False),
    "gzipped sentences": ("texts/gzipped.tsv.gz", False),
    "a folder": ("texts/folder", False),
    "a folder, to test": ("texts/folder", True),
    "classes that do not occur": ("texts/gaps.csv", False),
}
"""The file, and whether all of it is to test."""


def read_table(which: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of a table."""
    file, label, options = TABLES[which]
    data = load_table(f"csv:{HERE / 'files' / file}", label, **options)
    facts = {"classes": list(data.classes), "scale": data.scale, "mean": list(data.mean), "std": list(data.std)}
    return facts | {"features": list(data.train.features)}, arrays_of(data.train, data.test, "x")


def read_texts(which: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The facts and the arrays of a file of texts."""
    file, testing = TEXTS[which]
    data = corpus(f"csv:{HERE / 'files' / file}", testing=testing)
    facts = {"classes": list(data.classes), "train": data.train.texts, "test": data.test.texts}
    return facts, arrays_of(data.train, data.test)


def arrays_of(train: Any, test: Any, *names: str) -> dict[str, np.ndarray]:
    return {
        f"{split} {name}": np.asarray(values)
        for split, part in (("train", train), ("test", test))
        for name, values in [*((name, getattr(part, name)) for name in ("y", *names)), *part.columns.items()]
    }


def assert_as_recorded(kind: str, which: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
    before = json.loads((HERE / "facts.json").read_text())[kind][which]
    assert facts.keys() == before.keys()
    for name, value in before.items():
        if name in ("mean", "std"):                         # sums, which CPUs of different kinds round differently
            assert facts[name] == pytest.approx(value, rel=1e-12), name
        else:
            assert facts[name] == value, name
    with np.load(HERE / "arrays.npz") as recorded:
        prefix = f"{kind} {which}: "
        expected = {name.removeprefix(prefix): recorded[name] for name in recorded if name.startswith(prefix)}
    assert list(arrays) == list(expected)
    for name, value in expected.items():
        assert (arrays[name].dtype, arrays[name].shape) == (value.dtype, value.shape), name
        assert arrays[name].tobytes() == value.tobytes(), name       # also the sign of 0


@pytest.mark.parametrize("which", TABLES)
def test_a_table_of_numbers_is_read_bit_for_bit_as_before(which):
    assert_as_recorded("table", which, *read_table(which))


@pytest.mark.parametrize("which", TEXTS)
def test_a_file_of_texts_is_read_as_before(which):
    assert_as_recorded("texts", which, *read_texts(which))


def write() -> None:
    facts: dict[str, dict[str, Any]] = {"table": {}, "texts": {}}
    arrays: dict[str, np.ndarray] = {}
    for kind, cases, read in (("table", TABLES, read_table), ("texts", TEXTS, read_texts)):
        for which in cases:
            facts[kind][which], found = read(which)
            arrays |= {f"{kind} {which}: {name}": value for name, value in found.items()}
    (HERE / "facts.json").write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    np.savez_compressed(HERE / "arrays.npz", **arrays)


if __name__ == "__main__":
    write()
