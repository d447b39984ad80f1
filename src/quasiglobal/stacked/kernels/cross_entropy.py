"""Cross-entropy and accuracy of n models at once, with the gradient of the outputs, in one kernel."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from quasiglobal.stacked.kernels.operations import Context
from quasiglobal.stacked.kernels.shared import launched


@launched
def _cross_entropy(
    outputs, targets, losses, right, slopes,
    EXAMPLES: tl.constexpr, C: tl.constexpr, BE: tl.constexpr, BC: tl.constexpr,
):
    """All examples of one model, in blocks of BE examples; the target IGNORED does not count."""
    model = tl.program_id(0).to(tl.int64)
    outputs += model * EXAMPLES * C
    slopes += model * EXAMPLES * C
    targets += model * EXAMPLES
    c = tl.arange(0, BC)[None, :]
    counted = tl.zeros([BE], dtype=tl.float32)
    for first in range(0, EXAMPLES, BE):
        example = first + tl.arange(0, BE)
        target = tl.load(targets + example, mask=example < EXAMPLES, other=IGNORED)
        counted += tl.where(target != IGNORED, 1.0, 0.0)
    count = tl.sum(counted, axis=0)
    loss = tl.zeros([BE], dtype=tl.float32)
    hits = tl.zeros([BE], dtype=tl.float32)
    for first in range(0, EXAMPLES, BE):
        example = first + tl.arange(0, BE)
        target = tl.load(targets + example, mask=example < EXAMPLES, other=IGNORED)
        counts = target != IGNORED
        at = example[:, None] * C + c
        inside = (example < EXAMPLES)[:, None] & (c < C)
        value = tl.load(outputs + at, mask=inside, other=float("-inf"))
        value = tl.where((example < EXAMPLES)[:, None], value, 0.0)
        most = tl.max(value, axis=1)
        power = tl.exp(value - most[:, None])
        total = tl.sum(power, axis=1)
        own = tl.sum(tl.where(c == target[:, None], value, 0.0), axis=1)
        loss += tl.where(counts, most - own + tl.log(total), 0.0)
        hits += tl.where((tl.argmax(value, axis=1) == target) & (example < EXAMPLES), 1.0, 0.0)
        slope = (power / total[:, None] - tl.where(c == target[:, None], 1.0, 0.0)) / count
        tl.store(slopes + at, tl.where(counts[:, None], slope, 0.0), mask=inside)
    tl.store(losses + model, tl.sum(loss, axis=0) / count)
    tl.store(right + model, tl.sum(hits, axis=0) / EXAMPLES)


IGNORED = tl.constexpr(nn.CrossEntropyLoss().ignore_index)
"""The target of examples without a loss."""


class CrossEntropy(torch.autograd.Function):
    """Each model's loss and accuracy [n], from outputs [n, examples, classes] and targets [n, examples]."""

    @staticmethod
    def forward(ctx: Context[None], outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        n, examples, classes = outputs.shape
        outputs, targets = outputs.contiguous(), targets.contiguous()
        losses, right, slopes = outputs.new_empty(n), outputs.new_empty(n), torch.empty_like(outputs)
        wide = triton.next_power_of_2(classes)
        together = max(1, min(triton.next_power_of_2(examples), 4096 // wide))
        _cross_entropy[(n,)](
            outputs, targets, losses, right, slopes, examples, classes, together, wide, num_warps=4
        )
        ctx.save_for_backward(slopes)
        ctx.mark_non_differentiable(right)
        return losses, right

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[None], dlosses: Tensor, _: Tensor) -> tuple[Tensor, None]:
        (slopes,) = ctx.saved_tensors
        return slopes * dlosses[:, None, None], None
