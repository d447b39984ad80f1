"""Training on texts: padding has no effect, and the path from a CSV file to an exported model works."""

import csv
import io
import random
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import tiny_models
import torch

from quasiglobal.cli import share
from quasiglobal.data.readers.csv_files import read_texts
from quasiglobal.data.sources import Examples
from quasiglobal.errors import InputError
from quasiglobal.runs.building import data_of, make_task
from quasiglobal.runs.export import export, save, save_folder
from quasiglobal.runs.local import simulate
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import read_run
from quasiglobal.training.experiment import Experiment
from quasiglobal.training.program import Program

CPU = torch.device("cpu")
pytest.importorskip("transformers", reason="needs the extra nlp")


def widened(data, width):
    """The same texts with more padding."""
    def wide(split):
        return Examples(torch.nn.functional.pad(split.x, (0, width - split.x.shape[1]), value=data.pad), split.y)

    return replace(data, train=wide(data.train), test=wide(data.test))


@pytest.mark.parametrize("algorithm", ["qg-dadam", "mimelite"])
def test_padding_changes_neither_training_nor_tests(tmp_path, algorithm):
    """Texts of up to 32 tokens, padded to 32 and to 64: both are truncated to the same length in each step."""
    chosen = tiny_models.experiment(tiny_models.write_model(tmp_path / "m"), algorithm=algorithm, epochs=1, steps=2)
    data = tiny_models.dataset(count=48, length=32)
    narrow, wide = (Program(make_task(chosen, widened(data, width)), [chosen], CPU) for width in (32, 64))
    for program in (narrow, wide):
        program.train_epoch()
    torch.testing.assert_close(wide.state.x, narrow.state.x, rtol=0, atol=1e-12)
    assert max(length for _, length in wide.feed.shapes) <= 32
    (found,), (other,) = narrow.evaluate(), wide.evaluate()
    assert found["accuracy"] == other["accuracy"]
    assert found["test_loss"] == pytest.approx(other["test_loss"], abs=1e-12)


def test_steps_that_are_cut_shorter_learn_the_same(tmp_path, monkeypatch):
    """Truncated to multiples of 4 tokens, or not at all. Not with Adam, which would scale up pure rounding."""
    model = tiny_models.write_model(tmp_path / "m")
    chosen = tiny_models.experiment(model, algorithm="dsgdm-n", epochs=1, batch=2, steps=4)
    task = make_task(chosen, tiny_models.dataset(count=48, length=32))
    ends = []
    for bucket in (4, 32):
        monkeypatch.setattr("quasiglobal.data.inputs.BUCKET", bucket)
        program = Program(task, [chosen], CPU)
        program.train_epoch()
        ends.append((program.state.x, {length for _, length in program.feed.shapes}))
    (short, lengths), (full, whole) = ends
    assert whole == {32}
    assert min(lengths) < 32
    torch.testing.assert_close(short, full, rtol=0, atol=1e-13)


def write_texts(path, rows, seed):
    """Write texts of the words w0 … w39 in two classes, which share no word."""
    rng = random.Random(seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["label", "text"])
        for k in range(rows):
            label = k % 2
            words = [f"w{rng.randrange(20) * 2 + label}" for _ in range(rng.randint(2, 12))]
            writer.writerow([("even", "odd")[label], " ".join(words)])


