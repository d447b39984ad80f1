"""n copies of one convolutional network as one program of operations on stacked images.

The module's forward is traced once, for one model, to a list of tensor operations. Each is then carried out for all
models at a time: convolutions, pooling, and normalisations with the sum and the ReLU after them, by kernels that keep
every image channels-last (`kernels.py`); anything else by vmap. The backward pass is autograd's, but for the gradients
of the kernels' own parameters: those are left in shares, and put in their places of g [n, d] all at once.
"""

from __future__ import annotations

import copy
import logging
import operator
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, functionalize, vmap
from torch.overrides import TorchFunctionMode

from quasiglobal.gradients.layout import Layout
from quasiglobal.models.norms import EvoNormS0

aten = torch.ops.aten


def stacked_program(
    module: nn.Module, layout: Layout, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor
) -> Stacked | None:
    """The program for arguments like these; None for a model that it would not help, or that cannot be traced."""
    place = _Place(type(module).__name__)
    try:
        traced = _traced(module, layout, x, buffers, inputs, place)
    except Exception as error:      # tracing runs the model's own code: an error of its own shows on the next route too
        _say_once(f"{place} cannot be traced for the kernels ({_first_line(error)}); it runs without them")
        return None
    program = Stacked(traced, layout, x)
    return program if program.gains else None


log = logging.getLogger("quasiglobal")


@cache
def _say_once(sentence: str) -> None:
    log.warning(sentence)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


class _Place(TorchFunctionMode):
    """Where a trace is: the module and the operation that were called last."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module, self.operation = module, "its forward"

    def __str__(self) -> str:
        return f"{self.operation} in {self.module}"

    def follow(self, root: nn.Module) -> None:
        """Note which part of a module is called."""
        for name, part in root.named_modules():
            if name:
                text = f"{type(root).__name__}.{name} ({type(part).__name__})"
                part.register_forward_pre_hook(partial(self._enter, text))

    def _enter(self, text: str, part: nn.Module, args: object) -> None:
        self.module = text

    def __torch_function__(
        self, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.operation = getattr(function, "__name__", str(function))
        return function(*args, **(kwargs or {}))


def _traced(
    module: nn.Module, layout: Layout, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor, place: _Place
) -> fx.GraphModule:
    """One model's forward as a list of operations on its parameters, its buffers and its inputs [batch, …]."""
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import

    known = _recognised(module)
    place.follow(known)

    def forward(parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: Tensor) -> Any:
        after = {name: value.clone() for name, value in buffers.items()}
        with place:
            return functional_call(known, parameters | after, (inputs,)), after

    first = {name: value[0] for name, value in buffers.items()}
    with torch.no_grad():
        return make_fx(functionalize(forward, remove="mutations"))(layout.views(x[0]), first, inputs[0])


