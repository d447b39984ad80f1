"""Trace one model's forward pass to tensor operations; a linear layer or a normalisation is one operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize
from torch.overrides import TorchFunctionMode

from quasiglobal.common.modules import copied
from quasiglobal.stacked.kernels.operations import LAYER_NORM, LINEAR, NORMALISE
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.recording import Untraceable, recorded
from quasiglobal.stacked.stackable import stackable


def traced_forward(
    module: nn.Module, layout: Layout, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor
) -> fx.GraphModule:
    """Trace to a function of one model's parameters, buffers and inputs."""
    known = _with_known_norms(module)

    def forward(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Any:
        after = {name: value.clone() for name, value in buffers.items()}
        values = parameters | after
        with stackable(x, everywhere=True), _WholeLayers():
            output = functional_call(known, values, (inputs,))
        return output, {name: values[name] for name in after}       # those that `forward` assigned anew

    first, row = {name: value[0] for name, value in buffers.items()}, x[0].clone()
    with torch.enable_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        graph = recorded(functionalize(forward, remove="mutations"), (layout.views(row), first, inputs[0].clone()))
    if row._version:
        raise Untraceable("the model writes into its own weights")
    return graph


class _WholeLayers(TorchFunctionMode):
    """Call `LINEAR` and `LAYER_NORM` instead of PyTorch's functions, which are decomposed; record every cast.

    A cast to float32 has no effect in the trace, which is in float32, but it has under autocast.
    """

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        given = (*args[1:], *(kwargs or {}).values())
        result = WHOLE.get(function, function)(*args, **(kwargs or {}))
        typed = function is Tensor.float or any(isinstance(one, torch.dtype | Tensor) for one in given)
        if function in CASTS and typed and result is args[0] and result.is_floating_point():
            return torch.ops.aten._to_copy.default(result, dtype=result.dtype)
        return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    plain = weight.ndim == 2 and input.ndim > 1
    return (LINEAR if plain else nn.functional.linear)(input, weight, bias)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if weight is None or bias is None or len(normalized_shape) > 1:
        return nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return LAYER_NORM(input, weight, bias, eps)


def _with_known_norms(module: nn.Module) -> nn.Module:
    """A copy of the module, with the same parameters, whose normalisations call `NORMALISE`."""
    module = copied(module, {id(parameter): parameter for parameter in module.parameters()})
    for part in module.modules():
        known = KNOWN.get(type(part)) or KERNELS.get(vars(type(part)).get("stacked_kernel", ""))
        if known and part.weight is not None:
            part.forward = partial(known, part)
    return module


def _evonorm(part: Any, x: Tensor) -> Tensor:
    if x.ndim != 4 or x.shape[1:].numel() <= part.groups:
        plain: Tensor = type(part).forward(part, x)
        return plain
    return _operation(x, part, "evonorm", part.groups)[0]


def _group_norm(part: nn.GroupNorm, x: Tensor) -> Tensor:
    return _operation(x, part, "group", part.num_groups)[0] if x.ndim == 4 else type(part).forward(part, x)


def _batch_norm(part: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if not part.training and part.running_mean is not None and part.running_var is not None:
        scale = part.weight / (part.running_var + part.eps).sqrt()
        return x * scale[:, None, None] + (part.bias - part.running_mean * scale)[:, None, None]
    if part.momentum is None or x.shape[0] * x.shape[2] * x.shape[3] == 1:
        return type(part).forward(part, x)
    count = part.num_batches_tracked
    if part.running_mean is None or part.running_var is None or count is None:
        return _operation(x, part, "batch", part.num_features, [], part.momentum)[0]
    running = [part.running_mean, part.running_var]
    y, part.running_mean, part.running_var = _operation(x, part, "batch", part.num_features, running, part.momentum)
    part.num_batches_tracked = count + 1
    return y


def _operation(
    x: Tensor, part: Any, kind: str, groups: int, running: list[Tensor] | None = None, momentum: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = NORMALISE(
        x, part.weight, part.bias, None, running or [], kind, groups, part.eps, momentum, False
    )
    return result


WHOLE: dict[Callable[..., Any], Callable[..., Any]] = {
    nn.functional.linear: _linear, nn.functional.layer_norm: _layer_norm,
}
"""Functions that a trace would decompose, and those that it does not."""

CASTS = (Tensor.to, Tensor.float, Tensor.type, Tensor.type_as)
"""Functions that return their tensor if it has the type already."""

KNOWN: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.GroupNorm: _group_norm,
    nn.BatchNorm2d: _batch_norm,
}

KERNELS: dict[str, Callable[..., Tensor]] = {"evonorm": _evonorm}
"""Kernels that a class declares for itself, not for classes derived from it, as its attribute `stacked_kernel`."""
