"""Strategies to compute the gradients of many copies of one model: one class per strategy.

The model is any `nn.Module`, unmodified. `stack.py` chooses the route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from quasiglobal.gradients.compiling import Programs, compiled, traced
from quasiglobal.gradients.one_model import Buffers, Gradients, OneModel, Tree
from quasiglobal.models.language.autocast import Lowered

CALLS_BEFORE_TRACING = 50
"""Calls of one shape before it is traced; tracing pays off after a few hundred calls."""

CALLS_BEFORE_COMPILING = 20
"""Outside of training, calls of one shape before it is compiled: a short evaluation finishes sooner uncompiled."""


class Route(ABC):
    """Strategy to compute the gradients and outputs of k models, whose parameters are the rows of x [k, d]."""

    def __init__(self, one: OneModel) -> None:
        self.one = one

    @abstractmethod
    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        """Each row's loss and gradient on its own batch: inputs [k, batch, …], targets [k, batch]."""

    @abstractmethod
    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …]."""


class OneByOne(Route):
    """One model after the other, by ordinary autograd.

    For deep networks on a CPU, where stacking gains nothing, and for modules that vmap does not support.
    """

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        gradient = partial(by_autograd, self.one.loss_at)
        result: Gradients = for_each_row(gradient, (0, 0, 0, 0), x, buffers, inputs, targets)
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        return for_each_row(self.one.outputs, (0, 0, None), x, buffers, inputs)


class Traced(OneByOne):
    """On a CPU: vmap over the rows, traced to plain tensor operations once that pays off.

    Evaluation uses large batches, where stacking gains nothing: it runs one model after the other.
    """

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self._programs = Programs()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        arguments, stacked = (x, buffers, inputs, targets), vmap(self.one.gradient, randomness="different")
        program = self._programs.get(
            self.one.gradient, arguments, lambda: traced(stacked, arguments), CALLS_BEFORE_TRACING
        )
        return Gradients(*(program or stacked)(*arguments))


class Compiled(Route):
    """On a GPU: vmap over the rows, compiled."""

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self._programs = Programs()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        return Gradients(*self._of_all(self.one.gradient, (0, 0, 0, 0), (x, buffers, inputs, targets), calls=0))

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        return self._of_all(self.one.outputs, (0, 0, None), (x, buffers, inputs), CALLS_BEFORE_COMPILING)

    def _of_all(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], calls: int
    ) -> Any:
        """`function` of one model, vectorised over all rows and compiled after some calls."""
        stacked = vmap(function, in_dims=in_dims, randomness="different")
        program = self._programs.get(function, arguments, lambda: compiled(stacked), calls)
        return (program or stacked)(*arguments)


class OutsideVmap(Route):
    """Autograd around vmap, for transformers: attention's backward pass then runs on one large batch.

    Inside vmap, that backward pass would run model by model (`models/language/attention.py`). Frozen parameters are
    shared by all models, and are applied to all batches at once. `compiles` fuses small operations; compiling takes
    long for each shape.
    """

    def __init__(self, one: OneModel, compiles: bool = False) -> None:
        super().__init__(replace(one, around=Lowered) if one.precision == "bf16" else one)
        self.compiles = compiles
        self._programs = Programs()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        arguments = (x, buffers, inputs, targets)
        if not self.compiles:
            return self._gradients(*arguments)
        program = self._programs.get(
            self._gradients, arguments, lambda: compiled(traced(self._gradients, arguments))
        )
        assert program is not None
        return Gradients(*program(*arguments))

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        return vmap(self.one.outputs, in_dims=(0, 0, None))(x, buffers, inputs)

    def _gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        return by_autograd(vmap(self.one.loss_at, randomness="different"), x, buffers, inputs, targets)


def by_autograd(
    loss_at: Callable[..., Any], x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree
) -> Gradients:
    """Gradients at x, one row or all rows, of a function like `OneModel.loss_at`."""
    after = {name: value.clone() for name, value in buffers.items()}
    leaf = x.detach().requires_grad_()
    losses, (right, after) = loss_at(leaf, after, inputs, targets)
    return Gradients(losses.detach(), right, torch.autograd.grad(losses.sum(), leaf)[0], after)


def for_each_row(function: Callable[..., Any], in_dims: tuple[int | None, ...], *arguments: Any) -> Any:
    """Same result as vmap, computed one row after the other."""
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
