"""Route of convolutional networks in bf16 on a GPU: our kernels; other models are compiled."""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from quasiglobal.gradients.compiling import Fused
from quasiglobal.gradients.kernels.program import StackedProgram, stacked_program
from quasiglobal.gradients.one_model import Buffers, Gradients, OneModel, Tree, in_dtype
from quasiglobal.gradients.routes import Compiled


class Kernels(Compiled):
    """One `StackedProgram` per shape of images; a model without convolutions is compiled."""

    slower = Compiled

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self.programs: dict[object, StackedProgram | None] = {}
        self.score = vmap(self.one.score, randomness="different")
        self.fused_score = Fused(self.score)

    def gradients(self, x: Tensor, buffers: Buffers, inputs: Tree, targets: Tree) -> Gradients:
        program = self._stacked(x, buffers, inputs)
        if program is None:
            return super().gradients(x, buffers, inputs, targets)
        with self.one.autocast(x.device):
            outputs, after, gradient = program(x, buffers, inputs)
        losses, right = (self.fused_score if self.fuses else self.score)(in_dtype(outputs, x.dtype), targets)
        return Gradients(losses.detach(), right, gradient(losses.sum()), after)

    def outputs(self, x: Tensor, buffers: Buffers, inputs: Tree) -> Tree:
        if not self._are_images(inputs):
            return super().outputs(x, buffers, inputs)
        batches = len(inputs)                               # each batch gets its own copy of the models
        models, own = tree_map(lambda values: values.repeat_interleave(batches, dim=0), (x, buffers))
        shown = inputs.repeat(len(x), *(1,) * (inputs.ndim - 1))
        program = self._stacked(models, own, shown)
        if program is None:
            return super().outputs(x, buffers, inputs)
        with self.one.autocast(x.device):
            outputs, _, _ = program(models, own, shown)
        return tree_map(lambda values: values.view(len(x), batches, *values.shape[1:]), outputs)

    def _stacked(self, x: Tensor, buffers: Buffers, inputs: Tree) -> StackedProgram | None:
        """The program for a shape, built at its first call; None if none can be built."""
        if not self._are_images(inputs):
            return None
        module = self.one.module
        key = (module.training, inputs.shape, inputs.dtype)
        if key not in self.programs:
            self.programs[key] = stacked_program(module, self.one.layout, x, buffers, inputs)
        return self.programs[key]

    def _are_images(self, inputs: Tree) -> bool:
        """Whether these are stacked images [n, b, c, h, w], or signals [n, b, c, length] of a 1-D convolution."""
        dims = inputs.ndim if isinstance(inputs, Tensor) else 0
        return dims == 5 or (dims == 4 and any(isinstance(part, SIGNALS) for part in self.one.module.modules()))


SIGNALS = (nn.Conv1d, nn.ConvTranspose1d)
"""Layers whose inputs are [b, c, length]."""
