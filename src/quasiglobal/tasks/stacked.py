"""n copies of one convolutional network as one program of operations on stacked images.

The module's forward is traced once, for one model, to a list of tensor operations. Each is then carried out for all
models at a time: convolutions, and normalisations with the sum and the ReLU after them, by kernels that keep every
image channels-last (`kernels.py`); anything else by vmap. Gradients are autograd's.
"""

from __future__ import annotations

import copy
import operator
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, functionalize, vmap

from quasiglobal.tasks.models.norms import EvoNormS0

aten = torch.ops.aten


class Stacked:
    """The outputs and new buffers of all models, called with stacked parameters, buffers and inputs."""

    def __init__(
        self, module: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
    ) -> None:
        """Traced for the first row of each argument."""
        from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import

        known = _recognised(module)

        def forward(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Any:
            after = {name: value.clone() for name, value in buffers.items()}
            return functional_call(known, parameters | after, (inputs,)), after

        first = [{name: value[0] for name, value in named.items()} for named in (parameters, buffers)]
        with torch.no_grad():
            self.program = make_fx(functionalize(forward, remove="mutations"))(*first, inputs[0])
        _fuse(self.program.graph)

    @property
    def gains(self) -> bool:
        """Whether there is anything that the kernels do, and nothing that depends on how tensors lie in memory."""
        nodes = self.program.graph.nodes
        return any(map(_convolves, nodes)) and not any("as_strided" in str(node.target) for node in nodes)

    def __call__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor]]:
        result: tuple[Tensor, dict[str, Tensor]] = _AllModels(self.program).run(parameters, buffers, inputs)
        return result


class _AllModels(fx.Interpreter):
    """Runs a program of one model for all: what depends on the model has one more dimension, the first."""

    def run_node(self, n: fx.Node) -> Any:
        inputs = n.all_input_nodes
        n.meta["stacked"] = n.op == "placeholder" or any(node.meta["stacked"] for node in inputs)
        if n.op != "call_function" or n.target is operator.getitem or not n.meta["stacked"]:
            return super().run_node(n)
        if n.target is NORMALISE or _convolves(n):
            rule = _normalised if n.target is NORMALISE else _convolution
            return rule(*fx.node.map_arg(n.args, self.env.__getitem__))

        def of_one(*values: Tensor) -> Any:
            given = dict(zip(inputs, values, strict=True)).__getitem__
            target: Callable[..., Any] = ANY_ORDER.get(n.target, n.target)  # type: ignore[assignment, arg-type]
            return target(*fx.node.map_arg(n.args, given), **fx.node.map_arg(n.kwargs, given))  # type: ignore[misc]

        dims = tuple(0 if node.meta["stacked"] else None for node in inputs)
        return vmap(of_one, in_dims=dims)(*(self.env[node] for node in inputs))


# ------------------------------------------------------------------------------------------------ recognition


