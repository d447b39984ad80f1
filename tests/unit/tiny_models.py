"""Transformers small enough for tests: two layers of width 32, random weights, a vocabulary of 64; no download."""

import json
import math

import pytest
import torch

from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.runs.building import make_task
from quasiglobal.stacked.layout import Layout
from quasiglobal.training.experiment import Experiment

VOCABULARY, PAD = 64, 0
SIZES = {
    "bert": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
    "distilbert": {
        "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "dropout": 0.1, "attention_dropout": 0.1,
        "seq_classif_dropout": 0.1,
    },
    "roberta": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "bos_token_id": 1, "eos_token_id": 2,
    },
    "gpt2": {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1, "eos_token_id": 2,
        "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
    },
    "deberta": {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64,
        "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
    },
}


def write_model(folder, kind="bert", dropout=False, **more):
    """Write a model's config.json to a folder; return its name for --model."""
    pytest.importorskip("transformers", reason="needs the extra nlp")
    sizes = {key: value if dropout or value != 0.1 else 0.0 for key, value in SIZES[kind].items()}
    values = {"model_type": kind, "vocab_size": VOCABULARY, "pad_token_id": PAD} | sizes
    if kind != "gpt2":
        values["max_position_embeddings"] = 64
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | more))
    return f"hf:{folder}"


def texts(*shape, seed=0):
    """Random token ids of this shape, length last; each text has a random length and is padded."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    lengths = torch.randint(3, shape[-1] + 1, shape[:-1], generator=generator)
    return torch.where(torch.arange(shape[-1]) < lengths[..., None], ids, PAD)


def dataset(count=160, length=16, classes=4):
    """Texts whose class depends on their first token: `count` for training, a quarter as many for testing."""
    x = texts(count * 5 // 4, length)
    y = x[:, 0] % classes
    train, test = (Examples(x[part].int(), y[part]) for part in (slice(0, count), slice(count, None)))
    return Dataset("texts", train, test, tuple(map(str, range(classes))), 1.0, (), (), "none", pad=PAD)


def experiment(model, **settings):
    """Four nodes with 40 texts each, 5 steps per epoch."""
    usual = {
        "data": "texts", "topology": "ring:4", "algorithm": "qg-dadam", "epochs": 2, "batch": 8, "lr": 0.01,
        "alpha": 1.0, "milestones": (), "precision": "fp64", "pretrained": False,
    }
    return Experiment(model=model, **usual | settings)


def learned(model, train="all"):
    """Mask of the columns with a gradient. A key's bias has none: it adds the same to all of a query's scores."""
    layout = Layout.of(task(experiment(model, train=train)).module(0))
    names = [name for name, shape in layout.shapes.items() for _ in range(math.prod(shape))]
    return torch.tensor([not name.endswith(("key.bias", "k_lin.bias")) for name in names])


def task(chosen):
    """The task of an experiment made by `experiment`."""
    return make_task(chosen, dataset())
