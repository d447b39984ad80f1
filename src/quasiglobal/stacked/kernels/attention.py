"""Attention over short sequences: one program computes all scores of one head of one text, forward or backward.

Nothing of the size of the scores is stored: the backward pass computes them again, and so it does with dropout, whose
decisions are a hash of (seed, head of a text, query, key).
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from quasiglobal.stacked.kernels.operations import Context
from quasiglobal.stacked.kernels.shared import accumulator, launched

LENGTHS = range(65, 129)
"""Lengths of texts: one program can hold all scores, and PyTorch's kernels, of blocks of 64, are slower."""

WARPS = 8
"""Warps of a program; with fewer, its registers would not suffice."""


@triton.jit
def _hashed(head, query, key, seed):
    """31 random bits for each pair of a query and a key: a hash with two keys, far cheaper than Philox numbers."""
    first = (seed & 0x7FFFFFFF).to(tl.uint32) ^ (head.to(tl.uint32) * 0x9E3779B1)
    second = (seed >> 31).to(tl.uint32) + head.to(tl.uint32)
    h = ((query * 4096 + key).to(tl.uint32) ^ first) * 0x7FEB352D
    h = ((h ^ (h >> 15)) + second) * 0x846CA68B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return ((h ^ (h >> 16)) >> 1).to(tl.int32)


@triton.jit
def _scores(
    q, k, mask, row, column, mask_row, mask_column,
    LENGTH: tl.constexpr, SCALE: tl.constexpr, MASKED: tl.constexpr, ACC: tl.constexpr,
):
    """Scores of some queries with all keys, to the base 2; −∞ where a query does not see a key."""
    scores = tl.dot(q, tl.trans(k), out_dtype=ACC, input_precision="ieee") * SCALE
    seen = (row < LENGTH) & (column < LENGTH)
    if MASKED:
        seen = seen & (tl.load(mask + row * mask_row + column * mask_column, mask=seen, other=0) != 0)
    return tl.where(seen, scores, float("-inf"))


@launched
def _attend(
    q, k, v, mask, seed, y, total,
    q_text, q_head, q_row, k_text, k_head, k_row, v_text, v_head, v_row, mask_text, mask_head, mask_row, mask_column,
    SCALE: tl.constexpr, DROPPED: tl.constexpr, FACTOR: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
):
    head = tl.program_id(0)
    text, own = (head // HEADS).to(tl.int64), head % HEADS
    row, column, place = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :], tl.arange(0, D)[None, :]
    inside = row < LENGTH
    queries = tl.load(q + text * q_text + own * q_head + row * q_row + place, mask=inside, other=0.0)
    keys = tl.load(k + text * k_text + own * k_head + row * k_row + place, mask=inside, other=0.0)
    values = tl.load(v + text * v_text + own * v_head + row * v_row + place, mask=inside, other=0.0)
    mask += text * mask_text + own * mask_head
    scores = _scores(queries, keys, mask, row, column, mask_row, mask_column, LENGTH, SCALE, MASKED, ACC)
    most = tl.max(scores, axis=1, keep_dims=True)
    most = tl.where(most == float("-inf"), 0.0, most)                       # a query that sees no key
    weights = tl.exp2(scores - most)
    sums = tl.sum(weights, axis=1, keep_dims=True)
    sums = tl.where(sums == 0.0, 1.0, sums)
    if DROPS:
        weights = tl.where(_hashed(head, row, column, tl.load(seed)) >= DROPPED, weights * FACTOR, 0.0)
    found = tl.dot(weights.to(values.dtype), values, out_dtype=ACC, input_precision="ieee") / sums
    at = ((text * LENGTH + row) * HEADS + own) * D + place
    tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)
    tl.store(total + head.to(tl.int64) * LENGTH + row, most + tl.log2(sums), mask=inside)


