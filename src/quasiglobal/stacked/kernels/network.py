"""n copies of one convolutional network as one program of operations on stacked images: a route for GPUs, in bf16.

The module's forward pass is traced for one model and executed for all models. Kernels with channels-last images compute
pooling, and convolutions and normalisations with the sum and the ReLU after them. Runs of other operations are
compiled, and vmap computes the rest. The backward pass uses autograd, except for the gradients of the kernels'
parameters: the kernels write partial sums ("shares"), and one kernel per region adds them up into the columns of
g [n, d].
"""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import cache, cached_property, partial
from math import prod
from threading import Thread, Timer
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, functionalize, vmap
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.modules import copied
from quasiglobal.common.trees import Tree
from quasiglobal.stacked.compiling import Fused, by_inductor, traced
from quasiglobal.stacked.kernels.operations import LAYER_NORM, LINEAR, NORMALISE, PLAIN, Geometry, convolve, geometry_of
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.one_model import Buffers, Gradients, OneModel, in_dtype
from quasiglobal.stacked.recording import Untraceable, recorded, written
from quasiglobal.stacked.routes import Compiled
from quasiglobal.stacked.stackable import stackable

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

    from quasiglobal.stacked.kernels.packing import Region, WeightRegion

log = logging.getLogger("quasiglobal")

aten = torch.ops.aten

MOST_CLASSES = 1024
"""Largest number of classes for the loss kernel: a program holds all classes of an example."""


class Kernels(Compiled):
    """One `KernelNetwork` per shape of images; a model without convolutions is compiled."""

    slower = Compiled

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self.programs: dict[object, KernelNetwork | None] = {}
        self.score = vmap(self._stacked_one.score, randomness="different")
        self.fused_score = Fused(self.score)
        prepare()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        def loss(outputs: Tree) -> Tensor:
            shown = in_dtype(outputs, x.dtype)
            return self._score(shown, targets)[0].sum() if self._scores_by_kernel(shown, targets) else sum_of(shown)

        program = self._stacked(x, buffers, inputs, loss)
        if program is None:
            return super().gradients(x, buffers, inputs, targets)
        with self.one.autocast(x.device):
            outputs, after, gradient = program(x, buffers, inputs)
        losses, right = self._score(in_dtype(outputs, x.dtype), targets)
        return Gradients(losses.detach(), right, gradient(losses.sum()), after)

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        if not self._are_images(inputs):
            return super().outputs(x, buffers, inputs)
        batches = len(inputs)                               # each batch gets its own copy of the models
        models, own = tree_map(lambda values: values.repeat_interleave(batches, dim=0), (x, buffers))
        shown = inputs.repeat(len(x), *(1,) * (inputs.ndim - 1))
        program = self._stacked(models, own, shown, sum_of)
        if program is None:
            return super().outputs(x, buffers, inputs)
        with self.one.autocast(x.device):
            outputs, _, _ = program(models, own, shown)
        return tree_map(lambda values: values.view(len(x), batches, *values.shape[1:]), outputs)

    def _score(self, outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """Each model's loss and accuracy: by a kernel for cross-entropy; other losses are compiled if that pays off."""
        if self._scores_by_kernel(outputs, targets):
            from quasiglobal.stacked.kernels.cross_entropy import CrossEntropy

            losses, right = CrossEntropy.apply(outputs, targets)  # type: ignore[no-untyped-call]
        else:
            losses, right = (self.fused_score if self.fuses else self.score)(outputs, targets)
        return losses, right

    def _scores_by_kernel(self, outputs: Tree, targets: Tree) -> bool:
        """Whether these are class outputs [n, b, c] and classes [n, b], for cross-entropy and accuracy."""
        if self.one.loss is not nn.functional.cross_entropy or not self.one.counts_hits:
            return False
        if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor) or outputs.ndim != 3:
            return False
        typed = triton_runs(outputs) and outputs.dtype == torch.float32 and targets.dtype == torch.int64
        return typed and outputs.shape[:2] == targets.shape and 1 < outputs.shape[2] <= MOST_CLASSES

    def _stacked(
        self, x: Tensor, buffers: Buffers, inputs: Tree, loss: Callable[[Tree], Tensor]
    ) -> KernelNetwork | None:
        """The program for a shape, built and compiled with the loss at its first call; None if none can be built."""
        if not self._are_images(inputs):
            return None
        module = self.one.module
        key = (module.training, inputs.shape, inputs.dtype)
        if key not in self.programs:
            program = kernel_network(module, self.one.layout, x, buffers, inputs)
            if program is not None and x.is_cuda:
                with self.one.autocast(x.device):
                    rehearse(program, type(module).__name__, x, buffers, inputs, loss)
            self.unchecked = self.unchecked or not self.one.is_ours or (program is not None and bool(program.segments))
            self.programs[key] = program
        return self.programs[key]

    def _are_images(self, inputs: Tree) -> bool:
        """Whether these are stacked images [n, b, c, h, w], or signals [n, b, c, length] of a 1-D convolution."""
        dims = inputs.ndim if isinstance(inputs, Tensor) else 0
        return dims == 5 or (dims == 4 and any(isinstance(part, SIGNALS) for part in self.one.module.modules()))


