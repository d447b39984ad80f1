"""Images that stay on disk: batches are read one step ahead and copied to the device, where they are augmented."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples, Indices
from quasiglobal.data.images import Images
from quasiglobal.data.shards import Shards


class StreamedImages:
    """The counterpart of `Images` for images in shards; the results are equal, bit for bit on a CPU.

    In training, `begin` names the batches of an epoch, `place` copies the batch of a step to a fixed place on the
    device, and `show_placed` shows it there, also in a captured step.
    """

    cost = Images.cost

    def __init__(self, shards: Shards, images: Images, device: torch.device) -> None:
        """`images` has no images: it defines how a batch is shown."""
        self.shards, self.images, self.device = shards, images, device
        self.x, self.moving = shards.x, images.moving
        self._index, self._sizes = torch.zeros(0, 0, 0, dtype=torch.int64), [0]
        self._places: dict[int, Images] = {}
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[Tensor]] | None = None
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None    # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, data: Dataset, examples: Examples, *, device: torch.device, **how: Any) -> StreamedImages:
        """The examples as model input for this data set."""
        assert examples.shards is not None
        return cls(examples.shards, Images.of(data, Examples(examples.x[:0], examples.y), device=device, **how), device)

    @property
    def order(self) -> Indices:
        """Order of evaluation."""
        return np.arange(self.shards.shape[0])

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` images."""
        return self.images.draw(rng, count)

    def need(self, index: Indices) -> tuple[int, ...]:
        """Shape of a batch besides the batch size: ()."""
        return ()

    def show(self, index: Tensor, *moves: Tensor) -> Tensor:
        """The images at these indices, read now."""
        x = self.shards.read(index.flatten().cpu()).to(self.device)
        local = torch.arange(index.numel(), device=self.device).view(index.shape)
        return self.images.view(self.images.framed(x)).show(local, *moves)

    # ---------------------------------------------------------------------------------------------- training

    def begin(self, index: Tensor, sizes: list[int]) -> None:
        """Begin an epoch with the batches index [steps, k, batch], on the host; a step has `sizes[step]` examples."""
        self._index, self._sizes, self._ahead = index, sizes, None

    def place(self, step: int) -> None:
        """Copy the batch of a step of the epoch to its place on the device, and begin to read the next one."""
        number, reading = self._ahead or (-1, None)
        batch = reading.result() if reading is not None and number == step else self._read(step)
        if step + 1 < len(self._sizes):
            self._ahead = step + 1, self._reader.submit(self._read, step + 1)
        x, size = self.images.framed(batch), self._sizes[step]
        if size in self._places:
            self._places[size].x.copy_(x)
        else:
            self._places[size] = self.images.view(x.clone())

    def show_placed(self, size: int, *moves: Tensor) -> Tensor:
        """The batch of the current step, [k, size, C, H, W], augmented as drawn."""
        placed = self._places[size]
        local = torch.arange(len(placed.x), device=self.device).view(-1, size)
        return placed.show(local, *moves)

    def _read(self, step: int) -> Tensor:
        """Read the batch of a step, and copy it to the device while the previous step is computed there."""
        rows = self._index[step, :, : self._sizes[step]].reshape(-1)
        if self._copies is None:
            return self.shards.read(rows)
        pinned = torch.empty((len(rows), *self.shards.shape[1:]), dtype=torch.uint8, pin_memory=True)
        self.shards.read(rows, out=pinned)
        with torch.cuda.stream(self._copies):
            batch = pinned.to(self.device, non_blocking=True)
        self._copies.synchronize()                          # this thread waits, not the one that trains
        return batch
