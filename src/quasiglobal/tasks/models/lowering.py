"""Linear layers of many models in 16 bits, as autocast has them for one.

vmap takes a linear layer apart before autocast sees it: its bias then stays in float32, and makes what follows float32
too. Here the layer's arguments are cast first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


class Lowered(TorchFunctionMode):
    """While it is active under autocast, linear layers whose arguments vmap has stacked are in the lower precision."""

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        own = OWN.get(function)
        if own is None or kwargs or not any(map(_stacked, args)):
            return function(*args, **(kwargs or {}))
        device = args[0].device.type
        lower = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            return own(*(value.to(lower) if isinstance(value, Tensor) else value for value in args))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.mT
    return product if bias is None else product + bias


def _addmm(bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    return x @ weight + bias


OWN: dict[Any, Callable[..., Tensor]] = {nn.functional.linear: _linear, torch.addmm: _addmm}
"""What a layer calls, and the same of tensors that are cast already."""


def _stacked(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)