SIGNALS = (nn.Conv1d, nn.ConvTranspose1d)
"""Layers whose inputs are [b, c, length]."""


def kernel_network(
    module: nn.Module, layout: Layout, x: Tensor, buffers: Buffers, inputs: Tensor, by_kernels: bool | None = None
) -> KernelNetwork | None:
    """Build the program for arguments of these shapes; None if the model has no convolution for the kernels.

    It is None for a model with complex parameters too. With `by_kernels` false, vmap executes all operations; by
    default the kernels are used if Triton runs.
    """
    if layout.pairs:
        return None
    program = traced_forward(module, layout, x, buffers, inputs)
    if not any(convolves(node) and not is_linear(node) for node in program.graph.nodes):
        return None
    for node in program.graph.nodes:
        if "as_strided" in str(node.target):
            raise Untraceable(f"{node.target} depends on the memory layout of tensors")
    return KernelNetwork(program, layout, x, triton_runs(x) if by_kernels is None else by_kernels)


def triton_runs(x: Tensor) -> bool:
    """Whether Triton runs: on a GPU, or in its interpreter, which the tests use."""
    return x.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _compiler_runs(x: Tensor) -> bool:
    """Whether segments are compiled: on a GPU."""
    return x.is_cuda


class KernelNetwork:
    """All models' forward and backward pass, for one shape of x [n, d], buffers and inputs [n, batch, …]."""

    weights: WeightRegion
    """The weights of the convolutions, if the kernels are used."""
    others: Region
    """The other parameters of the kernels' operations, if there are any."""

    def __init__(self, program: fx.GraphModule, layout: Layout, x: Tensor, by_kernels: bool) -> None:
        self.program, self.layout = program, layout
        self.regions: list[Region] = []
        self.in_regions: set[str] = set()
        self.segments: dict[fx.Node, Segment] = {}
        """Segments to compile, by their first operation."""
        self.compiled: dict[object, Callable[..., list[Tree]]] = {}
        """The compiled functions of segments; equal segments share one."""
        self.postponed: list[tuple[Segment, Sequence[Tree]]] | None = None
        """Calls in a rehearsal, which are not compiled yet; None in any other run."""
        for node in program.graph.nodes:
            node.meta["stacked"] = node.op == "placeholder" or _draws(node) or any(
                one.meta["stacked"] for one in node.all_input_nodes
            )
        if by_kernels:
            self._place(x)
            if _compiler_runs(x):
                self.segments = {one.nodes[0]: one for one in segments(program.graph)}

    def __call__(
        self, x: Tensor, buffers: Buffers, inputs: Tensor
    ) -> tuple[Tree, Buffers, Callable[[Tensor], Tensor]]:
        """Return the outputs, the new buffers, and a function from a scalar of the outputs to its gradient [n, d]."""
        leaves = {name: value.detach().requires_grad_() for name, value in self.layout.views(x).items()}
        for region in self.regions:
            region.open(x)
        outputs, after = AllModels(self, x[:, :0]).run(leaves, buffers, inputs)
        after = {name: value.detach() for name, value in after.items()}

        def gradient(number: Tensor) -> Tensor:
            pieces: Sequence[Tensor | None] = torch.autograd.grad(number, list(leaves.values()), allow_unused=True)
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

    def _place(self, x: Tensor) -> None:
        """Assign the parameters of each kernel operation to a region."""
        from quasiglobal.stacked.kernels import convolution, normalisation, shared
        from quasiglobal.stacked.kernels.packing import Region, WeightRegion

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
                    others.append((node, of[bias], shared.shares(len(x), pixels(node, node))))
            elif normalises(node):
                if node.target is LAYER_NORM:
                    count = normalisation.layer_norm_shares(len(x), prod(shape_of(node)[:-1]))
                else:
                    count = normalisation.shares(shape_of(node.args[0])[0], node.args[5])
                others.append((node, torch.cat([of[parameter] for parameter in node.args[1:3]]), count))
            elif pools(node):
                node.meta["pools"] = node.args[1][0]
        for node in (node for node, *_ in weights + others):
            node.meta["kernel"] = True
            self.in_regions.update(names[parameter] for parameter in node.args[1:3] if parameter is not None)
        self.weights = WeightRegion(weights)
        self.regions.append(self.weights)
        if others:
            self.others = Region(others)
            self.regions.append(self.others)


