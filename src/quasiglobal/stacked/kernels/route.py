"""Route of convolutional networks in bf16 on a GPU: our kernels; other models are compiled."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_map

from quasiglobal.stacked.compiling import Fused
from quasiglobal.stacked.kernels.program import StackedProgram, stacked_program, triton_runs
from quasiglobal.stacked.kernels.rehearsal import prepare, rehearse, sum_of
from quasiglobal.stacked.one_model import Buffers, Gradients, OneModel, Tree, in_dtype
from quasiglobal.stacked.routes import Compiled

MOST_CLASSES = 1024
"""Classes above which the loss has no kernel: there, a program has all classes of an example."""


class Kernels(Compiled):
    """One `StackedProgram` per shape of images; a model without convolutions is compiled."""

    slower = Compiled

    def __init__(self, one: OneModel) -> None:
        super().__init__(one)
        self.programs: dict[object, StackedProgram | None] = {}
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
        program = self._stacked(models, own, shown)
        if program is None:
            return super().outputs(x, buffers, inputs)
        with self.one.autocast(x.device):
            outputs, _, _ = program(models, own, shown)
        return tree_map(lambda values: values.view(len(x), batches, *values.shape[1:]), outputs)

    def _score(self, outputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """Each model's loss and accuracy: by a kernel for the usual ones; others are compiled if that pays off."""
        if self._scores_by_kernel(outputs, targets):
            from quasiglobal.stacked.kernels.cross_entropy import CrossEntropy

            losses, right = CrossEntropy.apply(outputs, targets)  # type: ignore[no-untyped-call]
            return losses, right
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
        self, x: Tensor, buffers: Buffers, inputs: Tree, loss: Callable[[Tree], Tensor] = sum_of
    ) -> StackedProgram | None:
        """The program for a shape, built and compiled with the loss at its first call; None if none can be built."""
        if not self._are_images(inputs):
            return None
        module = self.one.module
        key = (module.training, inputs.shape, inputs.dtype)
        if key not in self.programs:
            program = stacked_program(module, self.one.layout, x, buffers, inputs)
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
