"""Transformers for text classification, from a folder or the Hugging Face hub: `--model hf:NAME_OR_PATH`."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from quasiglobal.data.dataset import reading
from quasiglobal.errors import InputError
from quasiglobal.models.language.adapters import freeze, head_of
from quasiglobal.models.language.attention import registered
from quasiglobal.stacked.stacking import Stacking

PREFIX = "hf:"
"""Prefix of the names of transformers models, in `Experiment.model`."""

LARGE = 10**6
"""Number of parameters of a trained base model above which stacking gains nothing on a CPU."""

ALLOW_PICKLE = "QG_ALLOW_PICKLE"
"""Environment variable; 1 allows pickled weights, which can run any code."""


class LanguageModel(nn.Module):
    """A transformers model for sequence classification, unmodified: ids [batch, length] → logits [batch, classes].

    Tokens equal to `pad` are masked. Many copies are computed at once only if the attention can be replaced.
    """

    def __init__(self, model: Any, pad: int) -> None:
        super().__init__()
        self.model, self.pad = model, pad
        base = list(model.base_model.parameters())
        trained = any(parameter.requires_grad for parameter in base)
        self.stacking = Stacking(
            autograd="outside" if model._supports_attention_backend else "alone",
            draws=True,
            large=trained and sum(map(Tensor.numel, base)) > LARGE,
        )

    def forward(self, ids: Tensor) -> Tensor:
        """The logits."""
        logits: Tensor = self.model(input_ids=ids, attention_mask=(ids != self.pad).long()).logits
        return logits


def language_model(
    name: str, *, classes: int, pretrained: bool = True, train: str = "all", pad: int | None = None, length: int = 0
) -> LanguageModel:
    """Load a model from a folder or the hub, for `classes` classes and texts of up to `length` tokens.

    Parameters that the weights lack, such as a head for these classes, are drawn from torch's global random generator;
    if `pretrained` is false, all are. All nodes share a frozen base, so its random parameters have a fixed seed.
    """
    transformers = _transformers()
    folder = folder_of(name, weights=pretrained)
    config = _config(transformers, folder, num_labels=classes)
    pad = getattr(config, "pad_token_id", None) if pad is None else pad
    if pad is None:
        raise InputError(f"{name} defines no padding token; add pad_token_id to {folder / 'config.json'}")
    config.pad_token_id, config.use_cache = pad, False
    _check_length(name, config, length)
    make = partial(_loaded, transformers, folder, config) if pretrained else partial(_drawn, transformers, config)
    with _quiet(transformers), reading(folder, "a transformers model"):
        model = make()
        if train != "all":
            head = {key: value.detach() for key, value in head_of(model)}
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")             # already shown the first time
                torch.manual_seed(0)
                model = make()
            model.load_state_dict(head, strict=False)
        freeze(model, train)
    return LanguageModel(model, pad)


def tokenizer_of(name: str) -> Any:
    """Load the model's tokenizer with transformers."""
    transformers = _transformers()
    folder = folder_of(name, weights=False)
    if not _has(folder, TOKENIZERS) and not any(folder.glob("*.model")):    # transformers would make an empty one
        raise InputError(f"{folder} has no tokenizer ({TOKENIZERS[0]}); copy it there from the model's source")
    with _quiet(transformers), reading(folder, "a transformers model"):
        return transformers.AutoTokenizer.from_pretrained(folder)


def vocabulary_of(name: str) -> int:
    """Vocabulary size of the model."""
    config = _config(_transformers(), folder_of(name, weights=False))
    return int(config.get_text_config().vocab_size)


def folder_of(name: str, weights: bool) -> Path:
    """Folder with the files of hf:NAME_OR_PATH, downloaded from the hub if necessary."""
    place = name.removeprefix(PREFIX)
    folder = Path(place).expanduser()
    if not folder.is_dir():
        folder = _from_hub(place, weights)
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a transformers model: it has no config.json")
    if weights and not _has(folder, SAFE) and not (_pickles() and _has(folder, PICKLED)):
        if _has(folder, PICKLED):
            raise InputError(
                f"the weights in {folder} are a pickle, which can run any code when it is read; get them as "
                f"safetensors, or set {ALLOW_PICKLE}=1 if you trust their source"
            )
        raise InputError(f"{folder} has no weights ({SAFE[0]}); add them, or start from scratch with --no-pretrained")
    return folder