class AllModels(fx.Interpreter):
    """Run the program of one model for all models: values that depend on the model get a first dimension."""

    def __init__(self, network: KernelNetwork, models: Tensor) -> None:
        """Operations without inputs are vectorised over `models`, [n, …]."""
        super().__init__(network.program)
        self.network, self.models = network, models
        self.ready: dict[fx.Node, Tree] = {}
        """Results of the operations of compiled segments; None for those that no other operation reads."""

    def run_node(self, n: fx.Node) -> Tree:
        if segment := self.network.segments.get(n):
            results = self.compute(segment, [self.env[one] for one in segment.inputs])
            self.ready = dict.fromkeys(segment.nodes) | dict(zip(segment.results, results, strict=True))
        if n in self.ready:
            return self.ready.pop(n)
        if n.op != "call_function" or _is_alike(n):
            return super().run_node(n)
        if "kernel" in n.meta:
            return self._by_kernel(n)
        if "pools" in n.meta:
            from quasiglobal.stacked.kernels.pooling import Pooled

            x = self.env[n.all_input_nodes[0]]
            return Pooled.apply(x, n.meta["pools"], masks(n)), None  # type: ignore[no-untyped-call]
        return self._vectorised(n, self.env)

    def _vectorised(self, node: fx.Node, env: dict[fx.Node, Tree]) -> Tree:
        """An operation on values of all models by vmap."""
        inputs = node.all_input_nodes

        def of_one(_: Tensor, *values: Tensor) -> Tree:
            args, named = fx.node.map_arg((node.args, node.kwargs), dict(zip(inputs, values, strict=True)).__getitem__)
            return self.call_function(REPLACED.get(node.target, node.target), args, named)

        dims = (0, *(0 if one.meta["stacked"] else None for one in inputs))
        return vmap(of_one, in_dims=dims, randomness="different")(self.models, *(env[one] for one in inputs))

    def compute(self, segment: Segment, values: Sequence[Tree]) -> list[Tree]:
        """The results of a segment, by a function that is compiled at the first call."""
        def of_all(*values: Tree) -> list[Tree]:
            env = dict(zip(segment.inputs, values, strict=True))
            for node in segment.nodes:
                args, named = fx.node.map_arg((node.args, node.kwargs), env.__getitem__)
                alike = _is_alike(node)
                env[node] = self.call_function(node.target, args, named) if alike else self._vectorised(node, env)
            return [env[node] for node in segment.results]

        network = self.network
        if network.postponed is not None:
            network.postponed.append((segment, values))
            return of_all(*values)
        key = segment.key, tuple((value.dtype, value.stride(), value.requires_grad) for value in values)
        if key not in network.compiled:
            with torch.no_grad():                           # copies: tracing runs the operations, some of them in place
                network.compiled[key] = by_inductor(traced(of_all, tuple(map(_copied, values))))
        return network.compiled[key](*values)

    def _by_kernel(self, node: fx.Node) -> Tree:
        from quasiglobal.stacked.kernels.convolution import Convolution
        from quasiglobal.stacked.kernels.normalisation import LayerNormed, Normalised

        (x, weight, bias, rest, *how), _ = self.fetch_args_kwargs_from_env(node)
        source, weights = node.all_input_nodes[0], self.network.weights
        shares = None if bias is None else partial(self.network.others.own_shares, node)
        stacked = source.meta["stacked"]
        x = x if stacked else x.expand(len(self.models), *x.shape)
        if node.target is LAYER_NORM:
            dtype = weights.values.dtype if only_for_kernels(node) else weight.dtype
            return LayerNormed.apply(shares, dtype, x, weight, bias, rest)  # type: ignore[no-untyped-call]
        if node.target is NORMALISE:
            dtype = x.dtype if only_for_kernels(node) else weight.dtype
            return Normalised.apply(shares, dtype, x, weight, bias, rest, *how)  # type: ignore[no-untyped-call]
        values = weights.own_values(node)
        masked = any("pools" in user.meta and masks(user) for user in node.users)
        y, passed = Convolution.apply(  # type: ignore[no-untyped-call]
            partial(weights.own_shares, node), shares, values, x.to(values.dtype), weight, bias, rest,
            geometry(node), how[-1], masked,
        )
        if stacked and x.dtype == values.dtype:
            self.env[source] = passed
        return y


