"""Images as they lie on the device, uint8, and as a model sees them: moved, mirrored, normalised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quasiglobal.tasks.batches import PAD


class Images:
    """uint8 images [m, C, H, W] that stay on the device, padded with black for random crops.

    Anything that is not uint8 images is taken as features: never moved or mirrored.
    """

    def __init__(
        self,
        x: Tensor,
        *,
        scale: float,
        mean: Sequence[float],
        std: Sequence[float],
        augment: bool,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.size = tuple(x.shape[1:])
        self.augment = augment and x.ndim == 4
        padded = torch.nn.functional.pad(x, (PAD, PAD, PAD, PAD)) if self.augment else x
        self.x = padded.to(device)
        channels = (-1,) + (1,) * (len(self.size) - 1)
        self.mean = torch.tensor(mean, dtype=dtype, device=device).view(channels) * scale
        self.std = torch.tensor(std, dtype=dtype, device=device).view(channels) * scale

    def show(self, index: Tensor, flip: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        """The images at these positions, [..., C, H, W], as the model takes them.

        With flips and shifts: mirrored first, then cut out of the padded image, as the paper's training does.
        """
        pixels = self.x[index] if flip is None or shift is None else self._moved(index, flip, shift)
        return (pixels - self.mean) / self.std

    def _moved(self, index: Tensor, flip: Tensor, shift: Tensor) -> Tensor:
        channels, height, width = self.size
        along = torch.arange(width, device=index.device) + shift[..., 1:]
        columns = torch.where(flip[..., None], width + 2 * PAD - 1 - along, along)
        rows = torch.arange(height, device=index.device) + shift[..., :1]
        each = torch.arange(channels, device=index.device)
        return self.x[
            index[..., None, None, None], each[:, None, None], rows[..., None, :, None], columns[..., None, None, :]
        ]
