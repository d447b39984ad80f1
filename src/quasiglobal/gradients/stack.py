"""Many copies of one model, and the choice of the route that computes their gradients.

| device | model | route |
|---|---|---|
| any | not supported by vmap (`Stacking.autograd` is alone) | one by one |
| CPU | deep, large (`Stacking.large`), or BatchNorm in bf16 | one by one |
| any | other transformers (`Stacking.autograd` is outside) | autograd around vmap |
| CPU | anything else | vmap, traced |
| GPU | a convolutional network in bf16 | our kernels |
| GPU | anything else | vmap, compiled |
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.gradients.kernels.route import Kernels
from quasiglobal.gradients.layout import Layout
from quasiglobal.gradients.one_model import Buffers, Gradients, Loss, OneModel, Right, Tree
from quasiglobal.gradients.precision import full_precision
from quasiglobal.gradients.routes import Compiled, OneByOne, OutsideVmap, Route, Traced
from quasiglobal.models.stacking import stacking_of

__all__ = ["Gradients", "StackedModel", "choose_route", "draws", "rows_of"]

log = logging.getLogger("quasiglobal")

DEEP = 4
"""With more convolutions than this, a CPU is faster with one model after the other (`benchmarks/simulator.py`)."""


class StackedModel:
    """k copies of a module: their parameters are the rows of x [k, d], their buffers are stacked.

    `right` is the accuracy of a training example, if the task has one. `long` means a long training, for which
    compiling a transformer pays off. `route` overrides the choice.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        layout: Layout,
        precision: str = "fp32",
        *,
        right: Right | None = None,
        long: bool = False,
        route: Callable[[OneModel], Route] | None = None,
    ) -> None:
        self.module, self.loss, self.layout, self.precision = module, loss, layout, precision
        self.random = draws(module)
        self.route = (route or choose_route(module, precision, long))(
            OneModel(module, loss, layout, precision, right=right)
        )
        self._padding = _columns_of_padding(module, layout)
        self._worked = False

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        """Each row's loss, accuracy and gradient on its own batch, and the new buffers.

        `inputs` is [k, batch, …], `targets` [k, batch].
        """
        self.module.train()
        with self._full_precision(x):
            try:
                result = self.route.gradients(x, buffers, inputs, targets)
            except Exception as error:
                self._fall_back(error)
                result = self.route.gradients(x, buffers, inputs, targets)
            self._worked = True
        for columns in self._padding:
            result.g[:, columns] = 0
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …].

        The batches stay separate, for models that normalise by the batch.
        """
        self.module.eval()
        with torch.no_grad(), self._full_precision(x):
            return self.route.outputs(x, buffers, inputs)

    def losses(self, outputs: Tree, targets: Tree) -> Tensor:
        """Each row's loss [k]: its outputs [k, examples, …] against the same targets [examples, …]."""
        with torch.no_grad():
            if tree_leaves(outputs)[0].device.type == "cpu" or isinstance(self.route, OneByOne):
                return torch.stack([self.loss(output, targets) for output in rows_of(outputs)])
            result: Tensor = vmap(self.loss, in_dims=(0, None))(outputs, targets)
            return result

    def _fall_back(self, error: Exception) -> None:
        """After a failed first step, compute one model after the other; raise the error if that cannot help."""
        if self._worked or type(self.route) is OneByOne or _out_of_memory(error):
            raise error
        self.route = OneByOne(self.route.one)
        reason = " ".join(str(error).split())[:160]
        name = type(self.module).__name__
        log.warning(f"{name} cannot be stacked ({type(error).__name__}: {reason}); its copies run one by one, slower")

    def _full_precision(self, x: Tensor) -> AbstractContextManager[None]:
        """Compute fp32 in float32, also where cuDNN would use TF32."""
        return nullcontext() if self.precision == "bf16" else full_precision(x.device.type)


def rows_of(outputs: Tree) -> list[Tree]:
    """The outputs [k, …] of k models as k trees."""
    return [tree_map(lambda values, i=i: values[i], outputs) for i in range(len(tree_leaves(outputs)[0]))]


def _out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "allocate" in str(error)


def choose_route(module: nn.Module, precision: str, long: bool = False) -> Callable[[OneModel], Route]:
    """The fastest route for a module on its device: the first matching row of the table above."""
    parameter = next(module.parameters(), None)
    on_cpu = parameter is None or parameter.device.type == "cpu"
    autograd = stacking_of(module).autograd
    if autograd == "alone" or (on_cpu and _busy(module, precision)):
        return OneByOne
    if autograd == "outside":
        return partial(OutsideVmap, compiles=long)
    if on_cpu:
        return Traced
    return Kernels if precision == "bf16" else Compiled


def draws(module: nn.Module) -> bool:
    """Whether a step of the module draws random numbers, as dropout does."""
    dropout = (part for part in module.modules() if isinstance(part, nn.modules.dropout._DropoutNd))
    return stacking_of(module).draws or any(part.p > 0 for part in dropout)


def _busy(module: nn.Module, precision: str) -> bool:
    """Whether a CPU is faster with one model after the other, or cannot stack the models at all."""
    parts = list(module.modules())
    deep = sum(isinstance(part, nn.modules.conv._ConvNd) for part in parts) > DEEP
    # Under vmap, batch norm on a CPU does not support bf16 inputs with float32 weights.
    mixed = precision == "bf16" and any(isinstance(part, nn.modules.batchnorm._BatchNorm) for part in parts)
    return deep or mixed or stacking_of(module).large


def _columns_of_padding(module: nn.Module, layout: Layout) -> list[slice]:
    """Columns of the embeddings' padding vectors: these are not trained, but vmap ignores `padding_idx`."""
    padding = {
        f"{name}.weight".removeprefix("."): part.padding_idx
        for name, part in module.named_modules()
        if isinstance(part, nn.Embedding) and part.padding_idx is not None
    }
    columns = layout.views(torch.arange(layout.size)) if padding else {}
    vectors = [columns[name][place] for name, place in padding.items() if name in columns]
    return [slice(int(vector[0]), int(vector[-1]) + 1) for vector in vectors]