def write_reader(folder):
    """Write a tiny model with a tokenizer for the words w0 … w39; return its name."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    name = tiny_models.write_model(folder)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    words = {word: i for i, word in enumerate([*special, *(f"w{k}" for k in range(40))])}
    backend = Tokenizer(models.WordPiece(words, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]").save_pretrained(folder)
    return name


def trained_on_texts(tmp_path):
    """A run of a small reader on generated texts, even or odd."""
    write_texts(tmp_path / "mine" / "train.csv", 120, 0)
    write_texts(tmp_path / "mine" / "test.csv", 40, 1)
    chosen = Experiment(
        data=f"csv:{tmp_path}/mine", model=write_reader(tmp_path / "reader"), pretrained=False, topology="ring:3",
        partition="iid", algorithm="dadam", epochs=4, batch=10, lr=0.01, milestones=(), shape=(16,), eval_every=4,
    )
    (run,) = simulate(chosen, Options(runs=tmp_path / "runs", device="cpu"))
    return run


def predicted(capsys):
    """The classes that `qg predict` printed."""
    return [row["class"] for row in csv.DictReader(io.StringIO(capsys.readouterr().out))]


def test_from_a_csv_file_to_a_model_in_use(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    run = trained_on_texts(tmp_path)
    assert run.status == "finished"
    assert run.summary.last["accuracy"] > 0.95
    assert len(run.summary.last["recall_worst"]) == 2

    model = tmp_path / "model.safetensors"
    save(export(run, "average"), model)
    kept = sorted((tmp_path / "cache").rglob("*"))
    (tmp_path / "new.txt").write_text("w1 w3 w5\nw2 w4 w6 w8\nw7 w9 w11\n")
    share.predict(model, (str(tmp_path / "new.txt"),))
    assert predicted(capsys) == ["odd", "even", "odd"]
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbfw4 w2\x0cw2\r\nw1 w3")))
    share.predict(model, ("-",))
    assert predicted(capsys) == ["even", "odd"], "a form feed does not end a line"
    assert sorted((tmp_path / "cache").rglob("*")) == kept, "texts for prediction are not cached"

    (tmp_path / "odd.csv").write_text("label,text\n" + "odd,w1 w3 w5\n" * 20)     # classes match by name, not index
    share.evaluate(model, f"csv:{tmp_path}/odd.csv")
    assert "100.00% of 20 test examples" in " ".join(capsys.readouterr().out.split())
    share.predict(model, (f"csv:{tmp_path}/mine",))          # its test.csv, with even and odd in turn
    assert predicted(capsys)[:6] == ["even", "odd"] * 3
    (tmp_path / "other.csv").write_text("label,text\n" + "prime,w1 w3 w5\neven,w2 w4\n" * 20)
    with pytest.raises(InputError, match="prime"):
        share.evaluate(model, f"csv:{tmp_path}/other.csv")
    share.predict(model, (str(tmp_path / "other.csv"),))     # its labels are not needed
    assert predicted(capsys)[:4] == ["odd", "even"] * 2

    for split in ("train", "test"):                         # a run keeps its class names
        path = tmp_path / "mine" / f"{split}.csv"
        path.write_text(path.read_text().replace("even", "zero"))
    assert export(run, "average").experiment.classes == ("even", "odd")
    (run.folder / "summary.json").unlink()
    with open(tmp_path / "mine" / "train.csv", "a") as file:
        file.write("two,w2 w4\n")
    with pytest.raises(InputError, match="trained on other classes"):
        export(read_run(run.folder), "average")


@pytest.mark.parametrize(
    ("content", "said"),
    [(None, "No such file"), (b"", "holds no texts"), (b"one\n\ntwo\n", "nothing in line 2"), (b"\xff\x00", "UTF-8")],
)
def test_a_bad_file_of_texts_is_one_sentence(tmp_path, content, said):
    if content is not None:
        (tmp_path / "new.txt").write_bytes(content)
    with pytest.raises(InputError, match=said):
        read_texts(str(tmp_path / "new.txt"))


def test_a_tokenizer_with_more_words_than_the_model_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    write_texts(tmp_path / "mine.csv", 60, 0)
    name = write_reader(tmp_path / "reader")
    tiny_models.write_model(tmp_path / "reader", vocab_size=30)
    chosen = Experiment(data=f"csv:{tmp_path}/mine.csv", model=name, pretrained=False)
    with pytest.raises(ValueError, match=r"has the token id 43, but hf:.*reader has 30 ids"):
        data_of(chosen, None)


@pytest.mark.slow
def test_an_exported_language_model_stands_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("QG_CACHE", str(tmp_path / "cache"))
    run = trained_on_texts(tmp_path)
    written = save_folder(export(run, "average"), tmp_path / "alone")
    assert {"model.safetensors", "model.json", "README.md", "model.pt2", "language"} <= {
        path.name for path in written.files
    }
    (tmp_path / "reader").rename(tmp_path / "elsewhere")
    (tmp_path / "new.txt").write_text("w1 w3 w5\nw2 w4 w6 w8\nw7 w9 w11\n")
    share.predict(tmp_path / "alone", (str(tmp_path / "new.txt"),))
    assert predicted(capsys) == ["odd", "even", "odd"]
    (code,) = re.findall(r"```python\n(.*?)```", (tmp_path / "alone" / "README.md").read_text(), re.DOTALL)
    assert "quasiglobal" not in code
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path / "alone", check=True)
