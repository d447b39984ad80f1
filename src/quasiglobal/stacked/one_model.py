"""One copy of a model as pure functions of its row of parameters, its buffers and its batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import Tree
from quasiglobal.stacked.layout import Layout

Loss = Callable[[Tree, Tree], Tensor]
"""loss(output, target) → a number, the mean over the batch."""

Right = Callable[[Tree, Tree], Tensor]
"""right(output, target) → one number per example, such as 1 for a correct class."""

Buffers = dict[str, Tensor]
"""A model's buffers, such as BatchNorm's running statistics, stacked over models: never communicated."""


class Gradients(NamedTuple):
    """Losses, accuracies, gradients and buffers of a step, stacked over k models."""

    losses: Tensor
    """[k]"""
    right: Tensor
    """[k], the accuracy on the batch; 0 if the model has none."""
    g: Tensor
    """[k, d]"""
    buffers: Buffers
    """The buffers after the forward pass."""


@dataclass(frozen=True)
class OneModel:
    """A module, its loss and the layout of its parameters in a row."""

    module: nn.Module
    loss: Loss
    layout: Layout
    precision: str
    around: Callable[[Tree], AbstractContextManager[Any]] = nullcontext
    """Additional context of the forward pass, inside autocast, and of the loss, for the tensors that they get."""
    right: Right | None = None
    """Accuracy of each training example; None if the task has none."""
    counts_hits: bool = False
    """Whether `right` is 1 for class outputs whose largest is the target's, else 0, so that a kernel may count."""
    own: dict[str, nn.Parameter] = field(default_factory=dict)
    """The module's own parameters; of a part that is used in two places, `functional_call` does not restore them."""

    def __post_init__(self) -> None:
        if not self.own:
            self.own.update(self.module.named_parameters())

    @property
    def is_ours(self) -> bool:
        """Whether the module is the library's, which keeps nothing between calls and asks no tensor for its history."""
        return type(self.module).__module__.startswith("quasiglobal.")

    def output(self, row: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """The output on one batch; in training, `buffers` gets the new values, as BatchNorm writes them."""
        given, named = arguments(self.module, inputs)
        values = self.layout.views(row) | buffers
        with self.autocast(row.device), self.around((row, inputs)):
            output = functional_call(self.module, values, given, named)
        buffers.update({name: values[name] for name in buffers})            # those that `forward` assigned anew
        return output

    def outputs(self, row: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        """The outputs on several batches [batches, batch, …], kept separate: some models normalise by the batch."""
        if len(tree_leaves(inputs)[0]) == 1:
            output = self.output(row, buffers, tree_map(lambda values: values[0], inputs))
            return tree_map(lambda values: values[None], output)
        return vmap(self.output, in_dims=(None, None, 0), randomness="different")(row, buffers, inputs)

    def score(self, output: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """The loss and the accuracy."""
        with self.around((output, targets)):
            loss = self.loss(output, targets)
        right = torch.zeros_like(loss) if self.right is None else self.right(output, targets).to(loss.dtype).mean()
        return loss, right

    def loss_at(
        self, row: Tensor, buffers: Buffers, inputs: Tree, targets: Tree
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        """The loss on a batch; as auxiliary output, the accuracy and the buffers."""
        loss, right = self.score(in_dtype(self.output(row, buffers, inputs), row.dtype), targets)
        return loss, (right, buffers)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Autocast to bf16 inside the model, if that is its precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")


def in_fp32(one: OneModel) -> OneModel:
    """The same model without autocast."""
    return replace(one, precision="fp32")


def arguments(module: nn.Module, inputs: Tree) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments of `module` for these inputs.

    A tuple or dict of inputs is spread over the parameters of `forward` if it has these; otherwise it is one argument.

    >>> arguments(nn.Bilinear(2, 2, 1), (1, 2)), arguments(nn.Linear(2, 1), (1, 2)), arguments(nn.Linear(2, 1), 3)
    (((1, 2), {}), (((1, 2),), {}), ((3,), {}))
    """
    given, named = (inputs, {}) if isinstance(inputs, tuple) else ((), inputs) if isinstance(inputs, dict) else ((), {})
    if given or named:
        try:
            signature(module.forward).bind(*given, **named)
        except (TypeError, ValueError):
            return (inputs,), {}
        return given, named
    return (inputs,), {}


def in_dtype(values: Tree, dtype: torch.dtype) -> Tree:
    """Convert the floating-point tensors to a dtype."""
    return tree_map(lambda value: value.to(dtype) if value.is_floating_point() else value, values)
