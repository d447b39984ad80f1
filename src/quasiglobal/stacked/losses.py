"""Losses that vmap does not support, or computes for one model after the other, written out in plain operations.

The signatures are those of `torch.nn.functional`, without the deprecated arguments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """`nn.functional.cross_entropy`, with the same bits inside vmap; it does not load SymPy.

    PyTorch decomposes the loss of class numbers [batch] for vmap, and the checks in it load SymPy, which takes half of
    the time that a small model takes to start. The loss of [batch, 1] is decomposed to the same operations, without it.
    """
    if output.ndim != 2 or targets.is_floating_point():
        return functional.cross_entropy(output, targets)
    return functional.nll_loss(functional.log_softmax(output, 1)[..., None], targets[..., None])


def _cross_entropy(*args: Any, **named: Any) -> Tensor:
    """With weights and label smoothing, PyTorch selects the targets that count; here the others have weight 0."""
    given: dict[str, Any] = signature(functional.cross_entropy).bind(*args, **named).arguments
    x, target, weight, smoothing = given["input"], given["target"], given.get("weight"), given.get("label_smoothing")
    if weight is None or not smoothing or target.is_floating_point():
        return functional.cross_entropy(*args, **named)
    dim = min(1, x.ndim - 1)
    logs, counts = functional.log_softmax(x, dim), target != given.get("ignore_index", -100)
    classes = torch.where(counts, target, 0)
    weights = weight[classes] * counts
    at_target = -logs.gather(dim, classes.unsqueeze(dim)).squeeze(dim) * weights
    everywhere = -(logs * weight.view(-1, *(1,) * (x.ndim - dim - 1))).sum(dim) * counts
    values = (1 - smoothing) * at_target + smoothing / x.shape[dim] * everywhere
    reduction = given.get("reduction", "mean")
    mean: Tensor = values.sum() / weights.sum()
    return mean if reduction == "mean" else _reduced(values, reduction)


def _kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    values = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    return values.sum() / len(input) if reduction == "batchmean" else _reduced(values, reduction)


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Without the check that no variance is negative, which reads values; the first plain gradient has it."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if variance.shape == input.shape[:-1] and variance.shape != input.shape:
        variance = variance[..., None]
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    values = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    return _reduced(values + 0.5 * math.log(2 * math.pi) if full else values, reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2, eps: float = 1e-6,
    swap: bool = False, *, reduction: str = "mean",
) -> Tensor:
    near, far = (functional.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, functional.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp(min=0), reduction)


def _margin_ranking(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *, reduction: str = "mean"
) -> Tensor:
    return _reduced((margin - target * (input1 - input2)).clamp(min=0), reduction)


def _soft_margin(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    values = -target * input
    return _reduced(torch.logaddexp(values, torch.zeros_like(values)), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


def _or_pytorchs(written_out: Callable[..., Tensor], usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss written out, unless a deprecated argument is given."""
    def own(*args: Any, **named: Any) -> Tensor:
        given = dict(signature(usual).bind(*args, **named).arguments)
        if any(given.pop(name, None) is not None for name in ("size_average", "reduce")):
            return usual(*args, **named)
        return written_out(**given)

    return own


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": _cross_entropy,
    "kl_div": _or_pytorchs(_kl_div, functional.kl_div),
    "gaussian_nll_loss": _gaussian_nll,
    "triplet_margin_loss": _or_pytorchs(_triplet_margin, functional.triplet_margin_loss),
    "margin_ranking_loss": _or_pytorchs(_margin_ranking, functional.margin_ranking_loss),
    "soft_margin_loss": _or_pytorchs(_soft_margin, functional.soft_margin_loss),
}
"""Names of losses of `torch.nn.functional`, and their written-out forms."""
