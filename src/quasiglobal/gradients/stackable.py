"""Functions that vmap does not support, or computes slowly, replaced by equal ones for the models of a stack.

- `scaled_dot_product_attention`: the backward passes of its fused kernels have no batching rule. The batches of all
  models become one batch. The fast path of `nn.MultiheadAttention` in evaluation, which has none either, is off.
- `lstm`, `gru`, `rnn_tanh`, `rnn_relu` and their cells have no batching rule. They are written out (`recurrence.py`).
- `linear` and `addmm` are decomposed before autocast applies: the bias, and with it the output, would stay in float32.
  Their arguments are cast first.

The replacements need autograd outside of vmap (`routes.by_autograd`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quasiglobal.gradients.recurrence import RECURRENT


@contextmanager
def stackable(everywhere: bool = False) -> Iterator[None]:
    """Replace the functions of the table for tensors that vmap has stacked; leave other tensors alone.

    With `everywhere`, replace attention and recurrent layers for all tensors, by plain operations to be traced.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), Replacing(everywhere):     # inside nn.MultiheadAttention the mode is off
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Replacing(TorchFunctionMode):
    """Mode that calls the replacement of a function if an argument is stacked."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        self.everywhere = everywhere

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if self.everywhere:
            own = RECURRENT.get(name, function)
        else:
            own = REPLACEMENTS.get(name, function) if any(map(is_stacked, tree_leaves((args, kwargs)))) else function
        return own(*args, **(kwargs or {}))


def is_stacked(value: Any) -> bool:
    """Whether this is a tensor with a dimension that vmap hides."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


# ---------------------------------------------------------------------------------------------- attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0, **how: Any
) -> Tensor:
    """Scaled-dot-product attention of all models, as one call on the batches of all models."""
    how["dropout_p"] = dropout_p
    if any(map(is_stacked, (query, key, value, attn_mask))):
        folded: Tensor = _Folded.apply(how, query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return folded
    with sdpa_kernel(list(_FUSED)):
        return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **how)


_FUSED = (
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
)


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
        lead = query.shape[:-3]
        mask = tensors[3]
        if mask is not None and (in_dims[4] is not None or mask.ndim > 2):
            mask = mask.expand(info.batch_size, *mask.shape) if in_dims[4] is None else mask.movedim(in_dims[4], 0)
            mask = mask.reshape(len(mask), *(1,) * (query.ndim - mask.ndim), *mask.shape[1:])
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
        query, key, value = (
            tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, len(lead) - 1) for tensor in (query, key, value)
        )
        result = attention(query, key, value, mask, **how)  # there may be an outer vmap
        result = result.reshape(*lead, *result.shape[1:])
        few = tensors[0].ndim + (in_dims[1] is None) < 4  # type: ignore[union-attr]
        return result.squeeze(1) if few else result, 0


# ------------------------------------------------------------------------------------------ linear layers


def _lowered(exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`exact` with its arguments cast first, if autocast is on."""
    def own(*args: Any, **named: Any) -> Tensor:
        device = next(value for value in tree_leaves((args, named)) if isinstance(value, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return exact(*args, **named)
        lower = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            args, named = tree_map_only(Tensor, lambda value: value.to(lower), (args, named))
            return exact(*args, **named)

    return own


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = input @ weight.mT
    return product if bias is None else product + bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * (mat1 @ mat2) + beta * input if (alpha, beta) != (1, 1) else mat1 @ mat2 + input


REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "linear": _lowered(_linear),
    "addmm": _lowered(_addmm),
    **RECURRENT,
}
"""Names of functions, and their replacements."""