def _is_alike(node: fx.Node) -> bool:
    """Whether a call for all models is the call for one model."""
    return node.target in (operator.getitem, COUNT) or not node.meta["stacked"]


def _draws(node: fx.Node) -> bool:
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


def _var_mean(
    x: Tensor, dim: list[int] | None = None, *, correction: int | None = None, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """In float32 for values of 16 bits, as autocast computes statistics."""
    x = x.float() if x.dtype.itemsize < 4 else x
    return torch.var_mean(x, dim, correction=correction, keepdim=keepdim)


REPLACED: dict[object, Callable[..., object]] = {
    aten.copy.default: written,
    aten.fill.Tensor: written,
    aten.slice_scatter.default: _slice_scatter,
    aten.select_scatter.default: _select_scatter,
    aten.index_put.default: lambda x, index, values, *how: torch.index_put(x, index, values.to(x.dtype), *how),
    aten.native_group_norm.default: lambda x, *how: aten.native_group_norm.default(x.contiguous(), *how),
    aten.var_mean.correction: _var_mean,
    aten._prelu_kernel.default: lambda x, weight: torch.where(x > 0, x, weight.to(x.dtype) * x),
    aten.view.default: torch.reshape,
    aten._unsafe_view.default: torch.reshape,
    **PLAIN,
}
"""Replacements of traced operations.

The originals depend on the memory layout, such as views, do not mix dtypes, as autocast leads to, or vmap does not
support them.
"""


# ----------------------------------------------------------------------------- what the kernels compute


COUNT = aten._foreach_add.Scalar
"""Addition of a number to each tensor of a list, which is the same for one model and for all."""


def convolves(node: fx.Node) -> bool:
    """Whether the kernels compute this convolution or linear layer, in a graph after `fuse`."""
    return node.target is convolve


def is_linear(node: fx.Node) -> bool:
    """Whether this is a linear layer of the kernels: a convolution of single pixels."""
    return convolves(node) and len(shape_of(node.all_input_nodes[1])) == 2


def pixels(node: fx.Node, of: fx.Node) -> int:
    """Number of pixels of the images `of`, which a convolution or a linear layer reads or returns."""
    shape = shape_of(of)
    return prod(shape) // shape[-1 if is_linear(node) else 1]


def geometry(node: Any) -> Geometry:
    """The geometry of a convolution."""
    return geometry_of(shape_of(node.args[1]), *node.args[4:-1])


def pools(node: Any) -> bool:
    """Whether the kernels compute this maximum pooling: squares that tile the images, indices unused."""
    if node.target is not aten.max_pool2d_with_indices.default or len(node.args) > 3:
        return False
    x, window, *stride = node.args
    sizes = shape_of(x)[-2:]
    squares = not any(stride) or set(window) == set(*stride)
    squares = squares and len(set(window)) == 1 and not any(size % window[0] for size in sizes)
    return squares and len(shape_of(x)) == 4 and all(user.args[1] == 0 for user in node.users)


def masks(node: fx.Node) -> bool:
    """Whether this pooling computes the gradient before the ReLU of a convolution, whose result only it reads.

    The ReLU's gradient is 0 where the pooled value is 0, which is a tensor of a quarter of the size.
    """
    x = node.all_input_nodes[0]
    return convolves(x) and "kernel" in x.meta and x.args[-1] is True and len(x.users) == 1


def normalises(node: Any) -> bool:
    """Whether the kernels compute this normalisation: group size 1, or group size and channels are powers of two."""
    if node.target not in (NORMALISE, LAYER_NORM) or not all(map(_is_own, node.args[1:3])):
        return False
    if node.target is LAYER_NORM:
        return shape_of(node)[-1] <= MOST_CHANNELS
    kind, groups = node.args[5:7]
    channels = shape_of(node.args[0])[1]
    size = 1 if kind == "batch" else channels // groups
    return size == 1 or (size & (size - 1) == 0 and channels & (channels - 1) == 0)


MOST_CHANNELS = 4096
"""Largest number of channels for LayerNorm: a pixel has to fit the registers of a block."""


def only_for_kernels(node: fx.Node) -> bool:
    """Whether the result of this normalisation has the precision of matrix products.

    This holds if only convolutions and sums of the kernels read it, and for batch normalisation. Otherwise the result
    has the precision of the parameters, as under autocast.
    """
    y = _result(node)
    if node.target is NORMALISE and node.args[5] == "batch":
        return True
    return all("kernel" in user.meta and (convolves(user) or user.args[0] is not y) for y, user in _readers(y))


def _readers(y: fx.Node) -> list[tuple[fx.Node, fx.Node]]:
    """Pairs (tensor, operation that reads it) for y and its permutations."""
    users = [(y, user) for user in y.users if user.target is not aten.permute.default]
    return users + [pair for user in y.users if user.target is aten.permute.default for pair in _readers(user)]


def shape_of(node: fx.Node) -> tuple[int, ...]:
    """The shape of a traced node's result."""
    return tuple(node.meta["val"].shape)


def fuse(graph: fx.Graph) -> None:
    """Fuse a sum and a ReLU into the convolution or the normalisation before them."""
    for node in graph.nodes:
        if node.target is aten.convolution.default and _suits(node):
            node.target = convolve
            node.args = (*node.args[:3], None, *node.args[3:], False)
        elif node.target is LINEAR and all(map(_is_own, node.all_input_nodes[1:])):
            node.target = convolve
            node.args = (*node.args, None, [], [], [], False, [], 1, False)
    hidden = any("batch_norm" in str(node.target) for node in graph.nodes)      # writes into its arguments
    for node in list(graph.nodes):
        if node.target in (convolve, NORMALISE):
            _absorb(node)
        elif node.target is aten.copy.default:
            value, source = node.meta["val"], node.args[1]
            if (value.shape, value.dtype) == (source.meta["val"].shape, source.meta["val"].dtype):
                node.replace_all_uses_with(source)
        elif node.target is aten.clone.default and node.args[0].op == "placeholder" and not hidden:
            node.replace_all_uses_with(node.args[0])
    _count_together(graph)
    graph.eliminate_dead_code()


def _count_together(graph: fx.Graph) -> None:
    """Merge the increments of counters, such as the batches that BatchNorm layers have seen, into one operation."""
    counts = [node for node in graph.nodes if _counts(node)]
    if counts:
        with graph.inserting_before(counts[0]):
            together = graph.call_function(COUNT, ([node.args[0] for node in counts], 1))
            for k, node in enumerate(counts):
                one = graph.call_function(operator.getitem, (together, k))
                one.meta = node.meta
                node.replace_all_uses_with(one)


def _counts(node: fx.Node) -> bool:
    """Whether an operation adds 1 to an integer that is an argument of the program."""
    if node.target is not aten.add.Tensor or node.args[1:] != (1,) or node.kwargs:
        return False
    number = node.meta["val"]
    counted = node.all_input_nodes[0].op == "placeholder" and number.ndim == 0
    return counted and not number.is_floating_point()


def _absorb(node: Any) -> None:
    """Fuse the only user of the result: a sum with an earlier tensor of the same shape, then a ReLU."""
    y = _result(node)
    x, weight, bias, rest, *how, relu = node.args
    if (add := _only_user(y, aten.add.Tensor)) and not add.kwargs:
        other = add.args[1] if add.args[0] is y else add.args[0]
        if isinstance(other, fx.Node) and other < node and shape_of(other) == shape_of(y):
            rest = other
            add.replace_all_uses_with(y)
            add.args = ()
    if activation := _only_user(y, aten.relu.default):
        relu = True
        activation.replace_all_uses_with(y)
        activation.args = ()
    node.args = (x, weight, bias, rest, *how, relu)


def _suits(node: fx.Node) -> bool:
    """Whether a convolution is 1-D or 2-D, and nothing else uses its parameters."""
    dims = [len(shape_of(one)) for one in node.all_input_nodes[:2]]
    return dims in ([3, 3], [4, 4]) and all(map(_is_own, node.all_input_nodes[1:]))


def _result(node: fx.Node) -> fx.Node:
    """The images that a convolution or a normalisation returns; a normalisation also returns running statistics."""
    return node if node.target is not NORMALISE else next(user for user in node.users if user.args[1] == 0)


def _is_own(parameter: fx.Node) -> bool:
    """Whether this is a parameter that only one operation uses."""
    return "parameter" in parameter.meta and len(parameter.users) == 1


def _only_user(node: fx.Node, target: object) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].target is target else None


