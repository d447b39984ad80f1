"""Trained parameters of a pretrained model: all, head or LoRA. Only these are stored per node, gossiped and saved.

LoRA: E. J. Hu et al.: LoRA: Low-Rank Adaptation of Large Language Models. ICLR 2022.
"""

from __future__ import annotations

import warnings
from typing import Any

from quasiglobal.errors import InputError


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
    if kind == "lora" and rank.isdigit() and int(rank) > 0:
        return int(rank)
    if train not in ("all", "head"):
        raise InputError(f"train must be all, head or lora:RANK, such as lora:8, got {train!r}")
    return None


def freeze(model: Any, train: str) -> None:
    """Make only the chosen parameters of a transformers model trainable; the head is always included.

    The head is everything outside of the base model, such as a classifier. LoRA's scale is 1, peft's value at rank 8.
    """
    rank = rank_of(train)
    if train == "all":
        return
    head = dict(head_of(model))
    if rank is not None:
        _add_lora(model, rank)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in head or (rank is not None and ".lora_" in name))


def head_of(model: Any) -> list[tuple[str, Any]]:
    """The named parameters outside of the base model."""
    base = {id(parameter) for parameter in model.base_model.parameters()}
    return [(name, parameter) for name, parameter in model.named_parameters() if id(parameter) not in base]


def _add_lora(model: Any, rank: int) -> None:
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