SAFE = ("model.safetensors", "model.safetensors.index.json")
PICKLED = ("pytorch_model.bin", "pytorch_model.bin.index.json")
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json")


def _has(folder: Path, names: tuple[str, ...]) -> bool:
    return any((folder / name).is_file() for name in names)


def _pickles() -> bool:
    return os.environ.get(ALLOW_PICKLE) == "1"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError:
        raise InputError("hf: models need transformers: pip install 'quasiglobal[nlp]'") from None
    return transformers


def _from_hub(name: str, weights: bool) -> Path:
    """Folder of the model in the hub's cache; download only if the cache lacks the model."""
    from huggingface_hub import constants, snapshot_download

    files = ["*.json", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    files += ["pytorch_model*.bin"] if weights and _pickles() else []
    cache = Path(constants.HF_HUB_CACHE)
    for here in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=files, local_files_only=here))
        except Exception:                   # invalid name, no network, no such repository, no read permission
            continue
        if not here or _has(folder, ("config.json",) if not weights else SAFE + (PICKLED if _pickles() else ())):
            return folder
    raise InputError(
        f"cannot find model {name}: it is not a folder, not in {cache}, and not on the hub, or the hub cannot be "
        f"reached; run `hf download {name} --local-dir FOLDER` on a machine with network access, then use hf:FOLDER"
    )


def _config(transformers: Any, folder: Path, **more: Any) -> Any:
    """Read the model's configuration from the folder."""
    with _quiet(transformers), reading(folder, "a transformers model"):
        config = transformers.AutoConfig.from_pretrained(folder, **more)
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise InputError(f"transformers has no text classifier for {config.model_type} models; use another model")
    return config


def _loaded(transformers: Any, folder: Path, config: Any) -> Any:
    """Load the model with the folder's weights."""
    auto = transformers.AutoModelForSequenceClassification
    safe = _has(folder, SAFE)
    model, found = auto.from_pretrained(
        folder, config=config, dtype=torch.float32, use_safetensors=safe, ignore_mismatched_sizes=True,
        output_loading_info=True, **_attention(transformers, config),
    )
    head = {name for name, _ in head_of(model)}
    base = [name for name, _ in model.named_parameters() if name not in head]
    lacking = sorted(set(found["missing_keys"]) - head)
    if 2 * len(lacking) > len(base):
        raise InputError(f"the weights in {folder} do not match its config.json; get both from one model")
    if lacking:
        warnings.warn(
            f"the weights in {folder} lack {len(lacking)} of the base model's {len(base)} tensors, such as "
            f"{lacking[0]}; they are initialised at random",
            stacklevel=2,
        )
    return model


def _drawn(transformers: Any, config: Any) -> Any:
    """Build the model with random weights."""
    auto = transformers.AutoModelForSequenceClassification
    return auto.from_config(config, dtype=torch.float32, **_attention(transformers, config))


def _attention(transformers: Any, config: Any) -> dict[str, str]:
    """Select our attention function if the model supports replacing it."""
    kind = transformers.AutoModelForSequenceClassification._model_mapping[type(config)]
    return {"attn_implementation": registered()} if kind._supports_attention_backend else {}


def _check_length(name: str, config: Any, length: int) -> None:
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and "roberta" in config.model_type:
        longest -= config.pad_token_id + 1                  # its positions start after the padding index
    if longest is not None and length > longest:
        raise InputError(f"{name} takes texts of up to {longest} tokens, got {length}; use --shape {longest}")


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Suppress transformers' log messages and progress bars."""
    said, shown = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers.logging.set_verbosity(said)
        if shown:
            transformers.logging.enable_progress_bar()