# ----------------------------------------------------------------------------------- the rest, compiled


WORTH_COMPILING = 2
"""Smallest number of operations on images, views aside, of a compiled segment: compiling takes seconds."""

MOST_OPERATIONS = 400
"""Largest number of operations of a compiled segment: those of a long recurrence would take minutes."""


class Segment:
    """Consecutive operations of a program without kernels, as a function of the values that they read."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        own = set(nodes)
        self.nodes = list(nodes)
        self.inputs = list(dict.fromkeys(one for node in nodes for one in node.all_input_nodes if one not in own))
        self.results = [node for node in nodes if any(user not in own for user in node.users)]

    @cached_property
    def key(self) -> str:
        """Text that is equal for segments with the same operations on values of the same shapes and dtypes."""
        number = {node: str(k) for k, node in enumerate([*self.inputs, *self.nodes])}

        def text(node: fx.Node) -> str:
            args, named = fx.node.map_arg((node.args, node.kwargs), number.__getitem__)
            return f"{node.target}{args}{named}"

        shapes = [f"{tuple(one.meta['val'].shape)}" for one in self.inputs if isinstance(one.meta.get("val"), Tensor)]
        return "\n".join([*shapes, *map(text, self.nodes), *(number[one] for one in self.results)])


def segments(graph: fx.Graph) -> list[Segment]:
    """The maximal runs of calls between the kernels of a graph, if compiling them pays off."""
    runs: list[list[fx.Node]] = [[]]
    for node in graph.nodes:
        computed = node.all_input_nodes[0] if node.target is operator.getitem else node
        if node.op != "call_function" or _by_kernels(node) or _by_kernels(computed):
            runs.append([])
        else:
            runs[-1].append(node)
    return [
        Segment(run) for run in runs
        if len(run) <= MOST_OPERATIONS and sum(map(_computes_images, run)) >= WORTH_COMPILING
    ]


def _by_kernels(node: fx.Node) -> bool:
    """Whether the kernels compute this operation, after `KernelNetwork._place`."""
    return "kernel" in node.meta or "pools" in node.meta


def _copied(value: Tensor) -> Tensor:
    """A copy with the same strides, on which the traced views depend."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def _computes_images(node: fx.Node) -> bool:
    """Whether an operation computes from images, or to images; views and selections do not."""
    if node.target is operator.getitem or getattr(node.target, "is_view", False):
        return False
    values = (one.meta.get("val") for one in (node, *node.all_input_nodes))
    return any(isinstance(value, Tensor) and value.ndim >= 3 for value in values)


