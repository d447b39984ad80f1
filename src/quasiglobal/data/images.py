"""Images as uint8 on the device, and as model input: cropped, mirrored, normalised."""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib.util import find_spec

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Inputs, side_shown

PAD = 4
"""Black border in pixels around an image before a random crop (flip-crop)."""

AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Random crop box: range of its share of the area, range of width / height, and number of draws (resize-crop)."""


class Images(Inputs):
    """uint8 images [m, C, H, W] on the device, augmented if `moving` (for training).

    flip-crop mirrors an image with probability 1/2, adds a black border and crops it to its old size at a random
    place. resize-crop scales a random box to 7/8 of the image's side, and mirrors it with probability 1/2; without
    `moving` it is a center crop of that size. Inputs that are not images are features, and are never augmented.
    """

    x: Tensor

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
        self.x = self.framed(x).to(device, dtype if x.is_floating_point() else None)
        channels = (-1,) + (1,) * (len(self.stored) - 1)
        self.mean = torch.tensor(mean, dtype=dtype, device=device).view(channels) * scale
        self.std = torch.tensor(std, dtype=dtype, device=device).view(channels) * scale
        whole = x.ndim == 4 and not (self.augmentation == "resize-crop" and self.moving)
        self.by_kernel = self.x.is_cuda and whole and dtype == torch.float32 and find_spec("triton") is not None
        """Whether one kernel shows a batch."""

    def framed(self, x: Tensor) -> Tensor:
        """Stored images with the border from which they are cropped, or without the border that is never shown."""
        if self.augmentation == "resize-crop" and not self.moving:
            height, width = (side_shown(side) for side in x.shape[-2:])
            top, left = (x.shape[-2] - height) // 2, (x.shape[-1] - width) // 2
            return x[..., top : top + height, left : left + width]
        if self.augmentation == "flip-crop" and self.moving:
            return torch.nn.functional.pad(x, (PAD, PAD, PAD, PAD))
        return x

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` images: whether each is mirrored, and its shift or box."""
        if not self.moving:
            return ()
        flip = rng.integers(2, size=count).astype(np.bool_)
        if self.augmentation == "flip-crop":
            return flip, rng.integers(2 * PAD + 1, size=(count, 2))
        return flip, random_boxes(rng, count, *self.stored[1:])

    def show(self, index: Tensor, flip: Tensor | None = None, place: Tensor | None = None) -> Tensor:
        """The images at these indices, [..., C, H, W], augmented as drawn, as model input."""
        if self.by_kernel:
            from quasiglobal.data.image_kernel import show

            size = self.x.shape[1:] if flip is None else self.stored
            return show(self.x, size, self.mean, self.std, index, flip, place)
        if flip is None or place is None:
            pixels = self.x[index]
        elif self.augmentation == "flip-crop":
            pixels = self._shifted(index, flip, place)
        else:
            pixels = self._boxed(index, flip, place)
        return (pixels - self.mean) / self.std

    def _shifted(self, index: Tensor, flip: Tensor, shift: Tensor) -> Tensor:
        """Mirror, then crop from the padded image, as in the paper's training."""
        _, height, width = self.stored
        along = torch.arange(width, device=index.device) + shift[..., 1:]
        columns = torch.where(flip[..., None], width + 2 * PAD - 1 - along, along)
        rows = torch.arange(height, device=index.device) + shift[..., :1]
        return self._pixels(index, rows, columns)

    def _boxed(self, index: Tensor, flip: Tensor, box: Tensor) -> Tensor:
        """Scale a box (top, left, height, width) bilinearly to the input size, then mirror it."""
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
        """Pixels [..., C, rows, columns] of the images at these indices."""
        channels = torch.arange(self.stored[0], device=index.device)[:, None, None]
        return self.x[
            index[..., None, None, None], channels, rows[..., None, :, None], columns[..., None, None, :]
        ]


def random_boxes(rng: np.random.Generator, count: int, height: int, width: int) -> NDArray[np.int64]:
    """[count, 4] boxes (top, left, height, width): the first of TRIES draws that fits, otherwise the whole image."""
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
    """For each of `size` points along [start, start + length): the two adjacent pixels and the weight of the second."""
    steps = torch.arange(size, dtype=dtype, device=start.device) + 0.5
    at = (steps * (length / size).to(dtype)[..., None] - 0.5).clamp(min=0)
    at = torch.minimum(at, (length - 1).to(dtype)[..., None])
    low = at.floor()
    first = start[..., None] + low.long()
    second = torch.minimum(first + 1, (start + length - 1)[..., None])
    return first, second, at - low
