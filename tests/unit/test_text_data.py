"""Text data: read exactly, tokenised once, truncated per batch; bad input raises a one-sentence error."""

import gzip
import sys
import types
import warnings

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import quasiglobal as qg
from quasiglobal import cli
from quasiglobal.data import sources as datasets
from quasiglobal.data.batches import Owner, Plan
from quasiglobal.data.inputs import Texts
from quasiglobal.data.texts import Corpus, Rows, check_vocabulary, ids_key, tokenised
from quasiglobal.runs.agreement import agreement
from quasiglobal.runs.building import data_of
from quasiglobal.training.experiment import Experiment

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def alone(monkeypatch, tmp_path):
    """Hide local data sets and the hub; use a temporary cache."""
    monkeypatch.delenv("QG_DATA", raising=False)
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", None)


class Words:
    """Tokenizer: one token per word, between 1 and 2, padded with 0. `seen` counts the texts."""

    pad_token_id = 0

    def __init__(self, *words):
        self.vocabulary = {word: 3 + i for i, word in enumerate(words)}
        self.seen = 0

    def __call__(self, texts, *, truncation, max_length):
        assert truncation
        self.seen += len(texts)
        ids = [[self.vocabulary.get(word, 3) for word in text.split()] for text in texts]
        return {"input_ids": [[1, *row[: max_length - 2], 2] for row in ids]}

    def get_vocab(self):
        return self.vocabulary


ABC = ("a", "b", "c")


