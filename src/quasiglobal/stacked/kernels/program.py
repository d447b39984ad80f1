"""n copies of one convolutional network as one program of operations on stacked images.

The module's forward pass is traced for one model (`tracing.py`) and executed for all models. Kernels with channels-last
images compute pooling, and convolutions and normalisations with the sum and the ReLU after them (`fusion.py`); vmap
computes the rest. The backward pass uses autograd, except for the gradients of the kernels' parameters: the kernels
write partial sums ("shares"), and one kernel per region adds them up into the columns of g [n, d].
"""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import vmap

from quasiglobal.stacked.kernels.functions import Convolution, LayerNormed, Normalised, Pooled
from quasiglobal.stacked.kernels.fusion import (
    COUNT,
    convolves,
    fuse,
    geometry,
    is_linear,
    masks,
    normalises,
    normalises_pixels,
    only_for_kernels,
    pixels,
    pools,
    shape_of,
)
from quasiglobal.stacked.kernels.operations import LAYER_NORM, NORMALISE, PLAIN
from quasiglobal.stacked.kernels.segments import CompiledSegments, Segment, segments
from quasiglobal.stacked.kernels.tracing import traced_forward
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.recording import Untraceable, written

aten = torch.ops.aten


def stacked_program(
    module: nn.Module,
    layout: Layout,
    x: Tensor,
    buffers: dict[str, Tensor],
    inputs: Tensor,
    by_kernels: bool | None = None,
) -> StackedProgram | None:
    """Build the program for arguments of these shapes; None if the model has no convolution for the kernels.

    It is None for a model with complex parameters too. With `by_kernels` false, vmap executes all operations; by
    default the kernels are used if Triton runs.
    """
    if layout.pairs:
        return None
    traced = traced_forward(module, layout, x, buffers, inputs)
    program = StackedProgram(traced, layout, x, triton_runs(x) if by_kernels is None else by_kernels)
    if program.strided and program.convolves:
        raise Untraceable(f"{program.strided} depends on the memory layout of tensors")
    return program if program.gains else None


