"""Loading transformers: sources, and errors for models that cannot be loaded."""

import json
import shutil

import pytest
import torch
from tiny_models import experiment, texts, write_model

from quasiglobal.errors import InputError
from quasiglobal.models.language import ALLOW_PICKLE, language_model, tokenizer_of, vocabulary_of
from quasiglobal.runs.building import model_of
from quasiglobal.training.experiment import Experiment

transformers = pytest.importorskip("transformers", reason="needs the extra nlp")


@pytest.fixture
def folder(tmp_path):
    """A folder with a small BERT and its weights, without a head for our classes."""
    write_model(tmp_path)
    torch.manual_seed(3)
    transformers.BertModel(transformers.AutoConfig.from_pretrained(tmp_path)).save_pretrained(tmp_path)
    return tmp_path


def built(folder, seed=0, **how):
    torch.manual_seed(seed)
    return language_model(f"hf:{folder}", **{"classes": 4} | how).eval()


def test_a_model_has_the_folders_weights_and_a_new_head(folder):
    base = transformers.BertModel.from_pretrained(folder).eval()
    ids = texts(5, 16)
    first, again, other = built(folder), built(folder), built(folder, seed=1)
    hidden = base(input_ids=ids, attention_mask=(ids != 0).long()).pooler_output
    torch.testing.assert_close(first(ids), first.model.classifier(hidden))
    assert first(ids).equal(again(ids))
    assert not first(ids).isclose(other(ids)).any()
    assert vocabulary_of(f"hf:{folder}") == 64


def test_from_scratch_the_weights_are_not_read(folder):
    (folder / "model.safetensors").unlink()
    first, other = built(folder, pretrained=False), built(folder, seed=1, pretrained=False)
    weight = "model.bert.encoder.layer.0.attention.self.query.weight"
    assert not first.get_parameter(weight).equal(other.get_parameter(weight))
    with pytest.raises(InputError, match=r"has no weights \(model.safetensors\); add them, or start from scratch"):
        built(folder)


def test_a_model_for_other_classes_gets_a_new_head(folder):
    transformers.AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).save_pretrained(folder)
    assert built(folder)(texts(3, 8)).shape == (3, 4)


def test_half_precision_weights_are_trained_in_full(folder):
    transformers.BertModel.from_pretrained(folder).half().save_pretrained(folder)
    assert {parameter.dtype for parameter in built(folder).parameters()} == {torch.float32}


def test_a_pickle_is_refused_unless_asked_for(folder, monkeypatch):
    weights = transformers.BertModel.from_pretrained(folder).state_dict()
    (folder / "model.safetensors").unlink()
    torch.save(weights, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match=f"are a pickle, which can run any code.*{ALLOW_PICKLE}=1"):
        built(folder)
    monkeypatch.setenv(ALLOW_PICKLE, "1")
    loaded = built(folder).model.bert.state_dict()
    assert all(loaded[name].equal(value) for name, value in weights.items())


def test_nobody_is_asked_to_run_the_python_files_of_a_model(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda question: pytest.fail(question))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    found = {"auto_map": {"AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}, "model_type": "evil"}
    for file in ("config.json", "tokenizer_config.json", "tokenizer.json"):
        (folder / file).write_text(json.dumps(found | {"tokenizer_class": "Evil"}))
    for load in (built, lambda place: tokenizer_of(f"hf:{place}")):
        with pytest.raises(InputError, match="contains custom code"):
            load(folder)
    assert not (folder / "ran").exists()


@pytest.fixture
def offline(monkeypatch, tmp_path):
    """Take the hub offline; return a temporary cache folder."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_missing_model_is_one_sentence_with_the_place_and_the_remedy(offline):
    with pytest.raises(InputError) as error:
        language_model("hf:distilbert-base-uncased", classes=4)
    said = str(error.value)
    assert str(offline) in said
    assert "hf download distilbert-base-uncased --local-dir FOLDER" in said
    assert "\n" not in said


def test_a_model_in_the_hubs_cache_needs_no_network(offline, folder):
    kept = offline / "models--me--tiny"
    (kept / "refs").mkdir(parents=True)
    (kept / "refs" / "main").write_text("abc")
    (kept / "snapshots" / "abc").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, kept / "snapshots" / "abc" / name)
    torch.manual_seed(0)
    assert language_model("hf:me/tiny", classes=4)(texts(2, 8)).shape == (2, 4)
    (kept / "snapshots" / "abc" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="abc has no weights"):
        language_model("hf:me/tiny", classes=4)


def damaged(folder):
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])


def foreign(folder):
    write_model(folder, "distilbert")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (damaged, "cannot read .* as a transformers model"),
        (foreign, "do not match its config.json"),
        (lambda folder: (folder / "config.json").unlink(), "is not a transformers model: it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read .* as a transformers model"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "vit"}'), "no text classifier for vit"),
        (lambda folder: (folder / "config.json").write_text('{"model_type": "zzz"}'), "as a transformers model"),
    ],
)
def test_bad_folders_are_one_sentence(folder, spoil, says):
    spoil(folder)
    with pytest.raises(InputError, match=says) as error:
        built(folder)
    assert "\n" not in str(error.value)


def test_weights_that_lack_some_of_the_base_are_said(folder):
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in weights.items() if not name.startswith("pooler")}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    said = r"lack 2 of the base model's \d+ tensors, such as bert.pooler.dense.bias"
    for train, alike in (("all", False), ("head", True)):       # frozen weights are the same for all seeds
        with pytest.warns(UserWarning, match=said) as warned:
            first, other = built(folder, train=train), built(folder, seed=1, train=train)
        assert len(warned) == 2
        assert first.model.bert.pooler.dense.weight.equal(other.model.bert.pooler.dense.weight) == alike
        assert not first.model.classifier.weight.equal(other.model.classifier.weight)


def test_texts_longer_than_the_model_takes_are_refused(folder):
    with pytest.raises(InputError, match="takes texts of up to 64 tokens, got 128; use --shape 64"):
        built(folder, length=128)


def test_settings_that_do_not_go_together_are_one_sentence(folder):
    with pytest.raises(InputError, match="train must be all, head or lora:RANK"):
        experiment(f"hf:{folder}", train="lora")
    with pytest.raises(InputError, match="train = head is for hf: models; leave it out with cnn"):
        Experiment(train="head")
    with pytest.raises(InputError, match=r"reads texts, not examples of shape \[1, 8, 8\]"):
        model_of(experiment(f"hf:{folder}"), 10, (1, 8, 8))


def test_adapters_of_a_rank_above_their_matrices_are_refused(folder):
    with pytest.raises(InputError, match=r"train = lora:33 needs matrices with that many rows and columns, .* has 32"):
        built(folder, train="lora:33")


def test_a_model_without_a_tokenizer_is_refused(folder):
    with pytest.raises(InputError, match=r"has no tokenizer \(tokenizer.json\)"):
        tokenizer_of(f"hf:{folder}")


def test_what_is_trained_is_part_of_a_runs_name_where_it_is_set(folder):
    usual = Experiment(model=f"hf:{folder}")
    names = {usual.hash, Experiment(model=f"hf:{folder}", train="head").hash,
             Experiment(model=f"hf:{folder}", pretrained=False).hash}
    assert len(names) == 3
    assert Experiment().hash == Experiment(pretrained=True, train="all").hash


def test_without_the_extra_it_is_one_sentence(folder, monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(InputError, match=r"train = lora needs peft: pip install 'quasiglobal\[nlp\]'"):
        built(folder, train="lora:2")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"hf: models need transformers: pip install 'quasiglobal\[nlp\]'"):
        built(folder)