# -------------------------------------------------------------------------------------------- the trace


def traced_forward(module: nn.Module, layout: Layout, x: Tensor, buffers: Buffers, inputs: Tensor) -> fx.GraphModule:
    """Trace to a function of one model's parameters, buffers and inputs, and fuse its operations."""
    known = _with_known_norms(module)

    def forward(parameters: dict[str, Tensor], buffers: Buffers, inputs: Tensor) -> tuple[Tree, Buffers]:
        after = {name: value.clone() for name, value in buffers.items()}
        values = parameters | after
        with stackable(x, everywhere=True), _WholeLayers():
            output = functional_call(known, values, (inputs,))
        return output, {name: values[name] for name in after}       # buffers that `forward` replaced

    first, row = {name: value[0] for name, value in buffers.items()}, x[0].clone()
    with torch.enable_grad(), torch.random.fork_rng(devices=[x.device] if x.is_cuda else []):
        program = recorded(functionalize(forward, remove="mutations"), (layout.views(row), first, inputs[0].clone()))
    if row._version:
        raise Untraceable("the model writes into its own weights")
    for node, _ in zip(program.graph.find_nodes(op="placeholder"), layout.shapes, strict=False):
        node.meta["parameter"] = True
    fuse(program.graph)
    return program


class _WholeLayers(TorchFunctionMode):
    """Call `LINEAR` and `LAYER_NORM` instead of PyTorch's functions, which are decomposed; record every cast.

    A cast to float32 has no effect in the trace, which is in float32, but it has under autocast.
    """

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        given = (*args[1:], *(kwargs or {}).values())
        result = WHOLE.get(function, function)(*args, **(kwargs or {}))
        casts = function is Tensor.float or any(isinstance(one, torch.dtype | Tensor) for one in given)
        casts = casts and function in CASTS and result is args[0]
        if casts and isinstance(result, Tensor) and result.is_floating_point():
            return torch.ops.aten._to_copy.default(result, dtype=result.dtype)
        return result


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> object:
    plain = weight.ndim == 2 and input.ndim > 1
    return (LINEAR if plain else nn.functional.linear)(input, weight, bias)


