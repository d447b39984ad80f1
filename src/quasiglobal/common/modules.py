"""Copies of a user's module, and its conversion to another precision."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor, nn


def copied(module: nn.Module, shared: Mapping[int, Tensor] | None = None) -> nn.Module:
    """A deep copy of a module; tensors whose id is in `shared` are those of the mapping.

    `copy.deepcopy` fails on tensors that are computed from others, such as the weights of a pruned layer, drops the
    gradient hooks of parameters, and leaves those of a scripted part connected to the original's.

    >>> layer = torch.nn.utils.prune.identity(nn.Linear(2, 1), "weight")
    >>> layer.weight_orig.register_hook(lambda gradient: 0 * gradient) and None
    >>> copy = copied(layer)
    >>> copy.weight.equal(layer.weight), copy.weight is layer.weight, len(copy.weight_orig._backward_hooks)
    (True, False, 1)
    """
    memo: dict[int, object] = dict(shared or {})
    for part in module.modules():
        for value in vars(part).values():
            if isinstance(value, Tensor):
                if torch._C._functorch.is_functorch_wrapped_tensor(value):     # kept from a call inside vmap
                    memo[id(value)] = torch.empty(0)
                elif not value.is_leaf:
                    memo[id(value)] = value.detach().clone()
    result = copy.deepcopy(module, memo)
    for before, after in zip(module.parameters(), result.parameters(), strict=True):
        if not after.is_leaf:                               # of a scripted part: computed from the original
            after.detach_().requires_grad_(before.requires_grad)
        if before is not after:
            for hook in (before._backward_hooks or {}).values():
                after.register_hook(hook)  # type: ignore[no-untyped-call]
            for hook in (before._post_accumulate_grad_hooks or {}).values():
                after.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
    return result


def kept_from_vmap(module: nn.Module) -> str:
    """Name of an attribute that is a tensor of a call inside vmap, which has ended; empty if there is none."""
    return next((
        f"{name}.{key}".removeprefix(".")
        for name, part in module.named_modules() for key, value in vars(part).items()
        if isinstance(value, Tensor) and torch._C._functorch.is_functorch_wrapped_tensor(value)
    ), "")


def converted(module: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """Move a module's tensors to a device, and its floating-point tensors to a precision.

    `nn.Module.to` would drop the imaginary parts of complex tensors.

    >>> module = nn.Module()
    >>> module.register_buffer("turns", torch.tensor([1j]))
    >>> converted(module, torch.device("cpu"), torch.float64).turns
    tensor([0.+1.j], dtype=torch.complex128)
    """
    result: nn.Module = module._apply(partial(in_precision, device=device, dtype=dtype))  # type: ignore[no-untyped-call]
    return result


def in_precision(value: Tensor, device: torch.device | None, dtype: torch.dtype) -> Tensor:
    """A tensor on a device; floating-point and complex numbers in a precision, others as they are."""
    if value.is_complex():
        return value.to(device, dtype.to_complex())
    return value.to(device, dtype if value.is_floating_point() else None)
