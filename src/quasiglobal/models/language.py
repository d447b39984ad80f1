"""Transformers for text classification, from a folder or the Hugging Face hub: `--model hf:NAME_OR_PATH`.

All parameters, the head or LoRA adapters are trained; only these are stored per node, gossiped and saved.
LoRA: E. J. Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.

Activation checkpointing (`recompute`) stores only the layers' inputs; the backward pass recomputes the rest.
T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost. 2016.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from quasiglobal.common.files import reading
from quasiglobal.errors import InputError
from quasiglobal.stacked.layout import Stacking

if TYPE_CHECKING:
    from torch._functorch.autograd_function import VmapInfo
    from torch.autograd.function import FunctionCtx
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
    from transformers.modeling_layers import GradientCheckpointingLayer


PREFIX = "hf:"
"""Prefix of the names of transformers models, in `Experiment.model`."""

LARGE = 10**6
"""Number of parameters of a trained base model above which stacking gains nothing on a CPU."""

ALLOW_PICKLE = "QG_ALLOW_PICKLE"
"""Environment variable; 1 allows pickled weights, which can run any code."""

NO_CODE = {"trust_remote_code": False}
"""transformers would ask on a terminal whether to run a model's Python files."""


class LanguageModel(nn.Module):
    """A transformers model for sequence classification, unmodified: ids [batch, length] → logits [batch, classes].

    Tokens equal to `pad` are masked. Many copies are computed at once only if the attention can be replaced.
    """

    def __init__(self, model: PreTrainedModel, pad: int) -> None:
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
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and "roberta" in config.model_type:
        longest -= pad + 1                                  # its positions start after the padding index
    if longest is not None and length > longest:
        raise InputError(f"{name} takes texts of up to {longest} tokens, got {length}; use --shape {longest}")
    with _reading(transformers, folder):
        model = _made(transformers, folder, config, pretrained)
        if train != "all":
            head = {key: value.detach() for key, value in head_of(model)}
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")             # already shown the first time
                torch.manual_seed(0)
                model = _made(transformers, folder, config, pretrained)
            model.load_state_dict(head, strict=False)
        freeze(model, train)
    return LanguageModel(model, pad)


def tokenizer_of(name: str) -> PreTrainedTokenizerBase:
    """Load the model's tokenizer with transformers."""
    transformers = _transformers()
    folder = folder_of(name, weights=False)
    if not _has(folder, TOKENIZERS) and not any(folder.glob("*.model")):    # transformers would make an empty one
        raise InputError(f"{folder} has no tokenizer ({TOKENIZERS[0]}); copy it there from the model's source")
    with _reading(transformers, folder):
        return transformers.AutoTokenizer.from_pretrained(folder, **NO_CODE)


def vocabulary_of(name: str) -> int:
    """Vocabulary size of the model."""
    config = _config(_transformers(), folder_of(name, weights=False))
    return int(config.get_text_config().vocab_size)


def folder_of(name: str, weights: bool) -> Path:
    """Folder with the files of hf:NAME_OR_PATH, downloaded from the hub if necessary."""
    place = name.removeprefix(PREFIX)
    accepted = SAFE + (PICKLED if os.environ.get(ALLOW_PICKLE) == "1" else ())
    folder = Path(place).expanduser()
    if not folder.is_dir():
        folder = _from_hub(place, accepted if weights else ())
    if not (folder / "config.json").is_file():
        raise InputError(f"{folder} is not a transformers model: it has no config.json")
    if weights and not _has(folder, accepted):
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


def _transformers() -> ModuleType:
    try:
        return import_module("transformers")
    except ImportError:
        raise InputError("hf: models need transformers: pip install 'quasiglobal[nlp]'") from None


def _from_hub(name: str, weights: tuple[str, ...]) -> Path:
    """Folder of the model in the hub's cache; download only if the cache lacks the configuration or the weights."""
    from huggingface_hub import constants, snapshot_download

    files = ["*.json", "*.txt", "*.model", *(["*.safetensors"] if weights else [])]
    files += ["pytorch_model*.bin"] if PICKLED[0] in weights else []
    cache = Path(constants.HF_HUB_CACHE)
    for here in (True, False):
        try:
            folder = Path(snapshot_download(name, allow_patterns=files, local_files_only=here))
        except Exception:                   # invalid name, no network, no such repository, no read permission
            continue
        if not here or _has(folder, weights or ("config.json",)):
            return folder
    raise InputError(
        f"cannot find model {name}: it is not a folder, not in {cache}, and not on the hub, or the hub cannot be "
        f"reached; run `hf download {name} --local-dir FOLDER` on a machine with network access, then use hf:FOLDER"
    )


def _config(transformers: ModuleType, folder: Path, **more: int) -> PretrainedConfig:
    with _reading(transformers, folder):
        config = transformers.AutoConfig.from_pretrained(folder, **NO_CODE, **more)
    if type(config) not in transformers.AutoModelForSequenceClassification._model_mapping:
        raise InputError(f"transformers has no text classifier for {config.model_type} models; use another model")
    return config


