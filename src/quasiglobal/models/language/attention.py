"""Attention of many models at once: transformers' own function, called once on the batches of all models.

vmap has no rule for the backward pass of scaled-dot-product attention, and transformers' mask functions branch on
tensor values, which vmap does not support. So this file registers its own attention and mask functions with
transformers; the modules stay unmodified. Under vmap, the models' batches are folded into one batch, and ordinary
autograd outside of vmap computes the gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

NAME = "quasiglobal"


@cache
def registered() -> str:
    """Register the functions and return their `attn_implementation`; needs the extra `nlp`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
    return NAME


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    position_bias: Tensor | None = None,
    **how: Any,
) -> tuple[Tensor, None]:
    """Scaled-dot-product attention as transformers calls it, [batch, heads, length, size] → [batch, length, …]."""
    tensors = (query, key, value, mask, position_bias)
    if any(tensor is not None and torch._C._functorch.is_batchedtensor(tensor) for tensor in tensors):
        folded: Tensor = _Folded.apply(module, how, *tensors)  # type: ignore[no-untyped-call]
        return folded, None
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    result = sdpa_attention_forward(module, query, key, value, mask, position_bias=position_bias, **how)[0]
    return result, None


def mask(**how: Any) -> Tensor:
    """Full attention mask, bool [batch, 1, length, length]; never skipped as trivial."""
    from transformers.masking_utils import sdpa_mask

    found: Tensor = sdpa_mask(**how | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
    return found


class _Folded(torch.autograd.Function):
    """Attention on the tensors of all models, with autograd outside of vmap."""

    @staticmethod
    def forward(module: nn.Module, how: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], module: nn.Module, how: dict[str, Any], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        dims = in_dims[2:]
        batch = next(
            tensor.select(dim, 0).shape[0]
            for tensor, dim in zip(tensors, dims, strict=True)
            if tensor is not None and dim is not None
        )

        def fold(tensor: Tensor | None, dim: int | None) -> Any:
            if tensor is None:
                return None
            each = tensor[None] if dim is None else tensor.movedim(dim, 0)
            return each.expand(info.batch_size, batch, *each.shape[2:]).flatten(0, 1)

        folded = [fold(tensor, dim) for tensor, dim in zip(tensors, dims, strict=True)]
        result, _ = attention(module, *folded, **how)       # there may be an outer vmap
        return result.view(info.batch_size, batch, *result.shape[1:]), 0
