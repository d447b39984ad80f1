"""CSV tables of numbers: read exactly; every bad table raises a one-sentence error that names the file."""

import gzip

import numpy as np
import pytest
import torch

from quasiglobal.data.readers import csv_files as numbers
from quasiglobal.data.readers.csv_files import read_table as read
from quasiglobal.errors import InputError

LIMIT = 1e9

TABLE = "a,site,b,label\n1,north,-0.5,0\n2.5,south,1e3,1\n+3,north,.5,1\n4,east,5.,0\n5,east,0,0\n"


def write(path, content, zipped=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    return path


def together(splits):
    """x, y and columns of both splits, in the order of the first feature."""
    x, y = (torch.cat([getattr(part, name) for part in splits[:2]]) for name in ("x", "y"))
    order = x[:, 0].argsort()
    columns = {name: np.concatenate([part.columns[name] for part in splits[:2]]) for name in splits.train.columns}
    return x[order], y[order], {name: column[order.numpy()].tolist() for name, column in columns.items()}


def refused(path, *parts, label="label", limit=LIMIT):
    with pytest.raises(InputError) as caught:
        read(path, label, limit)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert str(part) in sentence, sentence


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("content", [TABLE, "\ufeff" + TABLE, TABLE.replace("\n", "\r\n"), TABLE.replace(",", " , ")])
def test_numbers_are_features_text_is_a_column_and_a_fifth_is_held_out(tmp_path, content, zipped):
    splits = read(write(tmp_path / ("t.csv.gz" if zipped else "t.csv"), content, zipped), "label", LIMIT)
    assert (len(splits.train), len(splits.test), splits.classes) == (4, 1, ("0", "1"))
    x, y, columns = together(splits)
    assert (x.dtype, y.dtype) == (torch.float32, torch.int64)
    assert x.tolist() == [[1, -0.5], [2.5, 1e3], [3, 0.5], [4, 5], [5, 0]]
    assert y.tolist() == [0, 1, 1, 0, 0]
    assert columns == {"site": ["north", "south", "north", "east", "east"]}


def test_tabs_separate_the_columns_of_a_tsv(tmp_path):
    splits = read(write(tmp_path / "t.tsv", TABLE.replace(",", "\t")), "label", LIMIT)
    assert together(splits)[1].tolist() == [0, 1, 1, 0, 0]


def test_the_held_out_fifth_is_always_the_same(tmp_path):
    content = "x,y\n" + "".join(f"{k},{k % 3}\n" for k in range(100))
    one, two = (read(write(tmp_path / name, content), "y", LIMIT) for name in ("a.csv", "b.csv"))
    assert torch.equal(one.test.x, two.test.x)
    assert len(one.test) == 20
    assert (one.train.x[:, 0] % 3 == one.train.y).all()


def test_names_of_classes_are_sorted(tmp_path):
    splits = read(write(tmp_path / "t.csv", "kind,x\nsetosa,1\nvirginica,2\nsetosa,3\nAlba,4\n"), "kind", LIMIT)
    assert splits.classes == ("Alba", "setosa", "virginica")
    assert together(splits)[1].tolist() == [1, 2, 1, 0]


def test_whole_numbers_are_classes_in_any_notation_and_gaps_are_classes_too(tmp_path):
    splits = read(write(tmp_path / "t.csv", "x,label\n1,0.0\n2,3\n3,1e0\n"), "label", LIMIT)
    assert splits.classes == ("0", "1", "2", "3")
    assert together(splits)[1].tolist() == [0, 3, 1]


def test_a_fraction_makes_it_a_regression(tmp_path):
    splits = read(write(tmp_path / "t.csv", "x,price\n1,-3\n2,250000\n3,0.5\n"), "price", LIMIT)
    x, y, _ = together(splits)
    assert splits.classes == ()
    assert (y.dtype, y.tolist()) == (torch.float32, [-3, 250000, 0.5])
    assert x.shape == (3, 1)


@pytest.mark.parametrize("name", ["test.csv", "test.csv.gz", "val.csv"])
def test_a_folder_has_a_file_for_each_split(tmp_path, name):
    write(tmp_path / "train.csv", TABLE)
    write(tmp_path / name, "a,site,b,label\n9,west,8,1\n", zipped=name.endswith("gz"))
    splits = read(tmp_path, "label", LIMIT)
    assert splits.train.x[:, 0].tolist() == [1, 2.5, 3, 4, 5]
    assert (splits.test.x.tolist(), splits.test.y.tolist()) == ([[9, 8]], [1])
    assert splits.test.columns["site"].tolist() == ["west"]


def test_a_folder_without_a_test_file_holds_out_a_fifth(tmp_path):
    write(tmp_path / "train.csv", TABLE)
    splits = read(tmp_path, "label", LIMIT)
    assert (len(splits.train), len(splits.test)) == (4, 1)


def test_whole_training_labels_and_fractions_in_the_test_are_a_regression(tmp_path):
    write(tmp_path / "train.csv", "x,y\n1,2\n2,3\n")
    write(tmp_path / "test.csv", "x,y\n1,2.5\n")
    splits = read(tmp_path, "y", LIMIT)
    assert (splits.classes, splits.train.y.tolist(), splits.test.y.tolist()) == ((), [2, 3], [2.5])


def test_a_column_is_text_if_any_row_is_even_after_many_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(numbers, "CHUNK", 3)
    rows = [(k, f"{k}" if k < 9 else "9a", f"{k}_{k}", k % 2) for k in range(10)]
    content = "x,code,pair,label\n" + "".join(",".join(map(str, row)) + "\n" for row in rows)
    splits = read(write(tmp_path / "t.csv", content), "label", LIMIT)
    x, y, columns = together(splits)
    assert x.tolist() == [[k] for k in range(10)]
    assert y.tolist() == [k % 2 for k in range(10)]
    assert columns == {"code": [row[1] for row in rows], "pair": [row[2] for row in rows]}


def test_nan_is_a_word_in_a_column_of_text(tmp_path):
    splits = read(write(tmp_path / "t.csv", "x,name,label\n1,Nan,0\n2,Bob,1\n3,7,1\n"), "label", LIMIT)
    assert together(splits)[2] == {"name": ["Nan", "Bob", "7"]}


def test_numbers_may_be_names_of_columns(tmp_path):
    splits = read(write(tmp_path / "t.csv", "0,1,target\n1,2,0\n3,4,1\n"), "target", LIMIT)
    assert together(splits)[0].tolist() == [[1, 2], [3, 4]]


BAD = {
    "empty file": ("", "holds no rows"),
    "header only": ("a,label\n", "holds no rows"),
    "one row": ("a,label\n1,0\n", "2 examples or more"),
    "no header": ("5.1,3.5,setosa\n4.9,3.0,setosa\n", "numbers in its first row", "add a header"),
    "near name": ("a,labels\n1,0\n", "'label'", "did you mean 'labels'?"),
    "near name beside numbers": ("0,1,labels\n1,0,1\n", "did you mean 'labels'?"),
    "no label": ("a,b\n1,0\n", "unknown column", "known: a, b"),
    "other separator": ("a;label\n1;0\n", "one column, 'a;label'", "commas"),
    "two names": ("a,b,a,label\n1,2,3,0\n", "two columns 'a'", "rename"),
    "index of pandas": (",a,label\n0,1,0\n", "no name for column 1", "remove it"),
    "short row": ("a,b,label\n1,2,0\n1,0\n", "2 columns in line 3", "3 in the header"),
    "long row": ("a,b,label\n1,2,0\n1,2,0,7\n", "4 columns in line 3"),
    "empty cell": ("a,b,label\n1,2,0\n1, ,0\n", "empty cell in column b, line 3", "fill it"),
    "empty label": ("a,b,label\n1,2,\n", "empty cell in column label, line 2"),
    "empty text": ("a,s,label\n1,u,0\n1,,0\n", "empty cell in column s, line 3"),
    "nan": ("a,label\n1,0\nnan,1\n", "'nan' in column a, line 3", "not a finite float32"),
    "inf": ("a,label\n1,0\n-inf,1\n", "'-inf' in column a, line 3"),
    "too large": ("a,label\n1,0\n1e39,1\n", "'1e39' in column a, line 3"),
    "missing": ("a,label\n1,0\n2,0\nNA,1\n?,1\n", "'NA' for a number in column a, line 4", "2 such rows"),
    "missing label": ("a,label\n1,0\n2,?\n", "'?' for a number in column label, line 3"),
    "nan label": ("a,label\n1,0\n2,nan\n", "label 'nan' in column label, line 3", "finite"),
    "negative label": ("a,label\n1,1\n2,-1\n", "label '-1' in column label, line 3", "renumber"),
    "large label": ("a,label\n1,1\n2,250000\n", "label '250000'", "line 3", "regression"),
    "many names": ("a,label\n" + "".join(f"1,n{k}\n" for k in range(1001)), "1,001 classes in column label"),
    "no features": ("s,label\nu,0\nv,1\n", "no column of numbers besides label"),
    "open quote": ('a,label\n1,"0\n', "t.csv"),
    "not utf-8": ("a,label\n1,ä\n".encode("latin-1"), "not UTF-8"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_tables_are_refused_in_one_sentence(tmp_path, case):
    content, *parts = BAD[case]
    path = write(tmp_path / "t.csv", content)
    refused(path, path, *parts)


BAD_PAIRS = {
    "fewer columns": ("a,b,label\n1,2,0\n", "a,label\n1,0\n", "test.csv has 2 columns", "train.csv has 3"),
    "another name": ("a,b,label\n1,2,0\n", "a,c,label\n1,2,0\n", "'c' as column 2", "'b'", "same header"),
    "text in the test": ("a,b,label\n1,2,0\n", "a,b,label\n1,2,0\n1,x,0\n", "'x' in column b, line 3", "only numbers"),
    "text in training": ("a,b,label\n1,x,0\n", "a,b,label\n1,2,0\n", "train.csv has the text 'x'", "test.csv has only"),
    "unseen name": ("a,label\n1,u\n2,v\n", "a,label\n1,u\n1,w\n", "test.csv has the label 'w'", "line 3", "lacks it"),
    "unseen number": ("a,label\n1,0\n2,2\n", "a,label\n1,1\n", "test.csv has the label '1'", "line 2", "lacks it"),
    "larger number": ("a,label\n1,0\n2,1\n", "a,label\n1,5\n", "label '5'", "lacks it"),
    "names for numbers": ("a,label\n1,0\n2,1\n", "a,label\n1,u\n", "label 'u'", "lacks it"),
    "no label": ("a,label\n1,0\n", "a,b\n1,0\n", "test.csv"),
    "empty test": ("a,label\n1,0\n", "a,label\n", "test.csv holds no rows"),
}


@pytest.mark.parametrize("case", BAD_PAIRS)
def test_a_test_file_that_does_not_fit_is_refused_in_one_sentence(tmp_path, case):
    train, test, *parts = BAD_PAIRS[case]
    write(tmp_path / "train.csv", train)
    write(tmp_path / "test.csv", test)
    refused(tmp_path, *parts)


def test_missing_files_are_named(tmp_path):
    refused(tmp_path, f"{tmp_path} has no train.csv")
    refused(tmp_path / "none.csv", tmp_path / "none.csv", "No such file")


def test_a_broken_gzip_file_is_named(tmp_path):
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(TABLE.encode() * 50)[:-20])
    refused(path, path)


@pytest.mark.parametrize("content", ["x,label\n" + "1,0\n" * 999, "x,s,label\n" + f"1,{'s' * 9999},0\n" * 9])
def test_tables_beyond_the_memory_limit_are_refused(tmp_path, content):
    refused(write(tmp_path / "t.csv", content), "memory_limit", limit=9_000)


def test_tables_of_many_chunks_are_read_bit_for_bit(tmp_path):
    m = 2 * numbers.CHUNK + 5
    values = np.random.default_rng(0).normal(size=(m, 5)).astype(np.float32)
    values[:, 0] = np.arange(m)
    content = "a,b,c,d,e,label\n" + "".join(",".join(map(str, row)) + f",{k % 7}\n" for k, row in enumerate(values))
    x, y, _ = together(read(write(tmp_path / "t.csv", content), "label", LIMIT))
    assert np.array_equal(x.numpy(), values)
    assert np.array_equal(y.numpy(), np.arange(m) % 7)


def test_many_whole_numbers_are_warned_of(tmp_path):
    (tmp_path / "t.csv").write_text("age,cost\n" + "\n".join(f"{k},{3 * k}" for k in range(50)))
    with pytest.warns(UserWarning, match="has 50 different whole numbers in 50 rows, which count as classes; .*mse"):
        read(tmp_path / "t.csv", "cost", memory_limit=1e9)
