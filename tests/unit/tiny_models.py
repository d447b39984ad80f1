"""Transformers small enough for tests: two layers of 32 numbers, random weights, a vocabulary of 64; no download."""

import json

import pytest
import torch

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
    """A folder with a model's config.json; returns its name for --model."""
    pytest.importorskip("transformers", reason="needs the extra nlp")
    sizes = {key: value if dropout or value != 0.1 else 0.0 for key, value in SIZES[kind].items()}
    values = {"model_type": kind, "vocab_size": VOCABULARY, "pad_token_id": PAD} | sizes
    if kind != "gpt2":
        values["max_position_embeddings"] = 64
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values | more))
    return f"hf:{folder}"


def texts(*shape, seed=0):
    """Random ids of these sizes, the last the length; each text has a length of its own, and the rest is padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, shape, generator=generator)
    lengths = torch.randint(3, shape[-1] + 1, shape[:-1], generator=generator)
    return torch.where(torch.arange(shape[-1]) < lengths[..., None], ids, PAD)