def _made(transformers: ModuleType, folder: Path, config: PretrainedConfig, pretrained: bool) -> PreTrainedModel:
    """The model with the folder's weights, or with random ones; with our attention where it can be replaced."""
    auto = transformers.AutoModelForSequenceClassification
    replaced = auto._model_mapping[type(config)]._supports_attention_backend
    how = NO_CODE | {"dtype": torch.float32, **({"attn_implementation": registered()} if replaced else {})}
    if not pretrained:
        return auto.from_config(config, **how)
    model, found = auto.from_pretrained(
        folder, config=config, use_safetensors=_has(folder, SAFE), ignore_mismatched_sizes=True,
        output_loading_info=True, **how,
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


@contextmanager
def _reading(transformers: ModuleType, folder: Path) -> Iterator[None]:
    """Suppress transformers' log messages and progress bars; name the folder in its errors."""
    said, shown = transformers.logging.get_verbosity(), transformers.logging.is_progress_bar_enabled()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with reading(folder, "a transformers model"):
            yield
    finally:
        transformers.logging.set_verbosity(said)
        if shown:
            transformers.logging.enable_progress_bar()


# ----------------------------------------------------------------------------------- trained parameters


def rank_of(train: str) -> int | None:
    """The rank of lora:RANK; None for all and head.

    >>> rank_of("lora:8"), rank_of("head")
    (8, None)
    >>> rank_of("tail")
    Traceback (most recent call last):
        ...
    quasiglobal.errors.InputError: train must be all, head or lora:RANK, such as lora:8, got 'tail'
    """
    kind, _, rank = train.partition(":")
    if kind == "lora" and rank.isdecimal() and int(rank) > 0:
        return int(rank)
    if train not in ("all", "head"):
        raise InputError(f"train must be all, head or lora:RANK, such as lora:8, got {train!r}")
    return None


def freeze(model: PreTrainedModel, train: str) -> None:
    """Make only the chosen parameters of a transformers model trainable; the head is always included.

    The head is everything outside the base model, such as a classifier. LoRA's scale is 1, peft's value at rank 8.
    """
    rank = rank_of(train)
    if train == "all":
        return
    head = dict(head_of(model))
    if rank is not None:
        _add_lora(model, rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in head or (rank is not None and ".lora_" in name))


def head_of(model: PreTrainedModel) -> list[tuple[str, nn.Parameter]]:
    """The named parameters outside of the base model."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in base]


def _add_lora(model: PreTrainedModel, rank: int) -> None:
    """Add low-rank adapters at peft's default layers for this model type, or else at every linear layer."""
    try:
        from peft import LoraConfig, inject_adapter_in_model
        from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as USUAL
    except ImportError:
        raise InputError("train = lora needs peft: pip install 'quasiglobal[nlp]'") from None
    where = USUAL.get(model.config.model_type, "all-linear")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="fan_in_fan_out")         # for GPT-2's layers, peft sets it itself
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=where), model)
    named = [(name, parameter.shape) for name, parameter in model.named_parameters()]
    sides = [shape[1] for name, shape in named if ".lora_A." in name]
    sides += [shape[0] for name, shape in named if ".lora_B." in name]
    if rank > min(sides):
        raise InputError(
            f"train = lora:{rank} needs matrices with that many rows and columns, the smallest here has {min(sides)}; "
            "use at most that rank"
        )


# --------------------------------------------------------------- attention masks of many models at once
# transformers' own mask function branches on tensor values, which vmap does not support. So a mask function that does
# not is registered with transformers; the attention is transformers' own, and the modules stay unmodified.


NAME = "quasiglobal"


@cache
def registered() -> str:
    """Register the functions and return their `attn_implementation`; needs the extra `nlp`."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    AttentionInterface.register(NAME, sdpa_attention_forward)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def mask(**how: object) -> Tensor:
    """Full attention mask, bool [batch, 1, length, length]; never skipped as trivial."""
    from transformers.masking_utils import sdpa_mask

    found: Tensor = sdpa_mask(**how | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return found


# ----------------------------------------------------- activation checkpointing for many models at once
# PyTorch's own checkpointing recomputes a layer after vmap has ended, when the module no longer holds the stacked
# parameters. So here a layer is a function of its parameters too, and vmap runs inside the recomputed function.


Output = Tensor | tuple[Tensor, ...]
"""Output of a layer."""


def recompute(module: nn.Module) -> None:
    """Make a transformer store only its layers' inputs; recomputation draws the same dropout masks."""
    if not isinstance(module, LanguageModel) or not module.model.supports_gradient_checkpointing:
        raise InputError("--recompute is for hf: models that support gradient checkpointing; leave it out")
    module.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_recomputed)


def _recomputed(function: partial[Output], *args: object) -> Output:
    """Called by transformers instead of a layer; `function` is a partial of the layer's own call."""
    layer: GradientCheckpointingLayer = function.func.__self__  # type: ignore[attr-defined]
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    leaves, spec = tree_flatten((own, args, function.keywords))
    if any(isinstance(leaf, Tensor) and torch._C._functorch.is_batchedtensor(leaf) for leaf in leaves):
        output: Output = _OfAll.apply(layer, spec, *leaves)  # type: ignore[no-untyped-call]
    else:
        output = checkpoint(_call(layer, spec), *leaves, use_reentrant=False)
    return output


def _call(layer: GradientCheckpointingLayer, spec: TreeSpec) -> Callable[..., Output]:
    """The layer as a function of its parameters, buffers and arguments."""

    def call(*leaves: object) -> Output:
        own, args, keywords = tree_unflatten(leaves, spec)
        layer.gradient_checkpointing = False
        try:
            output: Output = functional_call(layer, own, args, keywords)
            return output
        finally:
            layer.gradient_checkpointing = True

    return call


class _OfAll(torch.autograd.Function):
    """One layer of all models, with autograd outside of vmap."""

    @staticmethod
    def forward(layer: GradientCheckpointingLayer, spec: TreeSpec, *leaves: object) -> Output:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[object, ...], output: Output) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(
        info: VmapInfo, in_dims: Sequence[int | None], layer: GradientCheckpointingLayer, spec: TreeSpec,
        *leaves: object,
    ) -> tuple[Output, int | tuple[int, ...]]:
        stacked = vmap(_call(layer, spec), in_dims=tuple(in_dims[2:]), randomness="different")
        result = checkpoint(stacked, *leaves, use_reentrant=False)
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)
