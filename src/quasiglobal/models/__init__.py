"""The paper's networks by name, as plain modules for one node.

T. Lin, S. P. Karimireddy, S. U. Stich, M. Jaggi: Quasi-Global Momentum: Accelerating Decentralized
Deep Learning on Heterogeneous Data. ICML 2021, Section 5.1.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn

from quasiglobal.errors import InputError, unknown
from quasiglobal.models.norms import NORMS
from quasiglobal.models.resnet import cifar_resnet, resnet18
from quasiglobal.models.small import cnn, mlp
from quasiglobal.models.vgg import VGG11, VGG11Dropout

__all__ = ["MODELS", "NORMS", "Model", "build"]


@dataclass(frozen=True)
class Model:
    """Constructor of a network, and the options that it supports."""

    make: Callable[[str, float, int, tuple[int, ...]], nn.Module]
    """(norm, width, classes, shape) → the module, freshly initialised."""

    norms: tuple[str, ...]
    """Supported normalisations, the default first."""

    side: int | None = 1
    """Minimum height and width of an image; None if inputs of any shape are accepted."""


NORMALISED = ("bn", "gn", "evonorm", "evonorm-released")
RESIDUAL = (*NORMALISED, "evonorm-first-release", "evonorm-running")

MODELS: dict[str, Model] = {
    "resnet20": Model(partial(cifar_resnet, 20), RESIDUAL),
    "resnet18": Model(resnet18, RESIDUAL),
    "vgg11": Model(VGG11, ("none",), side=32),
    "vgg11-dropout": Model(VGG11Dropout, ("none",), side=32),
    "mlp": Model(mlp, ("none",), side=None),
    "cnn": Model(cnn, (*NORMALISED, "none"), side=4),
}
"""Registry of models; add your own here. ResNets of depth 8, 14, 26, 32, … are built like resnet20."""


def build(
    name: str,
    *,
    norm: str | None = None,
    width: float = 1.0,
    classes: int = 10,
    shape: tuple[int, ...] = (3, 32, 32),
) -> nn.Module:
    """Build a network for inputs of `shape`, initialised with torch's global random generator.

    `name` is resnet20 (or another CIFAR ResNet of depth 6k + 2), resnet18, vgg11, vgg11-dropout, mlp or cnn; `norm` is
    bn, gn, evonorm (the paper's text), evonorm-released (used for the paper's tables), evonorm-first-release and
    evonorm-running (for ResNets; they differ from it in tests alone) or none. The default is bn; vgg11, vgg11-dropout
    and mlp support only none. `width` multiplies the number of channels.

    >>> sum(weights.numel() for weights in build("resnet20", norm="evonorm").parameters())
    272474
    >>> import torch
    >>> build("cnn", norm="gn", shape=(1, 8, 8))(torch.zeros(5, 1, 8, 8)).shape
    torch.Size([5, 10])
    >>> build("resnet21")
    Traceback (most recent call last):
        ...
    quasiglobal.errors.InputError: resnet21: the depth must be 6k + 2, such as resnet20
    """
    model = _model(name)
    norm = model.norms[0] if norm is None else norm
    if norm not in NORMS:
        raise unknown("norm", norm, NORMS)
    if norm not in model.norms:
        raise InputError(f"{name} has no norm {norm!r}; use {', '.join(model.norms)}")
    if not 0 < width < math.inf:
        raise InputError(f"width must be a positive number, got {width}; the paper's are 0.5, 1 and 2")
    if classes < 1:
        raise InputError(f"classes must be at least 1, the number of outputs, got {classes}")
    _check_shape(name, model.side, shape)
    return model.make(norm, width, classes, tuple(shape))


def _model(name: str) -> Model:
    if name in MODELS:
        return MODELS[name]
    if not (digits := re.fullmatch("resnet([0-9]+)", name)):
        raise unknown("model", name, MODELS)
    depth = int(digits[1])
    if depth < 8 or depth % 6 != 2:
        near = 6 * max(1, round((depth - 2) / 6)) + 2
        raise InputError(f"{name}: the depth must be 6k + 2, such as resnet{near}")
    return Model(partial(cifar_resnet, depth), RESIDUAL)


def _check_shape(name: str, side: int | None, shape: tuple[int, ...]) -> None:
    given = " x ".join(map(str, shape)) or "nothing"
    if not shape or not all(isinstance(size, int) and size > 0 for size in shape):
        raise InputError(f"shape must be positive whole numbers, such as (3, 32, 32), got {given}")
    if side is not None and len(shape) != 3:
        raise InputError(f"{name} needs images of shape (channels, height, width), got {given}; use mlp")
    if side is not None and min(shape[1:]) < side:
        raise InputError(f"{name} needs images of {side} x {side} or more, got {given}; enlarge them")
