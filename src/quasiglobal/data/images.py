"""Images as they lie on the device, uint8, and as a model sees them: cut out, mirrored, normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples, side_shown
from quasiglobal.data.partition import Indices

PAD = 4
"""Pixels of black around an image that random crops are taken from (flip-crop)."""

AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Of a random box: its share of the picture, its width over its height, and how often one is drawn (resize-crop)."""


class Images:
    """uint8 images [m, C, H, W] that stay on the device, and how training moves them, if it does.

    flip-crop mirrors an image and cuts it out of itself with a black border; resize-crop takes a random box, scales
    it to 7/8 of the side, and mirrors it; unmoved, it shows the middle of that size.
    Anything that is not images is taken as features: never moved or mirrored.
    """

    cost = 1
    """In the memory of a test, in images."""

    def __init__(
        self,
        x: Tensor,
        *,
        scale: float,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        augmentation: str = "none",
        moving: bool = False,
    ) -> None:
        self.augmentation = augmentation if x.ndim == 4 else "none"
        self.moving = moving and self.augmentation != "none"
        self.stored = tuple(x.shape[1:])
        if self.augmentation == "resize-crop" and not self.moving:
            x = _middle(x)
        if self.augmentation == "flip-crop" and self.moving:
            x = torch.nn.functional.pad(x, (PAD, PAD, PAD, PAD))
        self.x = x.to(device)
        channels = (-1,) + (1,) * (len(self.stored) - 1)
        self.mean = torch.tensor(mean, dtype=dtype, device=device).view(channels) * scale
        self.std = torch.tensor(std, dtype=dtype, device=device).view(channels) * scale

    @classmethod
    def of(cls, data: Dataset, examples: Examples, **how: Any) -> Images:
        """The examples as models for this data set take them."""
        return cls(
            examples.x, scale=data.scale, mean=data.mean, std=data.std, augmentation=data.augmentation, **how
        )

    @property
    def order(self) -> Indices:
        """In which they are tested."""
        return np.arange(len(self.x))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """How `count` images move: whether each is mirrored, and its place, a shift or a box."""
        if not self.moving:
            return ()
        flip = rng.integers(2, size=count).astype(np.bool_)
        if self.augmentation == "flip-crop":
            return flip, rng.integers(2 * PAD + 1, size=(count, 2))
        return flip, random_boxes(rng, count, *self.stored[1:])

    def need(self, index: Indices) -> tuple[int, ...]:
        """What these images need besides their number: nothing, as all have one size."""
        return ()

    def show(self, index: Tensor, flip: Tensor | None = None, place: Tensor | None = None) -> Tensor:
        """The images at these positions, [..., C, H, W], as the model takes them, moved as drawn."""
        if flip is None or place is None:
            pixels = self.x[index]
        elif self.augmentation == "flip-crop":
            pixels = self._shifted(index, flip, place)
        else:
            pixels = self._boxed(index, flip, place)
        return (pixels - self.mean) / self.std

    def _shifted(self, index: Tensor, flip: Tensor, shift: Tensor) -> Tensor:
        """Mirrored first, then cut out of the padded image, as the paper's training does."""
        _, height, width = self.stored
        along = torch.arange(width, device=index.device) + shift[..., 1:]
        columns = torch.where(flip[..., None], width + 2 * PAD - 1 - along, along)
        rows = torch.arange(height, device=index.device) + shift[..., :1]
        return self._pixels(index, rows, columns)

    def _boxed(self, index: Tensor, flip: Tensor, box: Tensor) -> Tensor:
        """A box (top, left, height, width) scaled bilinearly to the size shown, then mirrored."""
        _, height, width = self.stored
        top, left, tall, wide = box.unbind(dim=-1)
        above, below, down = _between(top, tall, side_shown(height), self.mean.dtype)
        before, behind, right = (
            torch.where(flip[..., None], values.flip(-1), values)
            for values in _between(left, wide, side_shown(width), self.mean.dtype)
        )

        def line(rows: Tensor) -> Tensor:
            first, second = (self._pixels(index, rows, columns).to(right.dtype) for columns in (before, behind))
            return torch.lerp(first, second, right[..., None, None, :])

        return torch.lerp(line(above), line(below), down[..., None, :, None])

    def _pixels(self, index: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """[..., C, rows, columns] of the images at these positions."""
        channels = torch.arange(self.stored[0], device=index.device)[:, None, None]
        return self.x[
            index[..., None, None, None], channels, rows[..., None, :, None], columns[..., None, None, :]
        ]


def random_boxes(rng: np.random.Generator, count: int, height: int, width: int) -> NDArray[np.int64]:
    """[count, 4] boxes (top, left, height, width): the first that fits of some, otherwise the whole picture."""
    area = height * width * rng.uniform(*AREA, size=(count, TRIES))
    low, high = (math.log(end) for end in RATIO)
    ratio = np.exp(rng.uniform(low, high, size=(count, TRIES)))
    tall, wide = np.rint(np.sqrt(area / ratio)), np.rint(np.sqrt(area * ratio))
    fits = (tall > 0) & (tall <= height) & (wide > 0) & (wide <= width)
    first = np.arange(count), fits.argmax(axis=1)
    found = fits.any(axis=1)
    tall, wide = np.where(found, tall[first], height), np.where(found, wide[first], width)
    top, left = (np.floor(rng.uniform(size=count) * (room + 1)) for room in (height - tall, width - wide))
    return np.stack([top, left, tall, wide], axis=1).astype(np.int64)


def _between(start: Tensor, length: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """For each of `size` points along [start, start + length): the pixels on its sides, and how far it is between."""
    steps = torch.arange(size, dtype=dtype, device=start.device) + 0.5
    at = (steps * (length / size).to(dtype)[..., None] - 0.5).clamp(min=0)
    at = torch.minimum(at, (length - 1).to(dtype)[..., None])
    low = at.floor()
    first = start[..., None] + low.long()
    second = torch.minimum(first + 1, (start + length - 1)[..., None])
    return first, second, at - low


def _middle(x: Tensor) -> Tensor:
    """The middle 7/8 of pictures, as large as the boxes of training are shown."""
    height, width = (side_shown(side) for side in x.shape[-2:])
    top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
    return x[..., top : top + height, left : left + width]