def _layer_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 1e-5,
) -> object:
    if weight is None or bias is None or len(normalized_shape) > 1:
        return nn.functional.layer_norm(input, normalized_shape, weight, bias, eps)
    return LAYER_NORM(input, weight, bias, eps)


def _with_known_norms(module: nn.Module) -> nn.Module:
    """A copy of the module, with the same parameters, whose normalisations call `NORMALISE`."""
    module = copied(module, {id(parameter): parameter for parameter in module.parameters()})
    for part in module.modules():
        known = KNOWN.get(vars(type(part)).get("stacked_kernel", type(part)))
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


WHOLE: dict[object, Callable[..., object]] = {
    nn.functional.linear: _linear, nn.functional.layer_norm: _layer_norm,
}
"""Replacements of functions that a trace would decompose."""

CASTS = (Tensor.to, Tensor.float, Tensor.type, Tensor.type_as)
"""Functions that return their tensor if it has the type already."""

KNOWN: dict[object, Callable[..., Tensor]] = {
    nn.GroupNorm: _group_norm, nn.BatchNorm2d: _batch_norm, "evonorm": _evonorm,
}
"""Normalisations: classes, and names of kernels that a class declares in its attribute `stacked_kernel`.

The attribute is not inherited.
"""


# ------------------------------------------------------------------------- compiling before the first step


