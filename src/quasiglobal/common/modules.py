"""Copies of a user's module, and its conversion to another precision."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

RandomGenerator = np.random.Generator | np.random.RandomState | random.Random | torch.Generator
"""Random number generators that a model may contain."""


def copied(module: nn.Module, shared: Mapping[int, object] | None = None) -> nn.Module:
    """A deep copy of a module; the mapping `shared` replaces objects by their id.

    `copy.deepcopy` fails on tensors that are computed from others, such as the weights of a pruned layer, drops the
    gradient hooks of parameters, and leaves those of a scripted part connected to the original's.

    >>> from torch.nn.utils import prune
    >>> layer = prune.identity(nn.Linear(2, 1), "weight")
    >>> layer.weight_orig.register_hook(lambda gradient: 0 * gradient) and None
    >>> copy = copied(layer)
    >>> copy.weight.equal(layer.weight), copy.weight is layer.weight, len(copy.weight_orig._backward_hooks)
    (True, False, 1)
    """
    memo: dict[int, object] = dict(shared or {})
    for leaf in attributes_of(module):
        if isinstance(leaf, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(leaf):          # kept from a call inside vmap
                memo[id(leaf)] = torch.empty(0)
            elif not leaf.is_leaf:
                memo[id(leaf)] = leaf.detach().clone()
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


USUAL = frozenset(vars(nn.Module()))
"""Attributes of every module: parameters, buffers, parts, hooks."""

CONTAINERS = (list, dict, tuple, deque, defaultdict, OrderedDict)
"""Containers that are searched."""

MOST = 10_000
"""Maximum size of a container that is searched; larger ones are tables, such as vocabularies."""


def leaves_of(value: object, depth: int = 3) -> Iterator[object]:
    """The value, or the values in a container.

    >>> list(leaves_of({"a": [1, (2.0, None)]}))
    [1, 2.0, None]
    """
    if depth and isinstance(value, CONTAINERS) and type(value) in CONTAINERS:   # no classes of the user's
        if len(value) <= MOST:
            for one in value.values() if isinstance(value, dict) else value:
                yield from leaves_of(one, depth - 1)
    else:
        yield value


def attributes_of(module: nn.Module) -> Iterator[object]:
    """The values of the attributes of a module and its parts, also those in containers."""
    for part in module.modules():
        for key, value in vars(part).items():
            if key not in USUAL:
                yield from leaves_of(value)


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
