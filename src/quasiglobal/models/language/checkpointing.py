"""Activation checkpointing for many models at once: the backward pass recomputes each layer to save memory.

T. Chen, B. Xu, C. Zhang, C. Guestrin: Training Deep Nets with Sublinear Memory Cost. 2016.

PyTorch's own checkpointing recomputes a layer after vmap has ended, when the module no longer holds the stacked
parameters. So here a layer is a function of its parameters too, and vmap runs inside the recomputed function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from quasiglobal.errors import InputError
from quasiglobal.models.language.loading import LanguageModel


def recompute(module: nn.Module) -> None:
    """Make a transformer store only its layers' inputs; recomputation draws the same dropout masks."""
    if not isinstance(module, LanguageModel) or not module.model.supports_gradient_checkpointing:
        raise InputError("--recompute is for hf: models that support gradient checkpointing; leave it out")
    module.model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=_recomputed)


def _recomputed(function: Any, *args: Any) -> Any:
    """Called by transformers instead of a layer; `function` is a partial of the layer's own call."""
    layer: nn.Module = function.func.__self__
    own = dict(layer.named_parameters()) | dict(layer.named_buffers())
    leaves, spec = tree_flatten((own, args, function.keywords))
    if any(isinstance(leaf, Tensor) and torch._C._functorch.is_batchedtensor(leaf) for leaf in leaves):
        return _OfAll.apply(layer, spec, *leaves)  # type: ignore[no-untyped-call]
    return checkpoint(_call(layer, spec), *leaves, use_reentrant=False)


def _call(layer: Any, spec: TreeSpec) -> Callable[..., Any]:
    """The layer as a function of its parameters, buffers and arguments."""

    def call(*leaves: Any) -> Any:
        own, args, keywords = tree_unflatten(leaves, spec)
        layer.gradient_checkpointing = False
        try:
            return functional_call(layer, own, args, keywords)
        finally:
            layer.gradient_checkpointing = True

    return call


class _OfAll(torch.autograd.Function):
    """One layer of all models, with autograd outside of vmap."""

    @staticmethod
    def forward(layer: nn.Module, spec: TreeSpec, *leaves: Any) -> Any:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(info: Any, in_dims: Sequence[int | None], layer: nn.Module, spec: TreeSpec, *leaves: Any) -> Any:
        tensors = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        call, dims = _call(layer, spec), tuple(in_dims[2:][place] for place in tensors)

        def with_tensors(*values: Tensor) -> Any:
            filled = list(leaves)
            for place, value in zip(tensors, values, strict=True):
                filled[place] = value
            return call(*filled)

        stacked = vmap(with_tensors, in_dims=dims, randomness="different")
        result = checkpoint(stacked, *(leaves[place] for place in tensors), use_reentrant=False)
        return result, 0 if isinstance(result, Tensor) else (0,) * len(result)
