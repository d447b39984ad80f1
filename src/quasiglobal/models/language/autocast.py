"""Linear layers of many models in 16 bits, as autocast computes them for one model.

vmap decomposes a linear layer before autocast applies: its bias then stays in float32, and the output becomes float32
too. Here the layer's arguments are cast first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class Lowered(TorchFunctionMode):
    """Mode that, under autocast, computes linear layers with vmap-stacked arguments in the lower precision."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own, named = OWN.get(function), kwargs or {}
        tensors = [value for value in (*args, *named.values()) if isinstance(value, Tensor)]
        if own is None or not any(map(torch._C._functorch.is_batchedtensor, tensors)):
            return function(*args, **named)
        device = tensors[0].device.type
        lower = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            args, named = tree_map_only(Tensor, lambda value: value.to(lower), (tuple(args), named))
            return own(*args, **named)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = input @ weight.mT
    return product if bias is None else product + bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * (mat1 @ mat2) + beta * input if (alpha, beta) != (1, 1) else mat1 @ mat2 + input


OWN: dict[Any, Callable[..., Tensor]] = {nn.functional.linear: _linear, torch.addmm: _addmm}
"""Functions that layers call, and their replacements for tensors that are already cast."""
