"""Normalisations of n models at once: EvoNorm, group and batch, with the sum and the activation that follow; LayerNorm.

Images are [n, batch, height, width, channels], contiguous. In the kernels an "image" is one of the `parts` of a batch:
a single image, or for batch any number of pixels. LayerNorm is over the channels of each pixel, [n, pixels, channels].
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from quasiglobal.stacked.kernels.operations import Context, Shares, channels_first, channels_last
from quasiglobal.stacked.kernels.shared import accumulator, launched

USUAL = tl.constexpr("")
"""The usual eviction policy of caches."""


@triton.jit
def _load(
    x, base, p, c, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr,
    CACHE: tl.constexpr = USUAL,
):
    """Load pixels p, p + 1, … of an image, [BP, channels]; 0 beyond its end. CACHE is the eviction policy.

    Two loads with the same policy of a block that is a whole image become one: the values stay in registers.
    """
    where = x + base + (p + tl.arange(0, BP))[:, None] * C + c[None, :]
    return tl.load(where, mask=_inside(p, c, HW, C, BP), other=0.0, eviction_policy=CACHE).to(ACC)


@triton.jit
def _inside(p, c, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    return (p + tl.arange(0, BP) < HW)[:, None] & (c < C)[None, :]


@triton.jit
def _store(x, base, p, c, value, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr):
    where = base + (p + tl.arange(0, BP))[:, None] * C + c[None, :]
    tl.store(x + where, value.to(x.dtype.element_ty), mask=_inside(p, c, HW, C, BP))


@triton.jit
def _in_groups(v, BC: tl.constexpr, GROUP: tl.constexpr):
    """Each channel's sum over its group of channels."""
    if GROUP == 1:
        return v
    sums = tl.sum(tl.reshape(v, [BC // GROUP, GROUP]), axis=1)
    return tl.reshape(tl.broadcast_to(sums[:, None], [BC // GROUP, GROUP]), [BC])


@triton.jit
def _own_moments(
    x, base, c, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, GROUP: tl.constexpr,
    ACC: tl.constexpr,
):
    """Mean and sum of squared deviations of each channel's group in one image."""
    total = tl.zeros([BC], dtype=ACC)
    for p in range(0, HW, BP):
        total += tl.sum(_load(x, base, p, c, HW, C, BP, ACC), axis=0)
    mean = _in_groups(total, BC, GROUP) / (HW * GROUP)
    square = tl.zeros([BC], dtype=ACC)
    for p in range(0, HW, BP):
        apart = _load(x, base, p, c, HW, C, BP, ACC) - mean[None, :]
        square += tl.sum(tl.where(_inside(p, c, HW, C, BP), apart * apart, 0.0), axis=0)
    return mean, _in_groups(square, BC, GROUP)


@triton.jit
def _rows(sums, stride, c, images, C: tl.constexpr, BB: tl.constexpr):
    """Load one row per image of a model, [BB, channels]."""
    image = tl.arange(0, BB)
    at = image[:, None].to(tl.int64) * stride + c[None, :]
    return tl.load(sums + at, mask=(image < images)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _coefficients(moments, c, C: tl.constexpr):
    """The stored mean, 1 / standard deviation, factor and offset of each channel."""
    mean = tl.load(moments + c, mask=c < C, other=0.0)
    scale = tl.load(moments + C + c, mask=c < C, other=0.0)
    factor = tl.load(moments + 2 * C + c, mask=c < C, other=0.0)
    offset = tl.load(moments + 3 * C + c, mask=c < C, other=0.0)
    return mean, scale, factor, offset


@triton.jit
def _moments(
    x, own, base, node, images, c, HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """Mean and variance that normalise each channel; for batch, combined from the moments of each image in `own`."""
    if KIND == "batch":
        own += node * images * 2 * C
        means = _rows(own, 2 * C, c, images, C, BB)
        mean = tl.sum(means, axis=0) / images
        apart = tl.where((tl.arange(0, BB) < images)[:, None], means - mean[None, :], 0.0)
        square = tl.sum(_rows(own + C, 2 * C, c, images, C, BB), axis=0) + HW * tl.sum(apart * apart, axis=0)
        return mean, square / (images * HW)
    mean, square = _own_moments(x, base, c, HW, C, BP, BC, GROUP, ACC)
    return mean, square / (HW * GROUP - (1 if KIND == "evonorm" else 0))


@launched
def _image_moments(
    x, own, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr
):
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, square = _own_moments(x, image * HW * C, c, HW, C, BP, BC, 1, ACC)
    tl.store(own + image * 2 * C + c, mean, mask=c < C)
    tl.store(own + image * 2 * C + C + c, square, mask=c < C)


@triton.jit
def _follow(old, new, value, at, mask, momentum):
    """Update running statistics by this batch's value."""
    before = tl.load(old + at, mask=mask, other=0.0)
    tl.store(new + at, before + momentum * (value - before), mask=mask)


@triton.jit
def _sigmoid(x):
    """1 / (1 + exp(-x)): two special functions, and no code for special cases as division has."""
    root = tl.rsqrt(1 + tl.exp2(x * -1.4426950408889634))
    return root * root


@triton.jit
def _scaled(value, factor, offset, KIND: tl.constexpr):
    """The normalised, scaled and shifted value, by the factor and the offset of each channel."""
    if KIND == "evonorm":
        value = value * _sigmoid(value)
    return value * factor[None, :] + offset[None, :]


@launched
def _normalise(
    x, weight, bias, rest, own, y, moments, running_mean, running_var, new_mean, new_var, images, stride, eps, momentum,
    HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr, RELU: tl.constexpr,
    TRACKED: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """Normalise, scale and shift one image; then add `rest` if SUM and apply ReLU if RELU."""
    image = tl.program_id(0).to(tl.int64)
    node = image // images
    base = image * HW * C
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, variance = _moments(x, own, base, node, images, c, HW, C, GROUP, KIND, BP, BC, BB, ACC)
    scale = 1 / tl.sqrt(variance + eps)
    offset = tl.load(bias + node * stride + c, mask=c < C, other=0.0).to(ACC)
    factor = scale * tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    offset = offset if KIND == "evonorm" else offset - mean * factor
    for p in range(0, HW, BP):
        value = _scaled(_load(x, base, p, c, HW, C, BP, ACC), factor, offset, KIND)
        if SUM:
            value += _load(rest, base, p, c, HW, C, BP, ACC)
        if RELU:
            value = tl.maximum(value, 0.0)
        _store(y, base, p, c, value, HW, C, BP)
    if KIND != "batch" or image == node * images:
        moments += (node if KIND == "batch" else image) * 4 * C
        tl.store(moments + c, mean, mask=c < C)
        tl.store(moments + C + c, scale, mask=c < C)
        tl.store(moments + 2 * C + c, factor, mask=c < C)
        tl.store(moments + 3 * C + c, offset, mask=c < C)
    if TRACKED and image == node * images:
        spread = variance * (images * HW) / (images * HW - 1)
        _follow(running_mean, new_mean, mean, node * C + c, c < C, momentum)
        _follow(running_var, new_var, spread, node * C + c, c < C, momentum)


@triton.jit
def _arriving(
    x, y, dy, base, p, c, factor, offset, HW: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
    BP: tl.constexpr, ACC: tl.constexpr, CACHE: tl.constexpr,
):
    """Load x, and the gradient after the backward pass of the ReLU, whose result is y or is computed from x."""
    g = _load(dy, base, p, c, HW, C, BP, ACC, CACHE)
    value = _load(x, base, p, c, HW, C, BP, ACC, CACHE)
    if MASK == "y":
        g = tl.where(_load(y, base, p, c, HW, C, BP, ACC, CACHE) > 0, g, 0.0)
    if MASK == "x":
        g = tl.where(_scaled(value, factor, offset, KIND) > 0, g, 0.0)
    return value, g


@triton.jit
def _own_sums(
    x, y, dy, base, c, mean, scale, factor, offset,
    HW: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, MASK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """One image's contribution to the gradients of weight and bias."""
    along = tl.zeros([BC], dtype=ACC)
    total = tl.zeros([BC], dtype=ACC)
    for p in range(0, HW, BP):
        value, g = _arriving(x, y, dy, base, p, c, factor, offset, HW, C, KIND, MASK, BP, ACC, "evict_last")
        total += tl.sum(g, axis=0)
        unit = value * _sigmoid(value) if KIND == "evonorm" else value - mean[None, :]
        along += tl.sum(g * unit, axis=0)
    return along * scale, total


@launched
def _batch_sums(
    x, y, dy, moments, sums, images,
    HW: tl.constexpr, C: tl.constexpr, MASK: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, scale, factor, offset = _coefficients(moments + image // images * 4 * C, c, C)
    along, total = _own_sums(
        x, y, dy, image * HW * C, c, mean, scale, factor, offset, HW, C, "batch", MASK, BP, BC, ACC
    )
    tl.store(sums + image * 2 * C + c, along, mask=c < C)
    tl.store(sums + image * 2 * C + c + C, total, mask=c < C)


@launched
def _normalise_back(
    x, y, dy, moments, sums, own, dx, drest, images, of_image, of_node,
    HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr, MASK: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """Gradients of one image of x and of `rest`, and its contribution to the gradients of weight and bias in `own`.

    For batch, the first image contributes the sum over all images, which are in `sums`.
    """
    image = tl.program_id(0).to(tl.int64)
    node = image // images
    base = image * HW * C
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, scale, factor, offset = _coefficients(moments + (node if KIND == "batch" else image) * 4 * C, c, C)
    if KIND == "batch":
        sums += node * images * 2 * C
        along = tl.sum(_rows(sums, 2 * C, c, images, C, BB), axis=0)
        total = tl.sum(_rows(sums + C, 2 * C, c, images, C, BB), axis=0)
        count = images * HW
    else:
        along, total = _own_sums(
            x, y, dy, base, c, mean, scale, factor, offset, HW, C, KIND, MASK, BP, BC, ACC
        )
        count = HW * GROUP
    # the gradient is linear in x, apart from the slope's term
    slope = scale * _in_groups(along * factor, BC, GROUP) / (count - 1 if KIND == "evonorm" else count)
    level = mean * slope
    if KIND != "evonorm":
        level -= _in_groups(total * factor, BC, GROUP) / count
    for p in range(0, HW, BP):
        value, g = _arriving(x, y, dy, base, p, c, factor, offset, HW, C, KIND, MASK, BP, ACC, "evict_first")
        if SUM and MASK != "":                              # without ReLU the gradient of `rest` is dy
            _store(drest, base, p, c, g, HW, C, BP)
        g *= factor[None, :]
        if KIND == "evonorm":
            s = _sigmoid(value)
            g *= s + value * s * (1 - s)
        g += level[None, :] - value * slope[None, :]
        _store(dx, base, p, c, g, HW, C, BP)
    if KIND != "batch" or image == node * images:
        at = image % images * of_image + node * of_node + c
        tl.store(own + at, along, mask=c < C)
        tl.store(own + at + C, total, mask=c < C)


class Normalised(torch.autograd.Function):
    """`operations.normalise` of all models, in `dtype`; writes the gradients of weight and bias to `shares`."""

    @staticmethod
    def forward(
        ctx: Context[tuple[Shares, str, int, str, bool]], shares: Shares, dtype: torch.dtype, x: Tensor,
        weight: Tensor, bias: Tensor, rest: Tensor | None, running: list[Tensor], kind: str, groups: int, eps: float,
        momentum: float, relu: bool,
    ) -> tuple[Tensor, ...]:
        images, summed = channels_last(x), rest is not None
        n, count, places, channels = _parts(images, kind)
        y = torch.empty_like(images, dtype=dtype)
        wide = torch.promote_types(images.dtype, torch.float32)
        moments = images.new_empty(n, 1 if kind == "batch" else count, 4, channels, dtype=wide)
        before = [value.contiguous() for value in running] or [moments, moments]
        after = [torch.empty_like(value) for value in running] or [moments.new_empty(0) for _ in before]
        grid, (bp, bc, bb, acc), warps = _blocks(images, kind, groups, 16384)
        own = moments
        if kind == "batch":
            own = images.new_empty(n, count, 2, channels, dtype=wide)
            _image_moments[grid](images, own, places, channels, bp, bc, acc, num_warps=warps)
        _normalise[grid](
            images, weight, bias, images if rest is None else channels_last(rest), own, y, moments, *before, *after,
            count, bias.stride(0), eps, momentum, places, channels, _size(channels, groups, kind), kind, summed, relu,
            bool(running), bp, bc, bb, acc, num_warps=warps,
        )
        # the ReLU's mask is computed from x, or read from the ReLU's result
        mask = ("y" if summed else "x") if relu else ""
        ctx.save_for_backward(images, y if mask == "y" else images, moments)
        ctx.how = shares, kind, groups, mask, summed
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*after)
        return channels_first(y, x), *after

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Context[tuple[Shares, str, int, str, bool]], dy: Tensor | None, *_: object
    ) -> tuple[Tensor | None, ...]:
        if dy is None:
            return (None,) * 12
        x, y, moments = ctx.saved_tensors
        shares, kind, groups, mask, summed = ctx.how
        n, count, places, channels = _parts(x, kind)
        own, g = shares(), channels_last(dy)
        dx = torch.empty_like(x)
        drest = torch.empty_like(x) if mask == "y" else g
        grid, (bp, bc, bb, acc), warps = _blocks(x, kind, groups, 8192)
        sums = moments
        if kind == "batch":
            sums = moments.new_empty(n, count, 2, channels)
            _batch_sums[grid](x, y, g, moments, sums, count, places, channels, mask, bp, bc, acc, num_warps=warps)
        _normalise_back[grid](
            x, y, g, moments, sums, own, dx, drest, count, own.stride(0), own.stride(1), places, channels,
            _size(channels, groups, kind), kind, summed, mask, bp, bc, bb, acc, num_warps=warps,
        )
        rest = channels_first(drest, dy) if summed else None
        return None, None, channels_first(dx, dy), None, None, rest, *(None,) * 6


def _size(channels: int, groups: int, kind: str) -> int:
    """Channels per group; 1 for batch."""
    return 1 if kind == "batch" else channels // groups


def shares(batch: int, kind: str) -> int:
    """Number of partial sums of the gradients of weight and bias: one per image; for batch, only their sum."""
    return 1 if kind == "batch" else batch


def _parts(x: Tensor, kind: str) -> tuple[int, int, int, int]:
    """Number of models, equal parts per model, pixels per part, and channels.

    A part is an image; for batch, whose statistics are not per image, about `PART` numbers.
    """
    n, batch, height, width, channels = x.shape
    places = batch * height * width
    if kind != "batch":
        return n, batch, places // batch, channels
    most = max(1, min(places * min(channels, 64) // PART, MOST_PARTS))
    count = max(count for count in range(1, most + 1) if places % count == 0)
    return n, count, places // count, channels


PART, MOST_PARTS = 8192, 64
"""Numbers of a part of batch normalisation, as many as a block has; parts of a model, at most, since every block of the
second kernel reads the sums of all parts."""


def _blocks(
    x: Tensor, kind: str, groups: int, limit: int
) -> tuple[tuple[int, int], tuple[int, int, int, tl.dtype], int]:
    """The grid (parts × blocks of channels), the block sizes and accumulator dtype, and the warps per block."""
    n, batch, places, channels = _parts(x, kind)
    bc = min(triton.next_power_of_2(channels), max(64, triton.next_power_of_2(_size(channels, groups, kind))))
    whole = triton.next_power_of_2(places)
    if kind != "batch" and whole * bc > limit:              # small blocks: more of them run at a time
        limit //= 2
    bp = min(whole, max(1, limit // bc))
    warps = 8 if bp * bc >= 16384 or whole * bc > 16384 else 4
    blocks = bp, bc, triton.next_power_of_2(batch), accumulator(x)
    return (n * batch, triton.cdiv(channels, bc)), blocks, warps


# --------------------------------------------------------------------------------------------------------- LayerNorm


@launched
def _layer_norm(
    x, weight, bias, y, moments, pixels, stride, eps, C: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr,
    ACC: tl.constexpr,
):
    """Normalise, scale and shift BP pixels; store mean and 1 / standard deviation of each."""
    node = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    p = (tl.program_id(0) * BP + tl.arange(0, BP))[:, None]
    at = (node * pixels + p) * C + c
    inside = (p < pixels) & (c < C)
    value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
    mean = tl.sum(value, axis=1, keep_dims=True) / C
    apart = tl.where(c < C, value - mean, 0.0)
    scale = 1 / tl.sqrt(tl.sum(apart * apart, axis=1, keep_dims=True) / C + eps)
    factor = tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    offset = tl.load(bias + node * stride + c, mask=c < C, other=0.0).to(ACC)
    tl.store(y + at, (apart * scale * factor + offset).to(y.dtype.element_ty), mask=inside)
    moments += (node * pixels + p) * 2
    tl.store(moments, mean, mask=p < pixels)
    tl.store(moments + 1, scale, mask=p < pixels)


@launched
def _layer_norm_back(
    x, weight, dy, moments, dx, sums, pixels, stride, of_share, of_node, SHARE: tl.constexpr, C: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """Gradient of x in one share of a model's pixels, and its part of the gradients of weight and bias."""
    node = tl.program_id(1).to(tl.int64)
    c = tl.arange(0, BC)[None, :]
    factor = tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    along = tl.zeros([BP, BC], dtype=ACC)
    total = tl.zeros([BP, BC], dtype=ACC)
    for first in range(0, SHARE, BP):
        p = (tl.program_id(0) * SHARE + first + tl.arange(0, BP))[:, None]
        at = (node * pixels + p) * C + c
        inside = (p < pixels) & (c < C)
        value = tl.load(x + at, mask=inside, other=0.0).to(ACC)
        g = tl.load(dy + at, mask=inside, other=0.0).to(ACC)
        mean = tl.load(moments + (node * pixels + p) * 2, mask=p < pixels, other=0.0)
        scale = tl.load(moments + (node * pixels + p) * 2 + 1, mask=p < pixels, other=0.0)
        unit = tl.where(inside, (value - mean) * scale, 0.0)
        along += g * unit
        total += g
        g *= factor
        level = tl.sum(g, axis=1, keep_dims=True) / C
        slope = tl.sum(g * unit, axis=1, keep_dims=True) / C
        tl.store(dx + at, (scale * (g - level - unit * slope)).to(dx.dtype.element_ty), mask=inside)
    at = tl.program_id(0).to(tl.int64) * of_share + node * of_node + c
    tl.store(sums + at, tl.sum(along, axis=0)[None, :], mask=c < C)
    tl.store(sums + at + C, tl.sum(total, axis=0)[None, :], mask=c < C)


class LayerNormed(torch.autograd.Function):
    """`operations.layer_norm` of all models; writes the gradients of weight and bias to `shares`."""

    @staticmethod
    def forward(
        ctx: Context[Shares], shares: Shares, dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> Tensor:
        pixels = x.reshape(len(x), -1, x.shape[-1]).contiguous()
        y, moments = layer_norm(pixels, weight, bias, eps, dtype)
        ctx.save_for_backward(pixels, weight, moments)
        ctx.how = shares
        return y.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Context[Shares], dy: Tensor) -> tuple[Tensor | None, ...]:
        pixels, weight, moments = ctx.saved_tensors
        dx = layer_norm_back(pixels, weight, moments, dy.reshape(pixels.shape).contiguous(), ctx.how())
        return None, None, dx.view(dy.shape), None, None, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return y in `dtype`, and the moments for the backward pass; weight and bias are [n, channels], rows of x."""
    n, pixels, channels = x.shape
    y = torch.empty_like(x, dtype=dtype)
    moments = x.new_empty(n, pixels, 2, dtype=torch.promote_types(x.dtype, torch.float32))
    bp, bc = _pixels(channels)
    _layer_norm[(triton.cdiv(pixels, bp), n)](
        x, weight, bias, y, moments, pixels, bias.stride(0), eps, channels, bp, bc, accumulator(x), num_warps=WARPS
    )
    return y, moments


def layer_norm_back(x: Tensor, weight: Tensor, moments: Tensor, dy: Tensor, sums: Tensor) -> Tensor:
    """Return the gradient of x; fill `sums` [shares, n, 2 · channels] with the gradients of weight and bias."""
    n, pixels, channels = x.shape
    dx = torch.empty_like(x)
    bp, bc = _pixels(channels)
    share = triton.cdiv(triton.cdiv(pixels, len(sums)), bp) * bp
    _layer_norm_back[(len(sums), n)](
        x, weight, dy, moments, dx, sums, pixels, weight.stride(0), sums.stride(0), sums.stride(1), share, channels,
        bp, bc, accumulator(x), num_warps=WARPS,
    )
    return dx


WARPS = 4
"""Warps per block."""

BLOCK = 2048
"""Numbers of a block, at least one pixel."""

PROGRAMS = 1056
"""Number of blocks of the backward pass that fill the GPU."""


def _pixels(channels: int) -> tuple[int, int]:
    """Pixels and channels of a block."""
    width = int(triton.next_power_of_2(channels))
    return max(1, BLOCK // width), width


def layer_norm_shares(n: int, pixels: int) -> int:
    """Number of shares of a model's pixels that are summed separately for the gradients of weight and bias."""
    return max(1, min(PROGRAMS // n, pixels // 64, 64))
