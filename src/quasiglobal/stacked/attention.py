"""Scaled-dot-product attention of all models, as one call on the batches of all models."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from quasiglobal.stacked.fusing import is_stacked


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **how: Any,
) -> Tensor:
    """Scaled-dot-product attention of all models, as one call on the batches of all models."""
    how |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if any(map(is_stacked, (query, key, value, attn_mask))):
        folded: Tensor = _Folded.apply(how, query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return folded
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **how)


class _Folded(torch.autograd.Function):
    """Attention on the tensors of all models, with autograd outside of vmap."""

    @staticmethod
    def forward(how: dict[str, Any], *tensors: Tensor | None) -> Tensor:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[Any], how: dict[str, Any], *tensors: Tensor | None
    ) -> tuple[Tensor, int]:
        def of_all(tensor: Tensor, dim: int | None) -> Tensor:
            stacked = tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
            return stacked if stacked.ndim > 3 else stacked.unsqueeze(1)    # [models, …, heads, length, size]

        query, key, value = (of_all(tensor, dim) for tensor, dim in zip(tensors[:3], in_dims[1:4], strict=True))  # type: ignore[arg-type]
        lead = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in (query, key, value)))  # type: ignore[no-untyped-call]
        mask = tensors[3]
        if mask is not None and (in_dims[4] is not None or mask.ndim > 2):
            mask = mask.expand(info.batch_size, *mask.shape) if in_dims[4] is None else mask.movedim(in_dims[4], 0)
            mask = mask.reshape(len(mask), *(1,) * (len(lead) + 3 - mask.ndim), *mask.shape[1:])
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
        query, key, value = (
            tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, len(lead) - 1) for tensor in (query, key, value)
        )
        result = _by_kernels(query, key, value, mask, how)
        if result is None:
            with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
                result = attention(query, key, value, mask, **how)      # there may be an outer vmap
        result = result.reshape(*lead, *result.shape[1:])
        few = tensors[0].ndim + (in_dims[1] is None) < 4  # type: ignore[union-attr]
        return result.squeeze(1) if few else result, 0


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]) -> Tensor | None:
    """Attention by our own kernels, which are faster for short texts; None if they do not suit."""
    if find_spec("triton") is None or any(map(is_stacked, (query, key, value, mask))):
        return None
    from quasiglobal.stacked.kernels.attention import attend, suits

    if not suits(query, key, value, mask, how):
        return None
    return attend(query, key, value, mask, how["dropout_p"], how.get("scale"))