class Stacked:
    """All models' forward and backward pass, for one shape of x [n, d], buffers and inputs [n, batch, …]."""

    def __init__(self, traced: fx.GraphModule, layout: Layout, x: Tensor) -> None:
        self.program, self.layout = traced, layout
        self.regions: list[_Region] = []
        self.in_regions: set[str] = set()
        for node, _ in zip(self.program.graph.find_nodes(op="placeholder"), layout.shapes, strict=False):
            node.meta["parameter"] = True
        _fuse(self.program.graph)
        if self.gains and _kernels(x):
            self._settle(x)

    @property
    def gains(self) -> bool:
        """Whether there is anything that the kernels do, and nothing that depends on how tensors lie in memory."""
        nodes = self.program.graph.nodes
        return any(map(_convolves, nodes)) and not any("as_strided" in str(node.target) for node in nodes)

    def __call__(
        self, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Callable[[Tensor], Tensor]]:
        """The outputs, the new buffers, and what gives the gradient [n, d] of a number made of the outputs."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.layout.views(x).items()}
        for region in self.regions:
            region.open(x)
        outputs, after = _AllModels(self.program, self.regions).run(leaves, buffers, inputs)

        def gradient(number: Tensor) -> Tensor:
            pieces: Any = torch.autograd.grad(number, list(leaves.values()), allow_unused=True)
            g = torch.empty_like(x)
            for piece, (name, place) in zip(pieces, self.layout.views(g).items(), strict=True):
                if piece is not None:
                    place.copy_(piece)
                elif name not in self.in_regions:
                    place.zero_()
            for region in self.regions:
                region.close(g)
            return g

        return outputs, after, gradient

    def _settle(self, x: Tensor) -> None:
        """Give every operation of the kernels its place."""
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        columns = self.layout.views(torch.arange(x.shape[1], device=x.device))
        places = self.program.graph.find_nodes(op="placeholder")
        of, names = (dict(zip(places, values, strict=False)) for values in (columns.values(), columns))
        weights, norms = [], []
        for node in self.program.graph.nodes:
            if _convolves(node):
                own = of[node.args[1]].permute(0, 2, 3, 1)
                batch, _, height, width = _shape(node)
                weights.append((node, own, kernels.shares(len(x), batch * height * width, own.shape)))
                self.in_regions.add(names[node.args[1]])
            elif _normalises(node):
                parameters = dict.fromkeys(node.args[1:3])
                self.in_regions.update(names[parameter] for parameter in parameters)
                own = torch.cat([of[parameter] for parameter in parameters])
                norms.append((node, own, kernels.parts(_shape(node.args[0])[0], node.args[5])))
            elif _pools(node):
                node.meta["pools"] = True
        self.regions = [_Weights(weights), *([_Region(norms)] if norms else [])]


class _Region:
    """The parameters of some operations, in their order, and shares of the gradients, yet to be summed."""

    def __init__(self, operations: list[tuple[fx.Node, Tensor, int]]) -> None:
        """Each with the columns of x that are its own and the number of shares that it makes."""
        self.nodes = [node for node, *_ in operations]
        end = 0
        for node, own, shares in operations:
            begin, end = end, end + own.numel()
            node.meta["place"] = slice(begin, end), own.shape, shares
        self.columns = torch.cat([own.flatten() for _, own, _ in operations]).int()
        counts = torch.cat([torch.full_like(own, shares).flatten() for _, own, shares in operations]).int()
        self.most = max(shares for *_, shares in operations)
        places = self.columns.argsort().int()               # to write g in its own order
        self.how = self.columns[places], places, counts[places]

    def open(self, x: Tensor) -> None:
        """Begin a step."""
        self.new_shares = partial(x.new_empty, self.most, len(x), len(self.columns))
        self.shares: Tensor | None = None
        self.missing = set(self.nodes)

    def own_shares(self, node: fx.Node) -> Tensor:
        """[shares, n, …], to be filled."""
        if self.shares is None:                             # a test never gets here
            self.shares = self.new_shares()
        self.missing.discard(node)
        columns, shape, shares = node.meta["place"]
        return self.shares[:shares, :, columns].view(shares, -1, *shape)

    def close(self, g: Tensor) -> None:
        """Put the gradients in their places; of operations that the number did not depend on they are 0."""
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        for node in list(self.missing):
            self.own_shares(node).zero_()
        if self.shares is not None:
            kernels.collect(self.shares, *self.how, g)


class _Weights(_Region):
    """Those of convolutions, which the kernels take [out, r, s, in] and in the precision of products."""

    def open(self, x: Tensor) -> None:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        super().open(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        self.values = kernels.pack(x, self.columns, dtype)

    def own_values(self, node: fx.Node) -> Tensor:
        """[n, …]"""
        columns, shape, _ = node.meta["place"]
        return self.values[:, columns].view(-1, *shape)


class _AllModels(fx.Interpreter):
    """Runs a program of one model for all: what depends on the model has one more dimension, the first."""

    def __init__(self, program: fx.GraphModule, regions: list[Any]) -> None:
        super().__init__(program)
        self.weights, self.norms = (*regions, None, None)[:2]

    def run_node(self, n: fx.Node) -> Any:
        node: Any = n
        inputs = node.all_input_nodes
        node.meta["stacked"] = node.op == "placeholder" or any(one.meta["stacked"] for one in inputs)
        if node.op != "call_function" or node.target is operator.getitem or not node.meta["stacked"]:
            return super().run_node(node)
        if "place" in node.meta:
            return self._by_kernel(node, *fx.node.map_arg(node.args, self.env.__getitem__))
        if "pools" in node.meta:
            pooled = _Pooled.apply(self.env[node.args[0]], node.args[1][0])  # type: ignore[no-untyped-call]
            return pooled, None

        def of_one(*values: Tensor) -> Any:
            given = dict(zip(inputs, values, strict=True)).__getitem__
            target = ANY_ORDER.get(node.target, node.target)
            return target(*fx.node.map_arg(node.args, given), **fx.node.map_arg(node.kwargs, given))

        dims = tuple(0 if one.meta["stacked"] else None for one in inputs)
        return vmap(of_one, in_dims=dims)(*(self.env[one] for one in inputs))

    def _by_kernel(self, node: fx.Node, x: Tensor, *rest: Any) -> Any:
        if node.target is NORMALISE:
            dtype = x.dtype if _only_for_kernels(node) else rest[0].dtype
            return _Normalised.apply(  # type: ignore[no-untyped-call]
                partial(self.norms.own_shares, node), dtype, x, *rest
            )
        weight, _, stride, padding, *_ = rest
        shares, values = partial(self.weights.own_shares, node), self.weights.own_values(node)
        y, passed = _Convolution.apply(  # type: ignore[no-untyped-call]
            shares, values, x.to(values.dtype), weight, stride[0], padding[0]
        )
        if x.dtype == values.dtype:
            self.env[node.all_input_nodes[0]] = passed
        return y


# ------------------------------------------------------------------------------------------------ recognition


def _recognised(module: nn.Module) -> nn.Module:
    """A copy of the module whose normalisations are one operation each."""
    module = copy.deepcopy(module)
    for part in module.modules():
        if type(part) in KNOWN and part.weight is not None:
            part.forward = partial(KNOWN[type(part)], part)
    return module


def _evonorm(part: EvoNormS0, x: Tensor) -> Tensor:
    if x.ndim != 4 or x.shape[1:].numel() <= part.groups:
        return type(part).forward(part, x)
    return _operation(x, part, "evonorm", part.groups)[0]


def _group_norm(part: nn.GroupNorm, x: Tensor) -> Tensor:
    return _operation(x, part, "group", part.num_groups)[0] if x.ndim == 4 else type(part).forward(part, x)


def _batch_norm(part: nn.BatchNorm2d, x: Tensor) -> Tensor:
    if not part.training and part.running_mean is not None and part.running_var is not None:
        scale = part.weight / (part.running_var + part.eps).sqrt()
        return x * scale[:, None, None] + (part.bias - part.running_mean * scale)[:, None, None]
    if part.momentum is None or x.shape[0] * x.shape[2] * x.shape[3] == 1:
        return type(part).forward(part, x)
    running: list[Tensor] = []
    if part.running_mean is not None and part.running_var is not None and part.num_batches_tracked is not None:
        running = [part.running_mean, part.running_var]
        part.num_batches_tracked.add_(1)
    y, *after = _operation(x, part, "batch", part.num_features, running, part.momentum)
    for old, new in zip(running, after, strict=False):
        old.copy_(new)
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
) -> tuple[Tensor, Tensor, Tensor]:
    """One model's images [b, c, h, w] normalised, then `rest` added and ReLU applied; the new running statistics.

    `kind` is evonorm, group, batch, or shift: a convolution's bias, which comes without a scale.
    """
    mean, variance = running or (bias.new_empty(0), bias.new_empty(0))
    x = x.to(bias.dtype)
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


def _convolves(node: Any) -> bool:
    """Whether this is a convolution that the kernels do: an ordinary one over images, its sides treated alike."""
    if node.target is not aten.convolution.default:
        return False
    _, weight, _, stride, padding, dilation, transposed, _, groups = node.args
    alike = set(dilation) == {1} and len(set(stride)) == len(set(padding)) == 1
    return not transposed and groups == 1 and alike and len(_shape(weight)) == 4 and _is_own(weight)


def _pools(node: Any) -> bool:
    """Whether this is maximum pooling over squares that cover the images, its indices of no use."""
    if node.target is not aten.max_pool2d_with_indices.default or len(node.args) > 3:
        return False
    x, window, *stride = node.args
    sizes = _shape(x)[-2:]
    squares = not any(stride) or set(window) == set(*stride)
    squares = squares and len(set(window)) == 1 and not any(size % window[0] for size in sizes)
    return squares and len(_shape(x)) == 4 and all(user.args[1] == 0 for user in node.users)


def _normalises(node: Any) -> bool:
    """Whether this is a normalisation that the kernels do: whole groups of channels make blocks of a power of two."""
    if node.target is not NORMALISE or not all(map(_is_own, node.args[1:3])):
        return False
    x, _, _, _, _, kind, groups, *_ = node.args
    channels = _shape(x)[1]
    size = channels // groups if kind in ("evonorm", "group") else 1
    return size == 1 or (size & (size - 1) == 0 and channels & (channels - 1) == 0)


def _only_for_kernels(node: Any) -> bool:
    """Whether convolutions and sums of the kernels alone see this normalisation's result.

    Then it has the precision of products. Elsewhere it has that of the parameters, as autocast has it, except for
    batch normalisation and biases.
    """
    y = next(user for user in node.users if user.args[1] == 0)
    return node.args[5] in ("batch", "shift") or all(
        "place" in user.meta and (user.target is not NORMALISE or user.args[0] is not y) for user in y.users
    )


def _is_own(parameter: Any) -> bool:
    """Whether this is a parameter, and of this operation alone."""
    return "parameter" in parameter.meta and len(parameter.users) == 1


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
    hidden = any("batch_norm" in str(node.target) for node in graph.nodes)      # writes into its arguments
    for node in list(graph.nodes):
        if node.target is NORMALISE:
            _absorb(node)
        elif node.target is aten.copy.default and node.meta["val"].dtype == node.args[1].meta["val"].dtype:
            node.replace_all_uses_with(node.args[1])
        elif node.target is aten.clone.default and node.args[0].op == "placeholder" and not hidden:
            node.replace_all_uses_with(node.args[0])
    graph.eliminate_dead_code()


def _absorb(node: Any) -> None:
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


def _only_user(node: fx.Node, target: object) -> Any:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


# ---------------------------------------------------------------------------------------------------- kernels


def _kernels(x: Tensor) -> bool:
    """Whether the kernels run here: on a GPU, or in Triton's interpreter, which the tests use."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _channels_last(x: Tensor) -> Tensor:
    """[n, b, c, h, w] as [n, b, h, w, c] and contiguous, which inside a network it is."""
    return x.movedim(2, -1).contiguous()