def write(path, content, zipped=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = content.encode()
    path.write_bytes(gzip.compress(data, mtime=0) if zipped else data)
    return path


def refused(name, *parts, **options):
    """Check that reading raises a one-line `InputError` that contains all parts."""
    with pytest.raises(qg.InputError) as caught:
        datasets.corpus(name, **options)
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert str(part) in sentence


def corpus_of(train, test=("a",), name="mine"):
    def rows(texts):
        return Rows(list(texts), torch.zeros(len(texts), dtype=torch.int64))

    return Corpus(name, rows(train), rows(test), ("one",))


# Files


def both(folder, test="test", ending=".csv", **options):
    for part in ("train", test):
        write(folder / f"{part}{ending}", 'label,text\n1,"one, ""two"""\n0,"three\nfour"\n', **options)


@pytest.mark.parametrize("zipped", [False, True])
def test_a_folder_has_texts_to_train_and_to_test(tmp_path, zipped):
    both(tmp_path / "mine", ending=".csv.gz" if zipped else ".csv", zipped=zipped)
    corpus = datasets.corpus("csv:mine")
    assert corpus.train.texts == ['one, "two"', "three\nfour"]
    assert corpus.train.y.tolist() == [1, 0]
    assert corpus.classes == ("0", "1")
    assert len(corpus.test) == 2


def test_whether_a_file_is_gzipped_is_seen_in_it_not_in_its_name(tmp_path):
    write(tmp_path / "mine.csv", "0,a b\n1,c\n", zipped=True)
    assert len(datasets.corpus("csv:mine.csv").train) == 1


def test_of_one_file_a_fixed_fifth_is_held_out(tmp_path):
    write(tmp_path / "mine.csv", "text,label,hospital\n" + "".join(f"t{k},{k % 2},h{k % 3}\n" for k in range(50)))
    corpus = datasets.corpus("csv:mine.csv")
    assert (len(corpus.train), len(corpus.test)) == (40, 10)
    assert sorted(corpus.train.texts + corpus.test.texts) == sorted(f"t{k}" for k in range(50))
    for rows in (corpus.train, corpus.test):
        numbers = [int(text[1:]) for text in rows.texts]
        assert rows.y.tolist() == [k % 2 for k in numbers]
        assert rows.columns["hospital"].tolist() == [f"h{k % 3}" for k in numbers]
    assert datasets.corpus("csv:mine.csv").test.texts == corpus.test.texts


def test_labels_may_be_names(tmp_path):
    write(tmp_path / "mine.csv", "label,text\nheart,a\nbone,b\nheart,c\nbone,d\nskin,e\n")
    corpus = datasets.corpus("csv:mine.csv")
    assert corpus.classes == ("bone", "heart", "skin")
    names = {text: corpus.classes[y] for r in (corpus.train, corpus.test) for text, y in zip(r.texts, r.y, strict=True)}
    assert names == {"a": "heart", "b": "bone", "c": "heart", "d": "bone", "e": "skin"}


@pytest.mark.parametrize("header", ["", "Class Index,Title,Description\n"])
def test_classes_of_titles_and_descriptions_count_from_1(tmp_path, header):
    for part in ("train", "test"):
        write(tmp_path / "data" / "agnews" / f"{part}.csv", header + '"4","Chip ","Small ones"\n"1","Vote","Large"\n')
    corpus = datasets.corpus("agnews")
    assert corpus.train.texts == ["Chip Small ones", "Vote Large"]
    assert [corpus.classes[y] for y in corpus.train.y] == ["Sci/Tech", "World"]


def test_sst2_is_read_as_glue_has_it(tmp_path):
    for part in ("train", "dev"):
        write(tmp_path / "data" / "SST-2" / f"{part}.tsv", "sentence\tlabel\nno \"wit , only\t0\na charm \t1\n")
    corpus = datasets.corpus("sst2")
    assert corpus.test.texts == ['no "wit , only', "a charm"]
    assert [corpus.classes[y] for y in corpus.test.y] == ["negative", "positive"]


def test_a_number_too_long_for_a_label_is_a_name(tmp_path):
    write(tmp_path / "mine.csv", f"label,text\n{'9' * 5000},a\n{'8' * 5000},b\n")
    assert datasets.corpus("csv:mine.csv").classes == ("8" * 5000, "9" * 5000)


def test_a_byte_order_mark_is_no_part_of_the_header(tmp_path):
    write(tmp_path / "mine.csv", "\ufefflabel,text\n0,a\n1,b\n")
    assert datasets.corpus("csv:mine.csv").classes == ("0", "1")


def test_the_hub_is_asked_for_what_the_disk_lacks(monkeypatch):
    class Split(dict):
        def __len__(self):
            return 2

    def load_dataset(repository, split):
        assert (repository, split) == ("stanfordnlp/sst2", ["train", "validation"])
        return [Split(sentence=["good", "bad"], label=[1, 0])] * 2

    package = types.ModuleType("datasets")
    package.load_dataset = load_dataset
    monkeypatch.setitem(sys.modules, "datasets", package)
    corpus = datasets.corpus("sst2")
    assert (corpus.train.texts, corpus.train.y.tolist()) == (["good", "bad"], [1, 0])


def test_what_is_missing_is_named_with_how_to_get_it():
    refused("agnews", "agnews is not in data/agnews", "curl")
    refused("sst2", "data/sst2", "unzip")
    refused("agnew", "did you mean 'agnews'?")


BAD = {
    "empty text": ("label,text\n0,a\n1,  \n0,b\n1,\n", "no text in line 3", "2 such rows"),
    "empty label": ("label,text\na,b\n,c\n", "no label in line 3"),
    "label below": ("label,text\n0,a\n-1,b\n", "'-1'", "line 3", "labels are 0 to 0"),
    "no text column": ("label,body\n0,a\n", "label, body", "needs label and text"),
    "four columns": ("0,a,b,c\n", "no column called label or class, and 4 columns"),
    "semicolons": ("label;text\n0;a\n", "and 1 columns, separated by commas"),
    "another header": ("category,message\n0,a\n1,b\n", "'category' first", "call the columns label and text"),
    "ragged": ("label,text\n0,a\n1,b,c\n", "3 columns in line 3"),
    "open quote": ('label,text\n0,"a\n1,b\n', "cannot read", "unexpected end"),
    "swapped columns": ("\n".join(f"a text {k},0" for k in range(1001)), "1,001 classes", "put the label first"),
    "nothing": ("", "holds no rows"),
    "a header alone": ("label,text\n", "holds no rows"),
    "one row": ("0,a\n", "2 examples or more"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path, case):
    content, *parts = BAD[case]
    write(tmp_path / "mine.csv", content)
    refused("csv:mine.csv", "mine.csv", *parts)


@pytest.mark.parametrize(("right", "label"), [("3", "4"), ("3", "-1"), ("World", "Worlds")])
def test_a_label_outside_of_the_classes_is_named(tmp_path, right, label):
    for part, other in (("train", right), ("test", label)):
        write(tmp_path / "data" / "agnews" / f"{part}.csv", f"label,text\n{right},a\n{other},b\n")
    refused("agnews", "test.csv", repr(label), "line 3", "labels are")


def test_a_class_that_only_the_test_has_is_refused(tmp_path):
    write(tmp_path / "mine" / "train.csv", "label,text\nbone,a\n")
    write(tmp_path / "mine" / "dev.csv", "label,text\nskin,a\n")
    refused("csv:mine", "dev.csv", "'skin'", "labels are bone")


@pytest.mark.parametrize("cut", [12, -9])
def test_a_broken_gz_is_refused(tmp_path, cut):
    path = write(tmp_path / "mine.csv.gz", "0,a\n1,b\n" * 50, zipped=True)
    path.write_bytes(path.read_bytes()[:cut])
    refused("csv:mine.csv.gz", "cannot read mine.csv.gz as a CSV file")


def test_what_is_no_text_and_what_is_not_there_is_refused(tmp_path):
    (tmp_path / "mine.csv").write_bytes(b"0,\xff\xfe\n")
    refused("csv:mine.csv", "cannot read mine.csv", "save it as UTF-8")
    refused("csv:yours.csv", "yours.csv", "No such file")
    (tmp_path / "empty").mkdir()
    refused("csv:empty", "neither test.csv nor dev.csv")


def test_more_than_the_memory_limit_is_refused(tmp_path):
    write(tmp_path / "mine.csv", "0,aaaaaaaa\n" * 9)
    refused("csv:mine.csv", "above the limit", memory_limit=50)


# Tokens


def test_ids_are_padded_and_longer_texts_end_as_the_tokenizer_ends_them(tmp_path):
    with pytest.warns(UserWarning, match=r"1 of the 3 texts of mine are longer than 5 tokens and were cut"):
        data = tokenised(corpus_of(["a b", "a b c a b"]), Words(*ABC), 5, None)
    assert data.train.x.tolist() == [[1, 3, 4, 2, 0], [1, 3, 4, 5, 2]]
    assert (data.train.x.dtype, data.shape, data.pad) == (torch.int32, (5,), 0)


def test_a_text_that_just_fits_is_not_cut():
    data = tokenised(corpus_of(["a b c"]), Words(*ABC), 5, None)
    assert data.train.x.tolist() == [[1, 3, 4, 5, 2]]


def test_texts_are_tokenised_once(tmp_path):
    tokenizer, corpus = Words(*ABC), corpus_of(["a b", "c"])
    first = tokenised(corpus, tokenizer, 8, tmp_path)
    again = tokenised(corpus, tokenizer, 8, tmp_path)
    assert tokenizer.seen == 3
    assert torch.equal(first.train.x, again.train.x)
    assert torch.equal(first.test.x, again.test.x)


def test_how_many_were_cut_is_said_from_the_cache_too(tmp_path):
    for _ in range(2):
        with pytest.warns(UserWarning, match="1 of the 2 texts"):
            tokenised(corpus_of(["a b c a b"]), Words(*ABC), 4, tmp_path)


@pytest.mark.parametrize(
    ("train", "words", "length"),
    [(["a b", "c"], ("b", "a", "c"), 8), (["a b", "c"], ABC, 9), (["a", "b c"], ABC, 8), (["a b", "c", "a"], ABC, 8)],
    ids=["tokenizer", "length", "border between texts", "texts"],
)
def test_another_corpus_tokenizer_or_length_is_tokenised_anew(tmp_path, train, words, length):
    tokenised(corpus_of(["a b", "c"]), Words(*ABC), 8, tmp_path)
    tokenizer = Words(*words)
    data = tokenised(corpus_of(train), tokenizer, length, tmp_path)
    assert tokenizer.seen == len(train) + 1
    assert torch.equal(data.train.x, tokenised(corpus_of(train), Words(*words), length, None).train.x)


def damaged(path, how):
    if how == "cut":
        path.write_bytes(path.read_bytes()[:40])
    elif how == "other shape":
        save_file({name: x[:, 1:].contiguous() for name, x in load_file(path).items()}, path, {"cut": "0"})
    else:
        save_file(load_file(path), path)


@pytest.mark.parametrize("how", ["cut", "other shape", "without the number cut"])
def test_a_damaged_cache_is_made_anew(tmp_path, how):
    whole = tokenised(corpus_of(["a b"]), Words(*ABC), 8, tmp_path)
    (path,) = tmp_path.iterdir()
    damaged(path, how)
    again = tokenised(corpus_of(["a b"]), Words(*ABC), 8, tmp_path)
    assert torch.equal(again.train.x, whole.train.x)
    tokenizer = Words(*ABC)
    tokenised(corpus_of(["a b"]), tokenizer, 8, tmp_path)
    assert tokenizer.seen == 0


class Failing(Words):
    def __call__(self, texts, **how):
        if self.seen:
            raise KeyboardInterrupt
        return super().__call__(texts, **how)


def test_stopped_in_the_middle_it_leaves_no_cache(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        tokenised(corpus_of(["a b"]), Failing(*ABC), 8, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_disk_that_is_full_leaves_no_cache_and_does_not_stop_the_work(tmp_path, monkeypatch):
    def full(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("quasiglobal.common.files.save_file", full)
    with pytest.warns(UserWarning, match=r"not cached: cannot write .*No space left.*QG_CACHE"):
        data = tokenised(corpus_of(["a b"]), Words(*ABC), 8, tmp_path / "cache")
    assert data.train.x.shape == (1, 8)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tokenizer_without_padding_is_refused(tmp_path):
    tokenizer = Words(*ABC)
    tokenizer.pad_token_id = None
    with pytest.raises(qg.InputError, match="no padding token"):
        tokenised(corpus_of(["a"]), tokenizer, 8, tmp_path)


def test_a_text_without_tokens_is_refused_and_leaves_no_cache(tmp_path):
    class Bare(Words):
        def __call__(self, texts, **how):
            return {"input_ids": [row[1:-1] for row in super().__call__(texts, **how)["input_ids"]]}

        get_vocab = Words.get_vocab

    with pytest.raises(qg.InputError, match="finds no tokens in 1 of the train texts of mine"):
        tokenised(corpus_of(["a", ""]), Bare(*ABC), 8, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_a_vocabulary_that_does_not_fit_the_model_is_refused():
    data = tokenised(corpus_of(["a b"], ["c"]), Words(*ABC), 8, None)
    check_vocabulary(data, 6, "hf:tiny")
    with pytest.raises(qg.InputError, match=r"token id 5, but hf:tiny has 5 ids, from 0 to 4; the tokenizer"):
        check_vocabulary(data, 5, "hf:tiny")


def test_the_description_of_a_tokenizer_does_not_change_by_using_it():
    transformers = pytest.importorskip("transformers", reason="needs the extra nlp")
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra nlp")
    words = {"[PAD]": 0, "[UNK]": 1, "a": 2, "b": 3}
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]")
    corpus = corpus_of(["a b a", "b"])
    before = ids_key(corpus, tokenizer, 4)
    assert tokenised(corpus, tokenizer, 4, None).train.x.tolist() == [[2, 3, 2, 0], [3, 0, 0, 0]]
    assert ids_key(corpus, tokenizer, 4) == before


# Model input


def texts_of_lengths(*lengths, width=40):
    x = torch.zeros(len(lengths), width, dtype=torch.int32)
    for row, length in zip(x, lengths, strict=True):
        row[:length] = 7
    return Texts(x, pad=0)


@pytest.mark.parametrize(("lengths", "need"), [((1, 16), 16), ((3, 17), 32), ((33, 2), 40), ((40,), 40)])
def test_a_batch_is_cut_to_the_bucket_of_its_longest_text(lengths, need):
    texts = texts_of_lengths(*lengths)
    everybody = np.arange(len(lengths))[None]
    assert texts.need(everybody) == (need,)
    shown = texts.show(torch.from_numpy(everybody), need)
    assert (shown.shape, shown.dtype) == ((1, len(lengths), need), torch.int64)
    assert (shown != 0).sum(dim=-1).tolist() == [list(lengths)]


def test_padding_inside_of_a_text_does_not_end_it():
    x = torch.tensor([[5, 0, 5] + [0] * 37, [5] + [0] * 39])
    x[0, 20] = 5
    assert Texts(x, pad=0).need(np.array([0])) == (32,)
    assert Texts(x, pad=0).need(np.array([1])) == (16,)


def test_each_step_of_an_epoch_says_what_its_batch_of_all_nodes_needs():
    lengths = np.random.default_rng(0).integers(1, 41, 30)
    texts = texts_of_lengths(*lengths)
    owners = [Owner(0, node, np.arange(node * 10, node * 10 + 10)) for node in range(3)]
    epoch = Plan(owners, 4, need=texts.need).epoch(0, CPU)
    assert [shape[0] for shape in epoch.shapes] == [4, 4, 2]
    for (size, need), index in zip(epoch.shapes, epoch.index, strict=True):
        longest = lengths[index[:, :size].numpy()].max()
        assert longest <= need == min(40, -(-longest // 16) * 16)


def test_short_texts_are_tested_together():
    texts = texts_of_lengths(30, 5, 40, 1)
    assert texts.order.tolist() == [3, 1, 0, 2]


# Experiments


def test_a_model_of_images_does_not_read(tmp_path):
    write(tmp_path / "mine.csv", "0,a\n1,b\n")
    with pytest.raises(qg.InputError, match=r"csv:mine.csv is text, which cnn does not read; use --model hf:"):
        data_of(Experiment(data="csv:mine.csv"), None)
    with pytest.raises(qg.InputError, match="is text"):
        datasets.load("csv:mine.csv")


@pytest.fixture
def tiny(monkeypatch):
    """Give every model the tokenizer `Words` and a vocabulary of 6."""
    monkeypatch.setattr("quasiglobal.runs.building.tokenizer_of", lambda model: Words(*ABC))
    monkeypatch.setattr("quasiglobal.runs.building.vocabulary_of", lambda model: 6)


@pytest.mark.usefixtures("tiny")
def test_shape_is_the_length_of_texts_and_owners_agree_on_classes(tmp_path):
    write(tmp_path / "mine.csv", "label,text\nskin,a\nbone,b c\n")
    terms = {"classes": ("heart", "skin", "bone"), "shape": (12,)}
    data = data_of(Experiment(data="own", model="hf:tiny", **terms), None, datasets.named("mine.csv"))
    assert (data.shape, data.classes) == ((12,), ("heart", "skin", "bone"))
    assert sorted(data.train.y.tolist() + data.test.y.tolist()) == [1, 2]
    for wrong, sentence in (
        ({"shape": (3, 8, 8)}, "one number"),
        ({"mean": (0.5,)}, "has no mean"),
        ({"classes": ("heart", "skin")}, "has the class 'bone'"),
    ):
        with pytest.raises(qg.InputError, match=sentence):
            data_of(Experiment(data="csv:mine.csv", model="hf:tiny", **{**terms, **wrong}), None)


@pytest.mark.usefixtures("tiny")
def test_the_cache_is_where_it_is_said_to_be(tmp_path):
    write(tmp_path / "mine.csv", "0,a\n1,b\n")
    data_of(Experiment(data="csv:mine.csv", model="hf:tiny"), None)
    assert len(list((tmp_path / "cache" / "tokens").glob("*.safetensors"))) == 1


def test_owners_of_texts_agree_on_no_mean_and_std():
    terms = {"model": "hf:tiny", "classes": ("bone", "skin"), "shape": (12,), "steps": 5}
    assert agreement(Experiment(**terms)).data == "own"
    with pytest.raises(qg.InputError, match=r"agree on shape, steps; .*`qg data csv:PATH`"):
        agreement(Experiment(**{**terms, "shape": (), "steps": 0}))


def test_the_name_of_own_data_is_seen_from_its_files(tmp_path):
    both(tmp_path / "notes")
    (tmp_path / "images").mkdir()
    assert [datasets.named(path) for path in ("notes", "images", "x.tsv.gz", "a.npz")] == [
        "csv:notes", "folder:images", "csv:x.tsv.gz", "folder:a.npz",
    ]


def said(capsys, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["qg", *words])
    with warnings.catch_warnings():
        cli.main()
    return capsys.readouterr().out


def test_the_command_line_describes_and_splits_texts(tmp_path, monkeypatch, capsys):
    rows = [f"{'heart' if k % 2 else 'skin'},a b c,h{k % 4}" for k in range(100)]
    write(tmp_path / "mine.csv", "\n".join(["label,text,hospital", *rows]))
    out = said(capsys, monkeypatch, "data", "csv:mine.csv")
    assert "# csv:mine.csv: 80 training examples and 20 to test\n" in out
    assert 'classes = ["heart", "skin"]\nshape = [128]\n' in out
    out = said(capsys, monkeypatch, "partition", "csv:mine.csv", "--nodes", "4", "--partition", "by:hospital")
    assert "mean label entropy 0.000 nats (of 0.693)" in out


def test_a_subset_is_called_one(tmp_path, monkeypatch, capsys):
    both(tmp_path / "data" / "agnews")
    assert "2 to test, a subset of the 127,600 published" in said(capsys, monkeypatch, "data", "agnews")