@launched
def _attend_back(
    dy, q, k, v, mask, seed, y, total, dq, dk, dv, dy_text, dy_head, dy_row,
    q_text, q_head, q_row, k_text, k_head, k_row, v_text, v_head, v_row, mask_text, mask_head, mask_row, mask_column,
    SCALE: tl.constexpr, DROPPED: tl.constexpr, FACTOR: tl.constexpr, HEADS: tl.constexpr, LENGTH: tl.constexpr,
    SIZE: tl.constexpr, D: tl.constexpr, MASKED: tl.constexpr, DROPS: tl.constexpr, ACC: tl.constexpr,
    NATURAL: tl.constexpr,
):
    head = tl.program_id(0)
    text, own = (head // HEADS).to(tl.int64), head % HEADS
    row, column, place = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :], tl.arange(0, D)[None, :]
    inside, at = row < LENGTH, ((text * LENGTH + row) * HEADS + own) * D + place
    queries = tl.load(q + text * q_text + own * q_head + row * q_row + place, mask=inside, other=0.0)
    keys = tl.load(k + text * k_text + own * k_head + row * k_row + place, mask=inside, other=0.0)
    values = tl.load(v + text * v_text + own * v_head + row * v_row + place, mask=inside, other=0.0)
    gradient = tl.load(dy + text * dy_text + own * dy_head + row * dy_row + place, mask=inside, other=0.0)
    mean = tl.sum(gradient.to(ACC) * tl.load(y + at, mask=inside, other=0.0).to(ACC), axis=1, keep_dims=True)
    mask += text * mask_text + own * mask_head
    scores = _scores(queries, keys, mask, row, column, mask_row, mask_column, LENGTH, SCALE, MASKED, ACC)
    weights = tl.exp2(scores - tl.load(total + head.to(tl.int64) * LENGTH + row, mask=inside, other=0.0))
    change = tl.dot(gradient, tl.trans(values), out_dtype=ACC, input_precision="ieee")
    kept = weights
    if DROPS:
        keeps = _hashed(head, row, column, tl.load(seed)) >= DROPPED
        kept, change = tl.where(keeps, weights * FACTOR, 0.0), tl.where(keeps, change * FACTOR, 0.0)
    found = tl.dot(tl.trans(kept.to(gradient.dtype)), gradient, out_dtype=ACC, input_precision="ieee")
    tl.store(dv + at, found.to(dv.dtype.element_ty), mask=inside)
    change = (weights * (change - mean)).to(queries.dtype)
    found = tl.dot(change, keys, out_dtype=ACC, input_precision="ieee") * NATURAL
    tl.store(dq + at, found.to(dq.dtype.element_ty), mask=inside)
    found = tl.dot(tl.trans(change), queries, out_dtype=ACC, input_precision="ieee") * NATURAL
    tl.store(dk + at, found.to(dk.dtype.element_ty), mask=inside)


def suits(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, object]) -> bool:
    """Whether the kernels compute this attention: short texts in 16 bits on a GPU, with a mask of truth values."""
    shape = query.shape
    tensors = (query, key, value)
    return (
        query.is_cuda
        and query.ndim == 4
        and all(tensor.shape == shape and tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
        and shape[2] in LENGTHS
        and shape[3] in (16, 32, 64, 128)
        and (mask is None or mask.dtype == torch.bool)
        and not how.keys() - {"dropout_p", "scale", "is_causal", "enable_gqa"}
        and not how.get("is_causal")
        and not how.get("enable_gqa")
    )


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, scale: float | None
) -> Tensor:
    """Scaled-dot-product attention [texts, heads, length, size], with a mask like the scores; any size may be 1."""
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    mask = None if mask is None else mask[(None,) * (4 - mask.ndim)]
    seed = torch.randint(2**62, (1,), device=query.device) if dropout else None
    found: Tensor = _Attention.apply(query, key, value, mask, seed, dropout, scale)[0]
    return found