def _recognised(module: nn.Module) -> nn.Module:
    """A copy of the module whose normalisations are one operation each."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if type(part) in KNOWN and part.weight is not None:
            part.forward = partial(KNOWN[type(part)], part)  # type: ignore[method-assign]
    return module


def _evonorm(part: EvoNormS0, x: Tensor) -> Tensor:
    if x.ndim != 4 or x.shape[1:].numel() <= part.groups:
        return type(part).forward(part, x)
    return _operation(x, part, "evonorm", part.groups)[0]


def _group_norm(part: nn.GroupNorm, x: Tensor) -> Tensor:
    return _operation(x, part, "group", part.num_groups)[0] if x.ndim == 4 else type(part).forward(part, x)


def _batch_norm(part: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if not part.training or part.momentum is None or x.shape[0] * x.shape[2] * x.shape[3] == 1:
        return type(part).forward(part, x)
    tracked = part.running_mean is not None and part.running_var is not None and part.num_batches_tracked is not None
    running = [part.running_mean, part.running_var] if tracked else []
    y, *after = _operation(x, part, "batch", part.num_features, running, part.momentum)
    if tracked:
        part.num_batches_tracked.add_(1)  # type: ignore[union-attr]
        for old, new in zip(running, after, strict=True):
            old.copy_(new)  # type: ignore[union-attr]
    return y


def _operation(
    x: Tensor, part: Any, kind: str, groups: int, running: list[Any] | None = None, momentum: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    result: tuple[Tensor, Tensor, Tensor] = NORMALISE(
        x, part.weight, part.bias, None, running or [], kind, groups, part.eps, momentum, False
    )
    return result


KNOWN: dict[type[nn.Module], Callable[..., Tensor]] = {
    EvoNormS0: _evonorm,
    nn.GroupNorm: _group_norm,
    nn.BatchNorm2d: _batch_norm,
}


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, rest: Tensor | None, running: list[Tensor],
    kind: str, groups: int, eps: float, momentum: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """One model's images [b, c, h, w] normalised, then `rest` added and ReLU applied; the new running statistics.

    `kind` is evonorm, group, batch, or shift: a convolution's bias, which comes without a scale.
    """
    mean, variance = running or (bias.new_empty(0), bias.new_empty(0))
    if kind == "batch":
        var, centre = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
        unit = (x - centre) / (var + eps).sqrt()
        if running:
            count = x.numel() // x.shape[1]
            mean = torch.lerp(mean, centre.flatten().to(mean.dtype), momentum)
            variance = torch.lerp(variance, (var.flatten() * (count / (count - 1))).to(mean.dtype), momentum)
    elif kind == "shift":
        unit = x
    else:
        grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
        var, centre = torch.var_mean(grouped, dim=(2, 3, 4), correction=int(kind == "evonorm"), keepdim=True)
        unit = nn.functional.silu(grouped) if kind == "evonorm" else grouped - centre
        unit = (unit / (var + eps).sqrt()).reshape(x.shape)
    y = unit + bias[:, None, None] if kind == "shift" else unit * weight[:, None, None] + bias[:, None, None]
    y = y if rest is None else y + rest
    return (y.relu() if relu else y), mean, variance


NORMALISE = torch.library.custom_op(
    "quasiglobal::normalise",
    lambda *arguments: tuple(value.clone() for value in normalise(*arguments)),
    mutates_args=(),
    schema="(Tensor x, Tensor weight, Tensor bias, Tensor? rest, Tensor[] running, str kind, int groups, float eps, "
    "float momentum, bool relu) -> (Tensor, Tensor, Tensor)",
)._opoverload
"""`normalise` as one operation of a trace."""

ANY_ORDER = {
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    NORMALISE: normalise,
}
"""What was a view in the order that the trace saw need not be one when channels come last."""


def _convolves(node: fx.Node) -> bool:
    """Whether this is a convolution that the kernels do: an ordinary one over images, its sides treated alike."""
    if node.target is not aten.convolution.default:
        return False
    _, weight, _, stride, padding, dilation, transposed, _, groups = node.args
    plain = not transposed and groups == 1 and set(dilation) == {1} and len(set(stride)) == len(set(padding)) == 1  # type: ignore[arg-type]
    return plain and len(_shape(weight)) == 4 and weight.op == "placeholder"  # type: ignore[union-attr]


def _shape(node: Any) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _fuse(graph: fx.Graph) -> None:
    """Make a convolution's bias a shift, and a sum and a ReLU that follow a normalisation a part of it."""
    for node in list(graph.nodes):
        if _convolves(node) and (bias := node.args[2]) is not None:
            node.args = (*node.args[:2], None, *node.args[3:])
            with graph.inserting_after(node):
                shift = graph.call_function(NORMALISE, (node, bias, bias, None, [], "shift", 1, 0.0, 0.0, False))
            with graph.inserting_after(shift):
                y = graph.call_function(operator.getitem, (shift, 0))
            y.meta = node.meta
            node.replace_all_uses_with(y, delete_user_cb=lambda user, shift=shift: user is not shift)
    for node in list(graph.nodes):
        if node.target is NORMALISE:
            _absorb(node)
        elif node.target is aten.copy.default and node.meta["val"].dtype == node.args[1].meta["val"].dtype:
            node.replace_all_uses_with(node.args[1])        # a buffer's new value
    graph.eliminate_dead_code()


def _absorb(node: fx.Node) -> None:
    """Take over what alone uses the result: a sum with something of the same shape that is known already, a ReLU."""
    y = next(user for user in node.users if user.args[1] == 0)
    x, weight, bias, rest, *how, relu = node.args
    if (add := _only_user(y, aten.add.Tensor)) and not add.kwargs:
        other = add.args[1] if add.args[0] is y else add.args[0]
        if isinstance(other, fx.Node) and other < node and _shape(other) == _shape(y):
            rest = other
            add.replace_all_uses_with(y)
            add.args = ()
    if activation := _only_user(y, aten.relu.default):
        relu = True
        activation.replace_all_uses_with(y)
        activation.args = ()
    node.args = (x, weight, bias, rest, *how, relu)


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