def triton_runs(x: Tensor) -> bool:
    """Whether Triton runs: on a GPU, or in its interpreter, which the tests use."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _compiler_runs(x: Tensor) -> bool:
    """Whether segments are compiled: on a GPU."""
    return x.is_cuda


class StackedProgram:
    """All models' forward and backward pass, for one shape of x [n, d], buffers and inputs [n, batch, …]."""

    def __init__(self, traced: fx.GraphModule, layout: Layout, x: Tensor, by_kernels: bool) -> None:
        self.program, self.layout = traced, layout
        self.regions: list[Region] = []
        self.in_regions: set[str] = set()
        for node, _ in zip(self.program.graph.find_nodes(op="placeholder"), layout.shapes, strict=False):
            node.meta["parameter"] = True
        fuse(self.program.graph)
        for node in self.program.graph.nodes:
            node.meta["stacked"] = node.op == "placeholder" or _draws(node) or any(
                one.meta["stacked"] for one in node.all_input_nodes
            )
        if self.gains and by_kernels:
            self._place(x)
        self.compiled = CompiledSegments()
        self.segments: dict[fx.Node, Segment] = {}
        """Segments to compile, by their first operation."""
        if self.regions and _compiler_runs(x):
            found = segments(self.program.graph, lambda node: "kernel" in node.meta or "pools" in node.meta)
            self.segments = {one.nodes[0]: one for one in found if one.is_worth_compiling}

    @property
    def parts(self) -> str:
        """What there is to compile, in words."""
        count = sum("kernel" in node.meta or "pools" in node.meta for node in self.program.graph.nodes)
        return f"kernels for {count} operations, {len(self.segments)} groups of other operations"

    @property
    def gains(self) -> bool:
        """Whether the kernels compute some convolution, and no operation depends on the memory layout of tensors."""
        return self.convolves and not self.strided

    @property
    def convolves(self) -> bool:
        """Whether there is a convolution."""
        return any(convolves(node) and not is_linear(node) for node in self.program.graph.nodes)

    @property
    def strided(self) -> str:
        """An operation that depends on the memory layout of tensors; empty if there is none."""
        names = (str(node.target) for node in self.program.graph.nodes)
        return next((name for name in names if "as_strided" in name), "")

    def __call__(
        self, x: Tensor, buffers: dict[str, Tensor], inputs: Tensor
    ) -> tuple[Tensor, dict[str, Tensor], Callable[[Tensor], Tensor]]:
        """Return the outputs, the new buffers, and a function from a scalar of the outputs to its gradient [n, d]."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.layout.views(x).items()}
        for region in self.regions:
            region.open(x)
        outputs, after = self._all_models(x).run(leaves, buffers, inputs)
        after = {name: value.detach() for name, value in after.items()}

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

    def compile_segments(self, x: Tensor, calls: Iterable[tuple[Segment, Sequence[Tensor]]]) -> None:
        """Compile the segments of these calls, forward and backward."""
        run = self._all_models(x)
        for segment, values in calls:
            own = [value.detach().requires_grad_(value.requires_grad) for value in values]
            results = run.compute(segment, own)
            if numbers := [one.float().sum() for one in results if isinstance(one, Tensor) and one.requires_grad]:
                torch.stack(numbers).sum().backward()  # type: ignore[no-untyped-call]

    def _all_models(self, x: Tensor) -> AllModels:
        return AllModels(self.program, self.regions, self.segments, self.compiled, x[:, :0])

    def _place(self, x: Tensor) -> None:
        """Assign the parameters of each kernel operation to a region."""
        from quasiglobal.stacked.kernels import convolution, epilogue, layer_norm, normalisation

        columns = self.layout.views(torch.arange(x.shape[1], device=x.device))
        arguments = self.program.graph.find_nodes(op="placeholder")
        of, names = (dict(zip(arguments, values, strict=False)) for values in (columns.values(), columns))
        weights, others = [], []
        for node in self.program.graph.nodes:
            if convolves(node):
                how = geometry(node)
                own = of[node.args[1]]
                own = own.reshape(*own.shape[:2], *how.kernel).permute(how.order)
                places = pixels(node, node.args[0] if how.transposed else node)
                weights.append((node, own, convolution.shares(len(x), places, own.shape, how)))
                if (bias := node.args[2]) is not None:
                    others.append((node, of[bias], epilogue.shares(len(x), pixels(node, node))))
            elif normalises(node):
                own = torch.cat([of[parameter] for parameter in node.args[1:3]])
                others.append((node, own, normalisation.shares(shape_of(node.args[0])[0], node.args[5])))
            elif normalises_pixels(node):
                own = torch.cat([of[parameter] for parameter in node.args[1:3]])
                others.append((node, own, layer_norm.shares(len(x), prod(shape_of(node)[:-1]))))
            elif pools(node):
                node.meta["pools"] = True
        for node in (node for node, *_ in weights + others):
            node.meta["kernel"] = True
            self.in_regions.update(names[parameter] for parameter in node.args[1:3] if parameter is not None)
        self.regions = [WeightRegion(weights), *([Region(others)] if others else [])]


class Region:
    """The parameters of some operations, in the kernels' order, and the partial sums (shares) of their gradients."""

    def __init__(self, operations: list[tuple[fx.Node, Tensor, int]]) -> None:
        """Accept each operation with its columns of x and its number of shares."""
        end = 0
        self.places: dict[fx.Node, tuple[slice, torch.Size, int]] = {}
        for node, own, shares in operations:
            begin, end = end, end + own.numel()
            self.places[node] = slice(begin, end), own.shape, shares
        self.columns = torch.cat([own.flatten() for _, own, _ in operations]).int()
        counts = torch.cat([torch.full_like(own, shares).flatten() for _, own, shares in operations]).int()
        self.most = max(shares for *_, shares in operations)
        places = self.columns.argsort().int()               # so that g is written in column order
        self.how = self.columns[places], places, counts[places]

    def open(self, x: Tensor) -> None:
        """Begin a step."""
        self.new_shares = partial(x.new_empty, self.most, len(x), len(self.columns))
        self.shares: Tensor | None = None
        self.missing = set(self.places)

    def own_shares(self, node: fx.Node) -> Tensor:
        """Shares [shares, n, …] of an operation, to be filled."""
        if self.shares is None:                             # allocated by the backward pass: evaluation has none
            self.shares = self.new_shares()
        self.missing.discard(node)
        columns, shape, shares = self.places[node]
        return self.shares[:shares, :, columns].view(shares, -1, *shape)

    def close(self, g: Tensor) -> None:
        """Sum the shares into g; operations without a gradient get 0."""
        from quasiglobal.stacked.kernels.rows import collect

        for node in list(self.missing):
            self.own_shares(node).zero_()
        if self.shares is not None:
            collect(self.shares, *self.how, g)


class WeightRegion(Region):
    """The weights of convolutions, which the kernels read in their order (`Geometry.order`) and in autocast's type."""

    def open(self, x: Tensor) -> None:
        from quasiglobal.stacked.kernels.rows import pack

        super().open(x)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        self.values = pack(x, self.columns, dtype)

    def own_values(self, node: fx.Node) -> Tensor:
        """Weights [n, …] of a convolution, in the kernels' order."""
        columns, shape, _ = self.places[node]
        return self.values[:, columns].view(-1, *shape)


