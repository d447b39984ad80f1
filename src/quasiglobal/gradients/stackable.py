"""Functions that vmap does not support, or computes slowly, replaced by equal ones for the models of a stack.

- `scaled_dot_product_attention`: the backward passes of its fused kernels have no batching rule. The batches of all
  models become one batch. The fast path of `nn.MultiheadAttention` in evaluation, which has none either, is off.
- `lstm`, `gru`, `rnn_tanh`, `rnn_relu` and their cells have no batching rule. They are written out (`recurrence.py`).
- `linear` and `addmm` are decomposed before autocast applies: the bias, and with it the output, would stay in float32.
  Their arguments are cast first.
- Others read values (`one_hot`), write into an argument that is not stacked (`normalize` with `out`), or have no rule.

The replacements need autograd outside of vmap (`routes.by_autograd`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quasiglobal.gradients.recurrence import RECURRENT


@contextmanager
def stackable(given: Any, everywhere: bool = False) -> Iterator[None]:
    """Replace these functions for tensors that vmap has stacked; leave other tensors alone.

    `given` are the model's parameters and inputs: if they are stacked, so are new tensors of zeros, into which a model
    may write. With `everywhere`, replace functions for all tensors, by plain operations to be traced; what the model
    computes without gradients is detached, since a trace does not record `torch.no_grad`.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH), Replacing(given, everywhere):    # the mode is off in nn.MultiheadAttention
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class Replacing(TorchFunctionMode):
    """Mode that calls the replacement of a function if an argument is stacked."""

    def __init__(self, given: Any, everywhere: bool) -> None:
        super().__init__()
        self.stacked, self.everywhere = [leaf for leaf in tree_leaves(given) if is_stacked(leaf)], everywhere

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = tuple(args), kwargs or {}
        if self.everywhere and not torch.is_grad_enabled():
            given = tree_map_only(Tensor, Tensor.detach, given)
        name, stacked = getattr(function, "__name__", ""), any(map(is_stacked, tree_leaves(given)))
        own = LOWERED | PLAIN if stacked else PLAIN if self.everywhere else {}
        result = own.get(name, function)(*given[0], **given[1])
        if name in NEW and not stacked:
            for leaf in self.stacked:
                result = torch.where(leaf.new_ones((), dtype=torch.bool), result, result)
        return result


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
        lead = query.shape[:-3]
        mask = tensors[3]
        if mask is not None and (in_dims[4] is not None or mask.ndim > 2):
            mask = mask.expand(info.batch_size, *mask.shape) if in_dims[4] is None else mask.movedim(in_dims[4], 0)
            mask = mask.reshape(len(mask), *(1,) * (query.ndim - mask.ndim), *mask.shape[1:])
            mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
        query, key, value = (
            tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, len(lead) - 1) for tensor in (query, key, value)
        )
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            result = attention(query, key, value, mask, **how)      # there may be an outer vmap
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


# ---------------------------------------------------------------------------------------- other functions


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return nn.functional.one_hot(tensor)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    value = input / input.norm(p, dim, keepdim=True).clamp(min=eps)
    return value if out is None else out.copy_(value)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = torch.einsum("...i,oij,...j->...o", input1, weight, input2)
    return product if bias is None else product + bias


def _embedding_bag(*args: Any, **named: Any) -> Any:
    given = signature(nn.functional.embedding_bag).bind(*args, **named).arguments
    special = ("offsets", "max_norm", "per_sample_weights", "padding_idx")
    if any(given.get(name) is not None for name in special) or given.get("scale_grad_by_freq"):
        return nn.functional.embedding_bag(*args, **named)
    vectors, mode = nn.functional.embedding(given["input"], given["weight"]), given.get("mode", "mean")
    return vectors.amax(dim=1) if mode == "max" else vectors.sum(dim=1) if mode == "sum" else vectors.mean(dim=1)


LOWERED: dict[str, Callable[..., Any]] = {"linear": _lowered(_linear), "addmm": _lowered(_addmm)}
"""Names of functions, and their replacements for stacked tensors."""

NEW = ("zeros", "zeros_like", "empty", "empty_like")
"""Functions that make a tensor, each model its own: vmap cannot write stacked values into a tensor that is not."""

PLAIN: dict[str, Callable[..., Any]] = {
    "scaled_dot_product_attention": attention,
    "one_hot": _one_hot,
    "normalize": _normalize,
    "_weight_norm": _weight_norm,
    "bilinear": _bilinear,
    "embedding_bag": _embedding_bag,
    **RECURRENT,
}
"""Names of functions, and their replacements for all tensors."""
