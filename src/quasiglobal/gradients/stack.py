"""How the gradients of many copies of one model are computed: the one place that decides.

The model is any `nn.Module`, unmodified. All copies are one program, `vmap` over stacked parameters: compiled on
a GPU, traced once to plain tensor operations on a CPU. Convolutional networks are the exception. On a GPU, in
bf16, they have kernels of their own (`stacked.py`). On a CPU, deep ones are arithmetic-bound, grouped convolutions
are slow, and one model after the other is faster.

Transformers have autograd outside of vmap: the backward pass of attention, which vmap would take apart, is then that of
one large batch (`models/attention.py`). What they do not train is one for all, and is computed for all at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.gradients.compiling import compiled
from quasiglobal.gradients.kernels.program import Stacked, stacked_program
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.precision import full_precision
from quasiglobal.models.language.autocast import Lowered
from quasiglobal.models.language.loading import LanguageModel

Loss = Callable[[Tensor, Tensor], Tensor]
"""loss(output, target) → a number, the mean over the batch."""

Buffers = dict[str, Tensor]
"""A model's buffers, such as BatchNorm's running statistics, stacked: never communicated."""

PRECISIONS = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.float32}
"""The type of parameters, state and mixing. bf16 is autocast inside the model alone."""

CALLS_BEFORE_COMPILING = 20
"""Of one shape outside training: a test of a few batches is over before it would be compiled."""

LARGE = 10**6
"""Parameters of a transformer from which on a CPU is faster one after the other, unless the head alone is trained."""

DEEP = 4
"""More convolutions than this, and a CPU is faster one model after the other (`benchmarks/simulator.py`)."""


class StackedModel:
    """k copies of a module: their parameters are the rows of x [k, d], their buffers are stacked."""

    def __init__(self, module: nn.Module, loss: Loss, layout: Layout, precision: str = "fp32") -> None:
        self.module, self.loss, self.layout, self.precision = module, loss, layout, precision
        parts = list(module.modules())
        deep = sum(isinstance(part, nn.modules.conv._ConvNd) for part in parts) > DEEP
        # Under vmap, a CPU's batch norm does not take bf16 inputs with float32 weights.
        mixed = precision == "bf16" and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
        self.one_by_one_on_cpu = deep or mixed or (isinstance(module, LanguageModel) and _large(module))
        self.one_by_one = isinstance(module, LanguageModel) and not module.stacks
        self.outside = isinstance(module, LanguageModel) and module.stacks
        self.compiles = False
        self.random = isinstance(module, LanguageModel) or any(map(_drops, parts))
        self._padding = _columns_of_padding(module, layout)
        self._programs: dict[object, Callable[..., Any]] = {}
        self._stacked: dict[object, Stacked | None] = {}
        self._calls: Counter[object] = Counter()

    def gradients(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Buffers]:
        """Each row's loss [k], share of right answers [k] and gradient [k, d] on its batch; the new buffers.

        `inputs` is [k, batch, …], `targets` [k, batch].
        """
        self.module.train()
        arguments = (x, buffers, inputs, targets)
        with self._precision(x):
            if self._alone(x):
                g, (losses, (right, after)) = _one_by_one(self._gradient_alone, (0, 0, 0, 0), *arguments)
            elif self.outside:
                g, (losses, (right, after)) = self._outside_program(arguments)(*arguments)
            elif stacked := self._stacked_program(x, buffers, inputs):
                g, (losses, (right, after)) = self._gradients_stacked(stacked, *arguments)
            else:
                g, (losses, (right, after)) = self._program(self._gradient_of_one, (0, 0, 0, 0), arguments)(*arguments)
        for columns in self._padding:
            g[:, columns] = 0
        return losses, right, g, after

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …].

        The batches stay apart, for models that normalise by the batch they are given.
        """
        self.module.eval()
        arguments, in_dims = (x, buffers, inputs), (0, 0, None)
        with torch.no_grad(), self._precision(x):
            if self.outside:
                result: Tensor = vmap(self._outputs_of_one, in_dims=in_dims)(*arguments)
            elif x.device.type == "cpu" or self.one_by_one:     # many examples at a time: nothing is gained by stacking
                result = _one_by_one(self._outputs_of_one, in_dims, *arguments)
            elif (stacked := self._outputs_stacked(*arguments)) is not None:
                result = stacked
            else:
                result = self._program(self._outputs_of_one, in_dims, arguments)(*arguments)
        return result

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Each row's loss [k] of its outputs [k, examples, …] against the same targets [examples, …]."""
        with torch.no_grad():
            if outputs.device.type == "cpu" or self.one_by_one:
                return torch.stack([self.loss(output, targets) for output in outputs])
            result: Tensor = vmap(self.loss, in_dims=(0, None))(outputs, targets)
            return result

    def _gradient_of_one(self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Any:
        after = {name: value.clone() for name, value in buffers.items()}      # BatchNorm writes into its own
        return grad_and_value(self._loss_of_one, has_aux=True)(row, after, inputs, targets)

    def _gradient_alone(self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Any:
        """The same by ordinary autograd, which costs less where there is nothing to stack."""
        after = {name: value.clone() for name, value in buffers.items()}
        leaf = row.detach().requires_grad_()
        loss, aux = self._loss_of_one(leaf, after, inputs, targets)
        return torch.autograd.grad(loss, leaf)[0], (loss.detach(), aux)

    def _gradients_of_all(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Any:
        """The same of all models, by autograd around vmap."""
        after = {name: value.clone() for name, value in buffers.items()}
        leaf = x.detach().requires_grad_()
        losses, aux = vmap(self._loss_of_one, randomness="different")(leaf, after, inputs, targets)
        return torch.autograd.grad(losses.sum(), leaf)[0], (losses.detach(), aux)

    def _loss_of_one(
        self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        loss, right = self._score_of_one(self._output_of_one(row, buffers, inputs).to(row.dtype), targets)
        return loss, (right, buffers)

    def _score_of_one(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        right = (output.argmax(dim=-1) == targets).to(output.dtype).mean()
        return self.loss(output, targets), right

    def _outputs_of_one(self, row: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        if len(inputs) == 1:
            return self._output_of_one(row, buffers, inputs[0])[None]
        outputs: Tensor = vmap(self._output_of_one, in_dims=(None, None, 0))(row, buffers, inputs)
        return outputs

    def _output_of_one(self, row: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        with self._autocast(row), Lowered() if self.outside and self.precision == "bf16" else nullcontext():
            output: Tensor = functional_call(self.module, self.layout.views(row) | buffers, (inputs,))
        return output

    def _gradients_stacked(
        self, program: Stacked, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> Any:
        with self._autocast(x):
            outputs, after, gradient = program(x, buffers, inputs)
        losses, right = vmap(self._score_of_one)(outputs.to(x.dtype), targets)
        return gradient(losses.sum()), (losses.detach(), (right, after))

    def _outputs_stacked(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor | None:
        """The outputs, each batch shown to a copy of the models of its own; None where there is no program."""
        if not self._stacks(x, inputs):
            return None
        batches = len(inputs)
        models, own = tree_map(lambda values: values.repeat_interleave(batches, dim=0), (x, buffers))
        shown = inputs.repeat(len(x), 1, 1, 1, 1)
        program = self._stacked_program(models, own, shown)
        if program is None:
            return None
        with self._autocast(x):
            outputs, _, _ = program(models, own, shown)
        return outputs.view(len(x), batches, *outputs.shape[1:])

    def _alone(self, x: Tensor) -> bool:
        """Whether one model after the other is the way."""
        return self.one_by_one or (self.one_by_one_on_cpu and x.device.type == "cpu")

    def _precision(self, x: Tensor) -> AbstractContextManager[None]:
        """fp32 is float32, also where cuDNN would take TF32 for it."""
        return nullcontext() if self.precision == "bf16" else full_precision(x.device.type)

    def _autocast(self, x: Tensor) -> torch.autocast:
        return torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def _stacks(self, x: Tensor, inputs: Tensor) -> bool:
        """Whether these are images, in bf16, on a GPU."""
        return x.device.type == "cuda" and self.precision == "bf16" and inputs.ndim == 5

    def _stacked_program(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Stacked | None:
        """The program of a convolutional network in bf16 on a GPU, None for anything else."""
        if not self._stacks(x, inputs):
            return None
        key = (self.module.training, inputs.shape, inputs.dtype)
        if key not in self._stacked:
            self._stacked[key] = stacked_program(self.module, self.layout, x, buffers, inputs)
        return self._stacked[key]

    def _outside_program(self, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """All transformers' gradients; `compiles` fuses their small operations, which takes long for each shape."""
        if not self.compiles:
            return self._gradients_of_all
        key = _key(self._gradients_of_all, arguments)
        if key not in self._programs:
            self._programs[key] = compiled(_traced(self._gradients_of_all, arguments))
        return self._programs[key]

    def _program(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], arguments: tuple[Any, ...]
    ) -> Callable[..., Any]:
        """`function` of one model for all rows, by the route that is fast here."""
        on_cpu = arguments[0].device.type == "cpu"
        key = _key(function, arguments)
        self._calls[key] += 1
        if key not in self._programs:
            stacked = vmap(function, in_dims=in_dims, randomness="different")
            if on_cpu:
                stacked = _traced(stacked, arguments)
            elif self.module.training or self._calls[key] > CALLS_BEFORE_COMPILING:
                stacked = compiled(stacked)
            else:
                return stacked
            self._programs[key] = stacked
        return self._programs[key]


def _key(function: Callable[..., Any], arguments: tuple[Any, ...]) -> object:
    """What a program is for: a function, and arguments of these shapes and types."""
    return function.__name__, tuple((leaf.shape, leaf.dtype) for leaf in tree_leaves(arguments))


def _drops(part: nn.Module) -> bool:
    return isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0


def _large(module: LanguageModel) -> bool:
    """Whether each model has so much arithmetic of its own that a CPU gains nothing by stacking."""
    base = list(module.model.base_model.parameters())
    return any(parameter.requires_grad for parameter in base) and sum(map(Tensor.numel, base)) > LARGE


def _columns_of_padding(module: nn.Module, layout: Layout) -> list[slice]:
    """Where the vectors of embeddings' padding lie in a row: they are not learned, which vmap forgets."""
    padding = {
        f"{name}.weight".removeprefix("."): part.padding_idx
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None
    }
    columns = layout.views(torch.arange(layout.size)) if padding else {}
    vectors = [columns[name][place] for name, place in padding.items() if name in columns]
    return [slice(int(vector[0]), int(vector[-1]) + 1) for vector in vectors]


def _traced(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The function as a list of tensor operations, without vmap's overhead at each of them."""
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import, and only needed here

    device = arguments[0].device
    with torch.random.fork_rng(devices=[] if device.type == "cpu" else [device]):       # a trace draws for dropout too
        program = make_fx(lambda *values: function(*values))(*arguments)
    aten = torch.ops.aten
    reshaping = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
    for node in program.graph.nodes:
        if node.target in reshaping and _shape(node) == _shape(node.args[0]):
            node.replace_all_uses_with(node.args[0])
    program.graph.eliminate_dead_code()
    program.recompile()
    result: Callable[..., Any] = program
    return result


def _shape(node: Any) -> object:
    """Of a traced node's result, None for what is no tensor."""
    return getattr(node.meta.get("tensor_meta") or node.meta.get("val"), "shape", node)


def _one_by_one(function: Callable[..., Any], in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """What vmap computes, one row after the other."""
    results = [
        function(
            *(
                argument if dim is None else tree_map(lambda values, i=i: values[i], argument)
                for argument, dim in zip(arguments, in_dims, strict=True)
            )
        )
        for i in range(len(arguments[0]))
    ]
    return tree_map(lambda *rows: torch.stack(rows), *results)
