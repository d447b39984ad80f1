"""One copy of a model as pure functions of its row of parameters, its buffers and its batch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from quasiglobal.gradients.layout import Layout

Loss = Callable[[Tensor, Tensor], Tensor]
"""loss(output, target) → a number, the mean over the batch."""

Buffers = dict[str, Tensor]
"""A model's buffers, such as BatchNorm's running statistics, stacked over models: never communicated."""


class Gradients(NamedTuple):
    """Losses, accuracies, gradients and buffers of a step, stacked over k models."""

    losses: Tensor
    """[k]"""
    right: Tensor
    """[k], the accuracy on the batch."""
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
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Additional context of the forward pass, inside autocast."""

    def output(self, row: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        """The output on one batch; in training, BatchNorm overwrites its buffers."""
        with self.autocast(row.device), self.around():
            output: Tensor = functional_call(self.module, self.layout.views(row) | buffers, (inputs,))
        return output

    def outputs(self, row: Tensor, buffers: Buffers, inputs: Tensor) -> Tensor:
        """The outputs on several batches [batches, batch, …], kept separate: some models normalise by the batch."""
        if len(inputs) == 1:
            return self.output(row, buffers, inputs[0])[None]
        outputs: Tensor = vmap(self.output, in_dims=(None, None, 0))(row, buffers, inputs)
        return outputs

    def score(self, output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """The loss and the accuracy."""
        right = (output.argmax(dim=-1) == targets).to(output.dtype).mean()
        return self.loss(output, targets), right

    def loss_at(
        self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Buffers]]:
        """The loss on a batch; as auxiliary output, the accuracy and the buffers."""
        loss, right = self.score(self.output(row, buffers, inputs).to(row.dtype), targets)
        return loss, (right, buffers)

    def gradient(self, row: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Gradients:
        """The gradient by torch.func, which vmap can vectorise over the rows."""
        after = {name: value.clone() for name, value in buffers.items()}      # BatchNorm writes into its buffers
        g, (loss, (right, after)) = grad_and_value(self.loss_at, has_aux=True)(row, after, inputs, targets)
        return Gradients(loss, right, g, after)

    def autocast(self, device: torch.device) -> torch.autocast:
        """Autocast to bf16 inside the model, if that is its precision."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")