class _Attention(torch.autograd.Function):
    """The two kernels as one operation."""

    @staticmethod
    def forward(*given: object) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = FORWARD(*given)
        return found

    @staticmethod
    def setup_context(
        ctx: Context[tuple[float, float]],
        inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, float, float],
        output: tuple[Tensor, Tensor],
    ) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(*inputs[:5], *output)
        ctx.how = inputs[5:]

    @staticmethod
    def backward(ctx: Context[tuple[float, float]], dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        return (*BACKWARD(dy, *ctx.saved_tensors, *ctx.how), None, None, None, None)


def _forward(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, dropout: float, scale: float
) -> tuple[Tensor, Tensor]:
    query, key, value = map(_by_rows, (query, key, value))
    y, total = _forward_like(query, key, value, mask, seed, dropout, scale)
    _attend[(y.shape[0] * y.shape[1],)](
        query, key, value, *_given(mask, seed, query), y, total,
        *_settings(query, key, value, mask, seed, dropout, scale), num_warps=WARPS,
    )
    return y, total


def _backward(
    dy: Tensor, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, y: Tensor,
    total: Tensor, dropout: float, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dy, query, key, value = map(_by_rows, (dy, query, key, value))
    changes = _backward_like(dy, query, key, value, mask, seed, y, total, dropout, scale)
    _attend_back[(y.shape[0] * y.shape[1],)](
        dy, query, key, value, *_given(mask, seed, query), y, total, *changes, *dy.stride()[:3],
        *_settings(query, key, value, mask, seed, dropout, scale), scale, num_warps=WARPS,
    )
    return changes


def _forward_like(query: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    """The results' storage: the heads of a token are adjacent, as the next layer reads them."""
    texts, heads, length, _size = query.shape
    total = query.new_empty(texts, heads, length, dtype=torch.promote_types(query.dtype, torch.float32))
    return _tokens_first(query), total


def _backward_like(dy: Tensor, query: Tensor, *_: object) -> tuple[Tensor, Tensor, Tensor]:
    return _tokens_first(query), _tokens_first(query), _tokens_first(query)


def _tokens_first(like: Tensor) -> Tensor:
    texts, heads, length, size = like.shape
    return like.new_empty(texts, length, heads, size).transpose(1, 2)


def _by_rows(tensor: Tensor) -> Tensor:
    """A tensor whose last dimension is contiguous."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _given(mask: Tensor | None, seed: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The mask and the seed, or tensors that are not read."""
    return (like if mask is None else mask.view(torch.uint8)), (like if seed is None else seed)


def _settings(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, seed: Tensor | None, dropout: float, scale: float
) -> tuple[object, ...]:
    """Arguments of both kernels: strides, SCALE of scores to the base 2, …, ACC.

    DROPPED is the hash from which on weights are kept, FACTOR that of the kept weights.
    """
    of_mask = (0,) * 4 if mask is None else tuple(0 if mask.shape[k] == 1 else mask.stride(k) for k in range(4))
    _, heads, length, size = query.shape
    return (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *of_mask,
        scale / math.log(2), min(2**31 - 1, round(dropout * 2**31)), 1 / (1 - dropout) if dropout < 1 else 0.0,
        heads, length, max(16, triton.next_power_of_2(length)), size,
        mask is not None, seed is not None, accumulator(query),
    )


GIVEN = "Tensor query, Tensor key, Tensor value, Tensor? mask, Tensor? seed"

FORWARD = torch.library.custom_op(
    "quasiglobal::attend", _forward, mutates_args=(),
    schema=f"({GIVEN}, float dropout, float scale) -> (Tensor, Tensor)",
)
FORWARD.register_fake(_forward_like)

BACKWARD = torch.library.custom_op(
    "quasiglobal::attend_back", _backward, mutates_args=(),
    schema=f"(Tensor dy, {GIVEN}, Tensor y, Tensor total, float dropout, float scale) -> (Tensor, Tensor, Tensor)",
)
BACKWARD.register_fake(_backward_like)
"""The kernels as operations that a trace records and the compiler leaves as they are."""