QUICK = 1.0
"""Seconds after which a rehearsal logs a line; it takes less if it finds everything in the caches on disk."""


@cache
def prepare() -> None:
    """Import Triton and hash its files, for its cache, in the background, as data are loaded: this takes a second."""
    def run() -> None:
        with suppress(ImportError):
            from triton.runtime.cache import triton_key

            triton_key()

    Thread(target=run, daemon=True).start()


def sum_of(outputs: Tree) -> Tensor:
    """The sum of all numbers: a loss without kernels."""
    leaves = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
    return torch.stack([one.float().sum() for one in leaves]).sum()


def rehearse(
    program: KernelNetwork, name: str, x: Tensor, buffers: Buffers, inputs: Tensor, loss: Callable[[Tree], Tensor]
) -> None:
    """Compile a program for arguments like these, and log it under the network's `name` if that takes a while.

    Triton compiles a kernel at its first launch: dozens of kernels of a network one after the other, half a second
    each. In a rehearsal the program runs on zeros, and a launch only submits its kernel to a pool of threads. Most of
    the compiler's time is outside of Python, so the threads use all cores. Meanwhile the rehearsal compiles the
    segments. The loss is compiled too, if a kernel computes it. Nothing is lost if the rehearsal fails: the rest is
    compiled when it is first called.
    """
    from triton import AsyncCompileMode

    from quasiglobal.stacked.kernels.shared import launches_only_compile

    kernels, groups = sum(map(_by_kernels, program.program.graph.nodes)), len(program.segments)
    parts = f"kernels for {kernels} operations, {groups} groups of other operations"
    text = f"compiling {name} for {len(x)} models: {parts}; later starts find them in the cache"
    line = Timer(QUICK, log.info, [text])
    line.start()
    try:
        with (
            _Loaded(x.device) as pool,
            AsyncCompileMode(pool, ignore_errors=True),
            torch.random.fork_rng([x.device] if x.is_cuda else []),
        ):
            program.postponed = []
            # Triton's compilation is of one thread, so the backward pass may not have its own.
            with torch.autograd.set_multithreading_enabled(False), launches_only_compile(), _Zeros():
                outputs, _, gradient = program(x, buffers, inputs)
                total = loss(outputs)
                if total.requires_grad:
                    gradient(total)
            calls, program.postponed, run = program.postponed, None, AllModels(program, x[:, :0])
            for segment, values in calls:                   # while the threads compile the kernels
                own = [value.detach().requires_grad_(value.requires_grad) for value in values]
                results = [one for one in run.compute(segment, own) if isinstance(one, Tensor) and one.requires_grad]
                if results:
                    torch.stack([one.float().sum() for one in results]).sum().backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        log.debug(f"the rehearsal of {name} failed: {error!r}")
    finally:
        program.postponed = None
        line.cancel()


class _Loaded(ThreadPoolExecutor):
    """Threads that compile and load kernels: a kernel's launcher is a small C program, compiled as it is loaded."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def submit(self, compiling: Callable[[], CompiledKernel]) -> Future[CompiledKernel]:  # type: ignore[override]
        return super().submit(self._compile_and_load, compiling)

    def _compile_and_load(self, compiling: Callable[[], CompiledKernel]) -> CompiledKernel:
        kernel = compiling()
        if self.device.type == "cuda":                      # elsewhere, in tests, nothing can be loaded
            with torch.cuda.device(self.device):            # the current device is that of a thread
                _ = kernel.run
        return kernel


class _Zeros(TorchFunctionMode):
    """Fill new memory of this thread, which no kernel fills now, with zeros: other operations may use it as indices."""

    def __torch_function__(
        self, function: Callable[..., object], types: object, args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        return ZEROS.get(function, function)(*args, **(kwargs or {}))


ZEROS: dict[object, Callable[..., object]] = {
    torch.empty: torch.zeros, torch.empty_like: torch.zeros_like, Tensor.new_empty: Tensor.new_zeros,
}