class _Convolution(torch.autograd.Function):
    """Hands x on, so that the gradients of its later uses are added where its own is computed.

    `weight` is there for autograd alone: the kernels read `values`, and leave its gradient in `shares`.
    """

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], values: Tensor, x: Tensor, weight: Tensor, stride: int, padding: int
    ) -> tuple[Tensor, Tensor]:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        images = _channels_last(x)
        ctx.save_for_backward(images, values)
        ctx.shares, ctx.how = shares, (stride, padding)
        ctx.set_materialize_grads(False)
        return kernels.convolve(images, values, stride, padding).movedim(-1, 2), x

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, later: Tensor | None) -> Any:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        dx = later
        if dy is not None:
            images, values = ctx.saved_tensors
            dy = _channels_last(dy)
            kernels.weight_gradient(images, dy, ctx.shares(), *ctx.how)
            if ctx.needs_input_grad[2]:
                later = later if later is None else _channels_last(later)
                dx = kernels.convolve_back(dy, values, later, images.shape, *ctx.how).movedim(-1, 2)
        return None, None, dx, None, None, None


class _Normalised(torch.autograd.Function):
    """`normalise` of all models; the gradients of weight and bias are left in `shares`."""

    @staticmethod
    def forward(
        ctx: Any, shares: Callable[[], Tensor], dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor,
        rest: Tensor | None, running: list[Tensor], kind: str, groups: int, eps: float, momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        images, added = _channels_last(x), None if rest is None else _channels_last(rest)
        y, moments, after = kernels.normalise(
            images, weight, bias, added, running, kind, groups, eps, momentum, relu, dtype
        )
        ctx.save_for_backward(images, weight, y if relu else None, moments)
        ctx.shares, ctx.how = shares, (kind, groups, relu, rest is not None)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*after)
        return y.movedim(-1, 2), *after

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        dx, drest = None, None
        if dy is not None:
            images, weight, y, moments = ctx.saved_tensors
            dx, drest = kernels.normalise_back(
                images, weight, y, _channels_last(dy), moments, ctx.shares(), *ctx.how
            )
            dx, drest = dx.movedim(-1, 2), drest.movedim(-1, 2) if ctx.how[-1] else None
        return None, None, dx, None, None, drest, *(None,) * 6


class _Pooled(torch.autograd.Function):
    """The largest of each square of `window` places a side."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int) -> Tensor:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        y, which = kernels.pool(_channels_last(x), window)
        ctx.save_for_backward(which)
        ctx.window = window
        return y.movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        from quasiglobal.gradients.kernels import triton_kernels as kernels

        (which,) = ctx.saved_tensors
        return kernels.pool_back(_channels_last(dy), which, ctx.window).movedim(-1, 2), None