class AllModels(fx.Interpreter):
    """Run the program of one model for all models: values that depend on the model get a first dimension."""

    def __init__(
        self, program: fx.GraphModule, regions: list[Any], segments: dict[fx.Node, Segment],
        compiled: CompiledSegments, models: Tensor,
    ) -> None:
        """`segments` are compiled. Operations without inputs are vectorised over `models`, [n, …]."""
        super().__init__(program)
        self.weights, self.others = (*regions, None, None)[:2]
        self.segments, self.compiled, self.models = segments, compiled, models
        self.ready: dict[fx.Node, Any] = {}
        """Results of the operations of compiled segments; None for those that no other operation reads."""

    def run_node(self, n: fx.Node) -> Any:
        node: Any = n
        if node in self.segments:
            segment = self.segments[node]
            results = self.compute(segment, [self.env[one] for one in segment.inputs])
            self.ready = dict.fromkeys(segment.nodes) | dict(zip(segment.results, results, strict=True))
        if node in self.ready:
            return self.ready.pop(node)
        if node.op != "call_function" or _is_alike(node):
            return super().run_node(node)
        if "kernel" in node.meta:
            return self._by_kernel(node, *fx.node.map_arg(node.args, self.env.__getitem__))
        if "pools" in node.meta:
            pooled = Pooled.apply(  # type: ignore[no-untyped-call]
                self.env[node.args[0]], node.args[1][0], masks(node)
            )
            return pooled, None
        return self._vectorised(node, self.env)

    def _vectorised(self, node: Any, env: dict[fx.Node, Any]) -> Any:
        """An operation on values of all models by vmap."""
        inputs = node.all_input_nodes

        def of_one(_: Tensor, *values: Tensor) -> Any:
            given = dict(zip(inputs, values, strict=True)).__getitem__
            target = REPLACED.get(node.target, node.target)
            return target(*fx.node.map_arg(node.args, given), **fx.node.map_arg(node.kwargs, given))

        dims = (0, *(0 if one.meta["stacked"] else None for one in inputs))
        return vmap(of_one, in_dims=dims, randomness="different")(self.models, *(env[one] for one in inputs))

    def compute(self, segment: Segment, values: list[Any]) -> list[Any]:
        """The results of a segment, by one compiled function."""
        def of_all(*values: Any) -> list[Any]:
            env = dict(zip(segment.inputs, values, strict=True))
            node: Any
            for node in segment.nodes:
                given = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*given[0], **given[1]) if _is_alike(node) else self._vectorised(node, env)
            return [env[node] for node in segment.results]

        results: list[Any] = self.compiled(segment, of_all, values)
        return results

    def _by_kernel(self, node: Any, x: Tensor, weight: Tensor, bias: Tensor, rest: Any, *how: Any) -> Any:
        shares = partial(self.others.own_shares, node) if bias is not None else None
        stacked = node.args[0].meta["stacked"]
        x = x if stacked else x.expand(len(self.models), *x.shape)
        if node.target is LAYER_NORM:
            dtype = self.weights.values.dtype if only_for_kernels(node) else weight.dtype
            return LayerNormed.apply(shares, dtype, x, weight, bias, rest)  # type: ignore[no-untyped-call]
        if node.target is NORMALISE:
            dtype = x.dtype if only_for_kernels(node) else weight.dtype
            return Normalised.apply(shares, dtype, x, weight, bias, rest, *how)  # type: ignore[no-untyped-call]
        values = self.weights.own_values(node)
        masked = any("pools" in user.meta and masks(user) for user in node.users)
        y, passed = Convolution.apply(  # type: ignore[no-untyped-call]
            partial(self.weights.own_shares, node), shares, values, x.to(values.dtype), weight, bias, rest,
            geometry(node), how[-1], masked,
        )
        if stacked and x.dtype == values.dtype:
            self.env[node.all_input_nodes[0]] = passed
        return y


def _is_alike(node: Any) -> bool:
    """Whether a call for all models is the call for one model."""
    return node.target in (operator.getitem, COUNT) or not node.meta["stacked"]


def _draws(node: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _slice_scatter(
    x: Tensor, source: Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Tensor:
    """`torch.slice_scatter` without negative positions, which vmap does not support."""
    begin, stop, _ = slice(start, end).indices(x.shape[dim])
    return torch.slice_scatter(x, source.to(x.dtype), dim, begin, stop, step)


def _select_scatter(x: Tensor, source: Tensor, dim: int, index: int) -> Tensor:
    """`torch.select_scatter`, whose gradient with respect to `source` is wrong by a factor under vmap."""
    chosen = torch.arange(x.shape[dim], device=x.device) == index % x.shape[dim]
    chosen = chosen.view(-1, *(1,) * (x.ndim - 1 - dim % x.ndim))
    return torch.where(chosen, source.to(x.dtype).unsqueeze(dim), x)


def _index_put(x: Tensor, index: list[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    return torch.index_put(x, index, values.to(x.dtype), accumulate)


def _group_norm(x: Tensor, *how: Any) -> Any:
    return aten.native_group_norm.default(x.contiguous(), *how)


def _var_mean(x: Tensor, *how: Any, **named: Any) -> tuple[Tensor, Tensor]:
    """In float32 for values of 16 bits, as autocast computes statistics."""
    return torch.var_mean(x.float() if x.dtype.itemsize < 4 else x, *how, **named)


def _prelu(x: Tensor, weight: Tensor) -> Tensor:
    return torch.where(x > 0, x, weight.to(x.dtype) * x)


REPLACED: dict[Any, Callable[..., Any]] = {
    aten.copy.default: written,
    aten.fill.Tensor: written,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.index_put.default: _index_put,
    aten.native_group_norm.default: _group_norm,
    aten.var_mean.correction: _var_mean,
    aten._prelu_kernel.default: _prelu,
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    **PLAIN,
}
"""Replacements of traced operations.

The originals depend on the memory layout, such as views, do not mix dtypes, as autocast leads to, or vmap does not
support them.
"""
