"""Images as model input in one kernel: gathered, mirrored, cropped and normalised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _show(
    x, index, flip, shift, mean, std, y, of_image, of_channel, of_row, of_column,
    MOVES: tl.constexpr, MIRROR: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
):
    """A block of numbers of one image; MIRROR is the last column of a stored image, of_… are the strides of x."""
    image = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < C * H * W
    c = at // (H * W)
    i = at // W % H
    j = at % W
    if MOVES:
        i += tl.load(shift + 2 * image)
        j += tl.load(shift + 2 * image + 1)
        j = tl.where(tl.load(flip + image), MIRROR - j, j)
    x += tl.load(index + image).to(tl.int64) * of_image
    pixel = tl.load(x + c * of_channel + i * of_row + j * of_column, mask=inside, other=0)
    apart = pixel.to(tl.float32) - tl.load(mean + c, mask=inside, other=0.0)
    tl.store(y + image * (C * H * W) + at, tl.div_rn(apart, tl.load(std + c, mask=inside, other=1.0)), mask=inside)


def show(
    x: Tensor, size: Sequence[int], mean: Tensor, std: Tensor, index: Tensor, flip: Tensor | None, shift: Tensor | None
) -> Tensor:
    """(x[index] − mean) / std, mirrored, then cropped to `size` at `shift`, as `Images.show`, bit for bit."""
    channels, height, width = size
    y = torch.empty(*index.shape, *size, dtype=torch.float32, device=x.device)
    moves = flip is not None and shift is not None
    index = index.to(x.device).contiguous()
    flip, shift = (value.contiguous() if value is not None and moves else index for value in (flip, shift))
    with torch.cuda.device_of(x):
        _show[index.numel(), triton.cdiv(channels * height * width, BLOCK)](
            x, index, flip, shift, mean, std, y, *x.stride(), moves, x.shape[3] - 1, channels, height, width, BLOCK,
            num_warps=4,
        )
    return y


BLOCK = 1024
"""Numbers per program."""
