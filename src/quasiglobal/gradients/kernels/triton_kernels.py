"""Convolution, normalisation and pooling of n models at once, as Triton kernels.

Every image tensor is [n, batch, height, width, channels], contiguous: each model's images lie channels-last, one
model after the other. A convolution is a matrix product over the places of all images of a model, its left side
never stored; a normalisation reads an image once forward and once backward, with the sum and the activation after it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# ------------------------------------------------------------------------------------------------ convolution


@triton.jit
def _taps(first, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Of the columns first, first + 1, … of the left side: the kernel's row and column, and the channel."""
    k = first + tl.arange(0, BK)
    tap = first // C if C % BK == 0 else k // C
    return tap // S, tap % S, k - tap * C


@triton.jit
def _convolution(
    x, w, later, y, batch, stride,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, UP: tl.constexpr, DOWN: tl.constexpr,
    TOP: tl.constexpr, LEFT: tl.constexpr, BACK: tl.constexpr,
    BM: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr, LATER: tl.constexpr,
):
    """Place (i, j) of y sums w's tap (r, s) times x's place ((i · UP − TOP + r) / DOWN, (j · UP − LEFT + s) / DOWN).

    w is [channels out, R, S, channels in]; BACK reads it turned round and transposed. `later` is added. Of the taps
    only those whose place is a whole one count: a block's i are equal modulo DOWN, its j too, and so are its taps.
    """
    RU: tl.constexpr = (R + DOWN - 1) // DOWN
    SU: tl.constexpr = (S + DOWN - 1) // DOWN
    HU: tl.constexpr = (OH + DOWN - 1) // DOWN
    WU: tl.constexpr = (OW + DOWN - 1) // DOWN
    node = tl.program_id(2).to(tl.int64)
    x += node * batch * (H * W * C)
    y += node * batch * (OH * OW * OC)
    later += node * batch * (OH * OW * OC)
    w += node * stride
    place = tl.program_id(0) * BM + tl.arange(0, BM)
    kind = tl.program_id(1) % (DOWN * DOWN)
    out = tl.program_id(1) // (DOWN * DOWN) * BN + tl.arange(0, BN)
    image = place // (HU * WU)
    i = (place // WU % HU) * DOWN + kind // DOWN
    j = (place % WU) * DOWN + kind % DOWN
    known = (image < batch) & (i < OH) & (j < OW)
    where = ((image * OH + i) * OW + j)[:, None] * OC + out[None, :]
    inside = known[:, None] & (out < OC)[None, :]
    i = i * UP - TOP
    j = j * UP - LEFT
    r0 = ((TOP - kind // DOWN) % DOWN + DOWN) % DOWN
    s0 = ((LEFT - kind % DOWN) % DOWN + DOWN) % DOWN
    total = tl.zeros([BM, BN], dtype=ACC)
    if LATER:
        total += tl.load(later + where, mask=inside, other=0.0).to(ACC)
    for first in range(0, RU * SU * C, BK):
        u, v, c = _taps(first, C, SU, BK)
        r = r0 + u * DOWN
        s = s0 + v * DOWN
        if C % BK == 0:
            row, column = ((i + r) // DOWN)[:, None], ((j + s) // DOWN)[:, None]
            real = (r < R) & (s < S) & (c < C)
        else:
            row, column = (i[:, None] + r[None, :]) // DOWN, (j[:, None] + s[None, :]) // DOWN
            real = (r < R) & (s < S) & (u < RU)
        there = known[:, None] & real[None, :] & (row >= 0) & (column >= 0) & (row < H) & (column < W)
        left = tl.load(x + ((image[:, None] * H + row) * W + column) * C + c[None, :], mask=there, other=0.0)
        tap = r * S + s
        if BACK:
            at = (c * (R * S) + R * S - 1 - tap)[:, None] * OC + out[None, :]
        else:
            at = (tap * C + c)[:, None] + out[None, :] * (R * S * C)
        right = tl.load(w + at, mask=real[:, None] & (out < OC)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    tl.store(y + where, total.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _weight_gradient(
    x, dy, dw, places, of_share, of_node, SHARE: tl.constexpr,
    H: tl.constexpr, W: tl.constexpr, C: tl.constexpr, OH: tl.constexpr, OW: tl.constexpr, OC: tl.constexpr,
    R: tl.constexpr, S: tl.constexpr, STRIDE: tl.constexpr, PAD: tl.constexpr,
    BP: tl.constexpr, BK: tl.constexpr, BN: tl.constexpr, ACC: tl.constexpr,
):
    """dw[tap and channel in, channel out], summed over one share of the places of a model's images."""
    node = tl.program_id(2).to(tl.int64)
    x += node * (places // (OH * OW)) * (H * W * C)
    dy += node * places * OC
    dw += tl.program_id(1).to(tl.int64) * of_share + node * of_node
    blocks: tl.constexpr = (R * S * C + BK - 1) // BK
    first = tl.program_id(0) % blocks * BK
    out = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    k = first + tl.arange(0, BK)
    r, s, c = _taps(first, C, S, BK)
    total = tl.zeros([BK, BN], dtype=ACC)
    for p in range(0, SHARE, BP):
        place = tl.program_id(1) * SHARE + p + tl.arange(0, BP)
        i = (place // OW % OH) * STRIDE - PAD
        j = (place % OW) * STRIDE - PAD
        if C % BK == 0:
            row, column = (i + r)[None, :], (j + s)[None, :]
        else:
            row, column = i[None, :] + r[:, None], j[None, :] + s[:, None]
        inside = (place < places)[None, :]
        there = inside & (row >= 0) & (column >= 0) & (row < H) & (column < W) & (k < R * S * C)[:, None]
        image = (place // (OH * OW))[None, :]
        left = tl.load(x + ((image * H + row) * W + column) * C + c[:, None], mask=there, other=0.0)
        at = place[:, None] * OC + out[None, :]
        right = tl.load(dy + at, mask=(place < places)[:, None] & (out < OC)[None, :], other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee", out_dtype=ACC)
    where = k[:, None] + out[None, :] * (R * S * C)
    tl.store(dw + where, total, mask=(k < R * S * C)[:, None] & (out < OC)[None, :])


def convolve(x: Tensor, w: Tensor, stride: int, padding: int) -> Tensor:
    """x [n, b, h, w, c] with each model's own kernels w [n, out, r, s, c]."""
    n, batch, height, width, _ = x.shape
    _, channels, r, s, _ = w.shape
    side = [(size + 2 * padding - k) // stride + 1 for size, k in ((height, r), (width, s))]
    y = x.new_empty(n, batch, *side, channels)
    return _launch(x, w, None, y, up=stride, down=1, padding=(padding, padding))


def convolve_back(
    dy: Tensor, w: Tensor, later: Tensor | None, size: torch.Size, stride: int, padding: int
) -> Tensor:
    """The gradient of a convolution's input of that size, added to `later`, that of its other uses."""
    around = w.shape[2] - 1 - padding, w.shape[3] - 1 - padding
    return _launch(dy, w, later, dy.new_empty(size), up=1, down=stride, padding=around, back=True)


def _launch(
    x: Tensor, w: Tensor, later: Tensor | None, y: Tensor, *, up: int, down: int, padding: tuple[int, int],
    back: bool = False,
) -> Tensor:
    n, _, *source = x.shape
    _, batch, height, width, channels = y.shape
    r, s = w.shape[2:4]
    bn = min(64, max(16, triton.next_power_of_2(channels)))
    bk = _columns(r * s, source[2])
    bm, stages = (256, 2) if bn < 64 else (128, 3)          # the fastest of those tried on an H200
    places = batch * triton.cdiv(height, down) * triton.cdiv(width, down)
    grid = (triton.cdiv(places, bm), triton.cdiv(channels, bn) * down**2, n)
    _convolution[grid](
        x, w, x if later is None else later, y, batch, w.stride(0), *source, height, width, channels, r, s,
        up, down, *padding, back, bm, bk, bn, _accumulator(x), later is not None,
        num_warps=4, num_stages=stages,
    )
    return y


BLOCK = 64
"""Places, taps with channels in, and channels out of a block of `weight_gradient`."""

PROGRAMS = 528
"""So many blocks of `weight_gradient` fill the GPU."""


def shares(n: int, places: int, weight: torch.Size) -> int:
    """Into how many parts the places of a model's images are split for the gradient of a weight [out, r, s, c]."""
    blocks = triton.cdiv(weight[0], BLOCK) * triton.cdiv(weight[1:].numel(), BLOCK)
    return max(1, min(PROGRAMS // int(blocks * n), places // (4 * BLOCK), 32))


def weight_gradient(x: Tensor, dy: Tensor, dw: Tensor, stride: int, padding: int) -> None:
    """Fill dw [shares, n, out, r, s, c], the gradient of the kernels in shares."""
    n, batch, height, width, channels = x.shape
    _, _, *side, out = dy.shape
    count, _, _, r, s, _ = dw.shape
    places = batch * side[0] * side[1]
    bn = min(BLOCK, max(16, triton.next_power_of_2(out)))
    bk = min(BLOCK, max(16, triton.next_power_of_2(r * s * channels)))
    share = triton.cdiv(triton.cdiv(places, count), BLOCK) * BLOCK
    _weight_gradient[(triton.cdiv(r * s * channels, bk) * triton.cdiv(out, bn), count, n)](
        x, dy, dw, places, dw.stride(0), dw.stride(1), share, height, width, channels, *side, out, r, s,
        stride, padding, BLOCK, bk, bn, _accumulator(x), num_warps=4, num_stages=3,
    )


def _columns(taps: int, channels: int) -> int:
    """How many columns of the left side at a time: of one tap where its channels allow."""
    if channels % 16 == 0:
        return min(64, channels & -channels)
    return min(64, max(16, int(triton.next_power_of_2(taps * channels))))


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _accumulator(x: Tensor) -> tl.dtype:
    return tl.float64 if x.dtype == torch.float64 else tl.float32


# ---------------------------------------------------------------------------------------------- normalisation


@triton.jit
def _load(x, base, p, c, HW: tl.constexpr, C: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr):
    """Places p, p + 1, … of an image, [BP, channels]; 0 beyond its end."""
    place = p + tl.arange(0, BP)
    return tl.load(x + base + place[:, None] * C + c[None, :], mask=_inside(p, c, HW, C, BP), other=0.0).to(ACC)


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
    """An image's mean and sum of squared deviations, of each channel's group."""
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
    """[BB, channels]: of every image of a model."""
    image = tl.arange(0, BB)
    at = image[:, None].to(tl.int64) * stride + c[None, :]
    return tl.load(sums + at, mask=(image < images)[:, None] & (c < C)[None, :], other=0.0)


@triton.jit
def _moments(
    x, own, base, node, images, c, HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """The mean and variance by which a channel is normalised; `own` holds those of each image, for the batch's."""
    if KIND == "batch":
        own += node * images * 2 * C
        means = _rows(own, 2 * C, c, images, C, BB)
        mean = tl.sum(means, axis=0) / images
        apart = tl.where((tl.arange(0, BB) < images)[:, None], means - mean[None, :], 0.0)
        square = tl.sum(_rows(own + C, 2 * C, c, images, C, BB), axis=0) + HW * tl.sum(apart * apart, axis=0)
        return mean, square / (images * HW)
    mean, square = _own_moments(x, base, c, HW, C, BP, BC, GROUP, ACC)
    return mean, square / (HW * GROUP - (1 if KIND == "evonorm" else 0))


@triton.jit
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
    """Running statistics move towards this batch's."""
    before = tl.load(old + at, mask=mask, other=0.0)
    tl.store(new + at, before + momentum * (value - before), mask=mask)


@triton.jit
def _normalise(
    x, weight, bias, rest, own, y, moments, running_mean, running_var, new_mean, new_var, images, stride, eps, momentum,
    HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr, RELU: tl.constexpr,
    TRACKED: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """One image: normalised, scaled and shifted, then `rest` added and ReLU applied where asked."""
    image = tl.program_id(0).to(tl.int64)
    node = image // images
    base = image * HW * C
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    beta = tl.load(bias + node * stride + c, mask=c < C, other=0.0)[None, :].to(ACC)
    if KIND != "shift":
        mean, variance = _moments(x, own, base, node, images, c, HW, C, GROUP, KIND, BP, BC, BB, ACC)
        scale = 1 / tl.sqrt(variance + eps)
        factor = scale * tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
    for p in range(0, HW, BP):
        value = _load(x, base, p, c, HW, C, BP, ACC)
        if KIND == "evonorm":
            value = value * tl.sigmoid(value) * factor[None, :]
        elif KIND != "shift":
            value = (value - mean[None, :]) * factor[None, :]
        value += beta
        if SUM:
            value += _load(rest, base, p, c, HW, C, BP, ACC)
        if RELU:
            value = tl.maximum(value, 0.0)
        _store(y, base, p, c, value, HW, C, BP)
    if KIND != "shift" and (KIND != "batch" or image == node * images):
        at = (node if KIND == "batch" else image) * 2 * C + c
        tl.store(moments + at, mean, mask=c < C)
        tl.store(moments + at + C, scale, mask=c < C)
    if TRACKED and image == node * images:
        spread = variance * (images * HW) / (images * HW - 1)
        _follow(running_mean, new_mean, mean, node * C + c, c < C, momentum)
        _follow(running_var, new_var, spread, node * C + c, c < C, momentum)


@triton.jit
def _arriving(
    dy, y, base, p, c, HW: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, ACC: tl.constexpr
):
    """The gradient that comes through the activation."""
    value = _load(dy, base, p, c, HW, C, BP, ACC)
    if RELU:
        value = tl.where(_load(y, base, p, c, HW, C, BP, ACC) > 0, value, 0.0)
    return value


@triton.jit
def _normalised_by(moments, image, images, c, C: tl.constexpr, KIND: tl.constexpr):
    """The mean and the factor by which an image's channels were normalised."""
    at = (image // images if KIND == "batch" else image) * 2 * C + c
    return tl.load(moments + at, mask=c < C, other=0.0), tl.load(moments + at + C, mask=c < C, other=0.0)


@triton.jit
def _own_sums(
    x, y, dy, base, c, mean, scale,
    HW: tl.constexpr, C: tl.constexpr, KIND: tl.constexpr, RELU: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    """An image's share of the gradients of weight and bias."""
    along = tl.zeros([BC], dtype=ACC)
    total = tl.zeros([BC], dtype=ACC)
    for p in range(0, HW, BP):
        g = _arriving(dy, y, base, p, c, HW, C, RELU, BP, ACC)
        total += tl.sum(g, axis=0)
        if KIND != "shift":
            value = _load(x, base, p, c, HW, C, BP, ACC)
            unit = value * tl.sigmoid(value) if KIND == "evonorm" else value - mean[None, :]
            along += tl.sum(g * unit, axis=0)
    return along * scale, total


@triton.jit
def _store_sums(
    sums, image, images, of_image, of_node, c, along, total, C: tl.constexpr, KIND: tl.constexpr
):
    """An image's share of the gradients: those of the weights, if there are any, and then the biases."""
    sums += image % images * of_image + image // images * of_node
    if KIND != "shift":
        tl.store(sums + c, along, mask=c < C)
        sums += C
    tl.store(sums + c, total, mask=c < C)


@triton.jit
def _batch_sums(
    x, y, dy, moments, sums, images, of_image, of_node,
    HW: tl.constexpr, C: tl.constexpr, RELU: tl.constexpr, BP: tl.constexpr, BC: tl.constexpr, ACC: tl.constexpr,
):
    image = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean, scale = _normalised_by(moments, image, images, c, C, "batch")
    along, total = _own_sums(x, y, dy, image * HW * C, c, mean, scale, HW, C, "batch", RELU, BP, BC, ACC)
    _store_sums(sums, image, images, of_image, of_node, c, along, total, C, "batch")


@triton.jit
def _normalise_back(
    x, weight, y, dy, moments, sums, dx, drest, images, of_image, of_node, stride,
    HW: tl.constexpr, C: tl.constexpr, GROUP: tl.constexpr, KIND: tl.constexpr, SUM: tl.constexpr, RELU: tl.constexpr,
    BP: tl.constexpr, BC: tl.constexpr, BB: tl.constexpr, ACC: tl.constexpr,
):
    """The gradients of one image of x and of `rest`, and its share of those of weight and bias."""
    image = tl.program_id(0).to(tl.int64)
    node = image // images
    base = image * HW * C
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    mean = tl.zeros([BC], dtype=ACC)
    scale = tl.zeros([BC], dtype=ACC)
    if KIND != "shift":
        mean, scale = _normalised_by(moments, image, images, c, C, KIND)
    if KIND == "batch":
        along = tl.sum(_rows(sums + node * of_node, of_image, c, images, C, BB), axis=0)
        total = tl.sum(_rows(sums + node * of_node + C, of_image, c, images, C, BB), axis=0)
        count = images * HW
    else:
        own_along, own_total = _own_sums(x, y, dy, base, c, mean, scale, HW, C, KIND, RELU, BP, BC, ACC)
        along, total = own_along, own_total
        count = HW * GROUP
    if KIND != "shift":
        gamma = tl.load(weight + node * stride + c, mask=c < C, other=0.0).to(ACC)
        along = _in_groups(along * gamma, BC, GROUP)
        total = _in_groups(total * gamma, BC, GROUP)
    for p in range(0, HW, BP):
        g = _arriving(dy, y, base, p, c, HW, C, RELU, BP, ACC)
        value = _load(x, base, p, c, HW, C, BP, ACC)
        if SUM and RELU:                                    # without ReLU it is dy itself
            _store(drest, base, p, c, g, HW, C, BP)
        if KIND != "shift":
            unit = (value - mean[None, :]) * scale[None, :]
            g *= gamma[None, :]
            if KIND == "evonorm":
                s = tl.sigmoid(value)
                g = g * s * (1 + value * (1 - s)) - unit * (along / (count - 1))[None, :]
            else:
                g -= (total / count)[None, :] + unit * (along / count)[None, :]
            g *= scale[None, :]
        _store(dx, base, p, c, g, HW, C, BP)
    if KIND != "batch":
        _store_sums(sums, image, images, of_image, of_node, c, own_along, own_total, C, KIND)


def normalise(
    x: Tensor, weight: Tensor, bias: Tensor, rest: Tensor | None, running: list[Tensor],
    kind: str, groups: int, eps: float, momentum: float, relu: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """y of that type, by what x was normalised, and the new running statistics."""
    n, batch, places, channels = _parts(x, kind)
    y = torch.empty_like(x, dtype=dtype)
    moments, own = (x.new_empty(n, batch, 2, channels, dtype=_wide(x)) for _ in range(2))
    before = [value.contiguous() for value in running] or [own, own]
    after = [torch.empty_like(value) for value in running] or [own.new_empty(0) for _ in before]
    grid, blocks, warps = _blocks(x, kind, groups, 16384)
    if kind == "batch":
        _image_moments[grid](x, own, places, channels, blocks[0], blocks[1], blocks[3], num_warps=warps)
    _normalise[grid](
        x, weight, bias, x if rest is None else rest, own, y, moments, *before, *after, batch, bias.stride(0), eps,
        momentum, places, channels, _size(channels, groups, kind), kind, rest is not None, relu, bool(running), *blocks,
        num_warps=warps,
    )
    return y, moments, after


def normalise_back(
    x: Tensor, weight: Tensor, y: Tensor | None, dy: Tensor, moments: Tensor, sums: Tensor,
    kind: str, groups: int, relu: bool, summed: bool,
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of what was added; fill `sums` [parts, n, …] with those of weight and bias."""
    _, batch, places, channels = _parts(x, kind)
    y = x if y is None else y
    dx = torch.empty_like(x)
    drest = torch.empty_like(x) if summed and relu else dy
    grid, blocks, warps = _blocks(x, kind, groups, 8192)
    strides = sums.stride(0), sums.stride(1)
    if kind == "batch":
        _batch_sums[grid](
            x, y, dy, moments, sums, batch, *strides, places, channels, relu, blocks[0], blocks[1], blocks[3],
            num_warps=warps,
        )
    _normalise_back[grid](
        x, weight, y, dy, moments, sums, dx, drest, batch, *strides, weight.stride(0),
        places, channels, _size(channels, groups, kind), kind, summed, relu, *blocks, num_warps=warps,
    )
    return dx, drest


def _size(channels: int, groups: int, kind: str) -> int:
    """Of a group."""
    return channels // groups if kind in ("evonorm", "group") else 1


def parts(batch: int, kind: str) -> int:
    """Into how many equal parts a batch is cut: images, or fewer where an image has no statistics of its own."""
    fewer = max(count for count in range(1, 17) if batch % count == 0)
    return batch if kind in ("evonorm", "group") or fewer < 8 else fewer


def _parts(x: Tensor, kind: str) -> tuple[int, int, int, int]:
    """The models, the parts of a model's batch, the places of a part, the channels."""
    n, batch, height, width, channels = x.shape
    count = parts(batch, kind)
    return n, count, batch // count * height * width, channels


def _blocks(
    x: Tensor, kind: str, groups: int, limit: int
) -> tuple[tuple[int, int], tuple[int, int, int, tl.dtype], int]:
    """The grid, a part and some channels each; the sizes of the blocks; how many warps do one."""
    n, batch, places, channels = _parts(x, kind)
    bc = min(triton.next_power_of_2(channels), max(64, triton.next_power_of_2(_size(channels, groups, kind))))
    whole = triton.next_power_of_2(places)
    if kind != "batch" and whole * bc > limit:              # the parts are small: better more of them at a time
        limit //= 2
    bp = min(whole, max(1, limit // bc))
    blocks = bp, bc, triton.next_power_of_2(batch), _accumulator(x)
    return (n * batch, triton.cdiv(channels, bc)), blocks, 8 if bp * bc >= 16384 or whole * bc > 16384 else 4


# ------------------------------------------------------------------------------------------- rows and regions


@triton.jit
def _pack(x, columns, y, d, size, BLOCK: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = tl.load(columns + k, mask=k < size, other=0)
    value = tl.load(x + row * d + column, mask=k < size, other=0.0)
    tl.store(y + row * size + k, value.to(y.dtype.element_ty), mask=k < size)


def pack(x: Tensor, columns: Tensor, dtype: torch.dtype) -> Tensor:
    """Those columns of x [n, d], in that order and type."""
    y = torch.empty(len(x), len(columns), dtype=dtype, device=x.device)
    _pack[(triton.cdiv(len(columns), 1024), len(x))](x, columns, y, x.stride(0), len(columns), 1024)
    return y


@triton.jit
def _collect(
    shares, columns, places, counts, g, d, size, MOST: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(1).to(tl.int64)
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    count = tl.load(counts + k, mask=k < size, other=0)
    step = tl.num_programs(1).to(tl.int64) * size
    shares += row * size + tl.load(places + k, mask=k < size, other=0)
    total = tl.load(shares, mask=count > 0, other=0.0)
    for share in tl.static_range(1, FEW):
        total += tl.load(shares + share * step, mask=share < count, other=0.0)
    if tl.max(count, axis=0) > FEW:
        for more in range(FEW, MOST, 8):
            for i in tl.static_range(8):                    # so many loads under way at a time
                total += tl.load(shares + (more + i) * step, mask=more + i < count, other=0.0)
    tl.store(g + row * d + tl.load(columns + k, mask=k < size, other=0), total, mask=k < size)


def collect(shares: Tensor, columns: Tensor, places: Tensor, counts: Tensor, g: Tensor) -> None:
    """Put sums of shares [most, n, size] into g [n, d]: in each of `columns` that of the first `counts` at `places`."""
    most, n, size = shares.shape
    grid = triton.cdiv(size, 1024), n
    _collect[grid](shares, columns, places, counts, g, g.stride(0), size, most, min(most, 4), 1024)


# ---------------------------------------------------------------------------------------------------- pooling


@triton.jit
def _place(at, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr):
    """Where the square of a pooled place and channel begins."""
    image, i, j = at // (OH * OW * C), at // (OW * C) % OH, at // C % OW
    return ((image * (OH * K) + i * K) * (OW * K) + j * K) * C + at % C


@triton.jit
def _pool(
    x, y, which, total, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr,
    ACC: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    first = _place(at, OH, OW, C, K)
    best = tl.load(x + first, mask=at < total, other=0.0).to(ACC)
    where = tl.zeros([SIZE], dtype=tl.int32)
    for k in tl.static_range(1, K * K):
        value = tl.load(x + first + (k // K * (OW * K) + k % K) * C, mask=at < total, other=0.0).to(ACC)
        better = (value > best) | (value != value)          # what is no number wins, as in PyTorch
        best = tl.where(better, value, best)
        where = tl.where(better, k, where)
    tl.store(y + at, best.to(y.dtype.element_ty), mask=at < total)
    tl.store(which + at, where.to(tl.uint8), mask=at < total)


@triton.jit
def _pool_back(
    dy, dx, which, total, OH: tl.constexpr, OW: tl.constexpr, C: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr
):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    first = _place(at, OH, OW, C, K)
    value = tl.load(dy + at, mask=at < total, other=0.0)
    where = tl.load(which + at, mask=at < total, other=0)
    for k in tl.static_range(0, K * K):
        tl.store(dx + first + (k // K * (OW * K) + k % K) * C, tl.where(where == k, value, 0.0), mask=at < total)


def pool(x: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """The largest of each square of x [n, b, h, w, c], and which of its places that was."""
    n, batch, height, width, channels = x.shape
    y = x.new_empty(n, batch, height // window, width // window, channels)
    which = torch.empty_like(y, dtype=torch.uint8)
    _pool[(triton.cdiv(y.numel(), POOLED),)](x, y, which, y.numel(), *y.shape[2:], window, POOLED, _accumulator(x))
    return y, which


def pool_back(dy: Tensor, which: Tensor, window: int) -> Tensor:
    """The gradient of what was pooled."""
    n, batch, height, width, channels = dy.shape
    dx = dy.new_empty(n, batch, height * window, width * window, channels)
    _pool_back[(triton.cdiv(dy.numel(), POOLED),)](dy, dx, which, dy.numel(), *dy.shape[2:], window, POOLED)
    return dx


POOLED = 1024
"""Pooled numbers of a block."""
