"""Strategies to compute the gradients of many copies of one model: one class per strategy.

The model is any `nn.Module`, unmodified. `stack.py` chooses the route.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from quasiglobal.gradients.compiling import compiled, compiled_key, traced
from quasiglobal.gradients.one_model import Buffers, Gradients, OneModel
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
    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        """Each row's loss and gradient on its own batch: inputs [k, batch, …], targets [k, batch]."""

    @abstractmethod
    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        """Each row's outputs [k, batches, batch, …] on the same inputs [batches, batch, …]."""


class OneByOne(Route):
    """One model after the other, by ordinary autograd.

    For deep networks on a CPU, where stacking gains nothing, and for modules that vmap does not support.
    """

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        result: Gradients = for_each_row(self._gradient, (0, 0, 0, 0), x, buffers, inputs, targets)
        return result

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        result: Tensor = for_each_row(self.one.outputs, (0, 0, None), x, buffers, inputs)
        return result

    def _gradient(self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        after = {name: value.clone() for name, value in buffers.items()}
        leaf = row.detach().requires_grad_()
        loss, (right, after) = self.one.loss_at(leaf, after, inputs, targets)
        return Gradients(loss.detach(), right, torch.autograd.grad(loss, leaf)[0], after)


class Traced(OneByOne):
    """On a CPU: vmap over the rows, traced to plain tensor operations once that pays off.

    Evaluation uses large batches, where stacking gains nothing: it runs one model after the other.
    """

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self._stacked = vmap(one.gradient, randomness="different")
        self._programs: dict[object, Callable[..., Any]] = {}
        self._calls: Counter[object] = Counter()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        arguments = (x, buffers, inputs, targets)
        key = compiled_key(self.one.gradient, arguments)
        self._calls[key] += 1
        if key not in self._programs and self._calls[key] > CALLS_BEFORE_TRACING:
            self._programs[key] = traced(self._stacked, arguments)
        return Gradients(*self._programs.get(key, self._stacked)(*arguments))


class Compiled(Route):
    """On a GPU: vmap over the rows, compiled."""

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self._programs: dict[object, Callable[..., Any]] = {}
        self._calls: Counter[object] = Counter()

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        arguments = (x, buffers, inputs, targets)
        return Gradients(*self._program(self.one.gradient, (0, 0, 0, 0), arguments, at_once=True)(*arguments))

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        arguments = (x, buffers, inputs)
        result: Tensor = self._program(self.one.outputs, (0, 0, None), arguments, at_once=False)(*arguments)
        return result

    def _program(
        self, function: Callable[..., Any], in_dims: tuple[int | None, ...], arguments: tuple[Any, ...], at_once: bool
    ) -> Callable[..., Any]:
        """`function` of one model, vectorised over all rows."""
        key = compiled_key(function, arguments)
        self._calls[key] += 1
        if key not in self._programs:
            stacked = vmap(function, in_dims=in_dims, randomness="different")
            if not at_once and self._calls[key] <= CALLS_BEFORE_COMPILING:
                return stacked
            self._programs[key] = compiled(stacked)
        return self._programs[key]


class OutsideVmap(Route):
    """Autograd around vmap, for transformers: attention's backward pass then runs on one large batch.

    Inside vmap, that backward pass would run model by model (`models/language/attention.py`). Frozen parameters are
    shared by all models, and are applied to all batches at once. `compiles` fuses small operations; compiling takes
    long for each shape.
    """

    def __init__(self, one: OneModel, compiles: bool = False) -> None:
        super().__init__(replace(one, around=Lowered) if one.precision == "bf16" else one)
        self.compiles = compiles
        self._programs: dict[object, Callable[..., Any]] = {}

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        arguments = (x, buffers, inputs, targets)
        if not self.compiles:
            return self._gradients(*arguments)
        key = compiled_key(self._gradients, arguments)
        if key not in self._programs:
            self._programs[key] = compiled(traced(self._gradients, arguments))
        return Gradients(*self._programs[key](*arguments))

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        result: Tensor = vmap(self.one.outputs, in_dims=(0, 0, None))(x, buffers, inputs)
        return result

    def _gradients(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        after = {name: value.clone() for name, value in buffers.items()}
        leaf = x.detach().requires_grad_()
        losses, (right, after) = vmap(self.one.loss_at, randomness="different")(leaf, after, inputs, targets)
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