# ---------------------------------------------------------------------------------------------------- kernels


def _kernels(x: Tensor) -> bool:
    """Whether the kernels run here: on a GPU, or in Triton's interpreter, which the tests use."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _convolution(x: Tensor, weight: Tensor, _: None, stride: list[int], padding: list[int], *__: Any) -> Tensor:
    """x [n, b, c, h, w] with each model's kernels [n, out, c, r, s]."""
    if _kernels(x):
        y: Tensor = _Convolution.apply(x, weight, stride[0], padding[0])
        return y
    return vmap(partial(nn.functional.conv2d, stride=stride, padding=padding))(x, weight)


def _normalised(
    x: Tensor, weight: Tensor, bias: Tensor, rest: Tensor | None, running: list[Tensor],
    kind: str, groups: int, eps: float, momentum: float, relu: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`normalise` of all models' images."""
    if _kernels(x) and (kind in ("shift", "batch") or _fits(x.shape[2], groups)):
        y: tuple[Tensor, Tensor, Tensor] = _Normalised.apply(
            x, weight, bias, rest, *(running or (None, None)), kind, groups, eps, momentum, relu
        )
        return y
    one = partial(normalise, kind=kind, groups=groups, eps=eps, momentum=momentum, relu=relu)
    return vmap(one, in_dims=(0, 0, 0, None if rest is None else 0, 0))(x, weight, bias, rest, running)


def _fits(channels: int, groups: int) -> bool:
    """Whether whole groups of channels make blocks whose size is a power of two."""
    size = channels // groups
    return size == 1 or (size & (size - 1) == 0 and channels & (channels - 1) == 0)


def _channels_last(x: Tensor) -> Tensor:
    """[n, b, c, h, w] as [n, b, h, w, c] and contiguous, which inside a network it is."""
    return x.movedim(2, -1).contiguous()


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        from quasiglobal.tasks import kernels

        dtype = torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype
        images, taps = _channels_last(x.to(dtype)), weight.permute(0, 3, 4, 2, 1)
        packed = torch.empty(taps.shape, dtype=dtype, device=x.device).copy_(taps)
        ctx.save_for_backward(images, packed)
        ctx.how = stride, padding
        return kernels.convolve(images, packed, stride, padding).movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quasiglobal.tasks import kernels

        images, packed = ctx.saved_tensors
        dx, dy = None, _channels_last(dy)
        if ctx.needs_input_grad[0]:
            dx = kernels.convolve_back(dy, packed, images.shape, *ctx.how).movedim(-1, 2)
        shares = kernels.weight_gradient(images, dy, packed.shape[1:3], *ctx.how).permute(0, 1, 5, 4, 2, 3)
        dw = torch.empty(shares[:, 0].shape, dtype=shares.dtype, device=dy.device)
        return dx, torch.sum(shares, dim=1, out=dw), None, None


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rest: Tensor | None, mean: Tensor | None,
        variance: Tensor | None, kind: str, groups: int, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        from quasiglobal.tasks import kernels

        images, added = _channels_last(x), None if rest is None else _channels_last(rest)
        y, own, running = kernels.normalise(
            images, weight, bias, added, mean, variance, kind, groups, eps, momentum, relu
        )
        ctx.save_for_backward(images, weight, y if relu else None, own)
        ctx.how = kind, groups, eps, relu, rest is not None
        ctx.mark_non_differentiable(*running)
        return y.movedim(-1, 2), *running

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, *_: Any) -> Any:
        from quasiglobal.tasks import kernels

        images, weight, y, own = ctx.saved_tensors
        dx, drest, sums = kernels.normalise_back(images, weight, y, _channels_last(dy), own, *ctx.how)
        dweight, dbias = sums.sum(dim=1).unbind(dim=1)
        drest = drest.movedim(-1, 2) if ctx.how[-1] else None
        dweight = dweight if ctx.how[0] != "shift" else None
        return dx.movedim(-1, 2), dweight, dbias, drest, *(None,) * 7
