"""Data that stay on disk: batches are read one step ahead and copied to the device, where images are augmented."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quasiglobal.data.dataset import Dataset, Examples, Indices
from quasiglobal.data.images import Images
from quasiglobal.data.records import ExampleShards, Unpacked
from quasiglobal.data.shards import Shards


class Streamed:
    """The counterpart of `Images` and `Arrays` for data in shards; the results are equal, bit for bit on a CPU.

    In training, `begin` names the batches of an epoch, `place` copies the batch of a step to a fixed place on the
    device, and `show_placed` shows it there, also in a captured step. Batches alternate between two slots: while one is
    copied to the device, beside the computation there, a thread reads the next one into the other. The thread calls
    nothing of CUDA, since a step may be captured at the same time.
    """

    cost = Images.cost

    def __init__(self, shards: Shards, shown: Images | Unpacked, device: torch.device) -> None:
        """`shown` has no examples: it defines how a batch is shown."""
        self.shards, self.shown, self.device = shards, shown, device
        self.x, self.moving = shards.x, shown.moving
        self._index, self._sizes = torch.zeros(0, 0, 0, dtype=torch.int64), [0]
        self._places: dict[int, Images | Unpacked] = {}
        self._slots: dict[tuple[int, int], Slot] = {}
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[None]] | None = None
        self._copies: Any = torch.cuda.Stream(device) if device.type == "cuda" else None    # type: ignore[no-untyped-call]

    @classmethod
    def of(
        cls, data: Dataset, examples: Examples, *, device: torch.device, dtype: torch.dtype, moving: bool
    ) -> Streamed:
        """The examples as model input for this data set."""
        shards = examples.shards
        assert shards is not None
        if isinstance(shards, ExampleShards):
            return cls(shards, Unpacked(shards.form, dtype), device)
        none = Examples(examples.x[:0], examples.y)
        return cls(shards, Images.of(data, none, device=device, dtype=dtype, moving=moving), device)

    @property
    def order(self) -> Indices:
        """Order of evaluation."""
        return np.arange(self.shards.shape[0])

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` examples."""
        return self.shown.draw(rng, count)

    def need(self, index: Indices) -> tuple[int, ...]:
        """Shape of a batch besides the batch size: ()."""
        return ()

    def show(self, index: Tensor, *moves: Tensor) -> Any:
        """The examples at these indices, read now."""
        x = self.shards.read(index.flatten().cpu()).to(self.device)
        local = torch.arange(index.numel(), device=self.device).view(index.shape)
        return self.shown.view(self.shown.framed(x)).show(local, *moves)

    # ---------------------------------------------------------------------------------------------- training

    def begin(self, index: Tensor, sizes: list[int]) -> None:
        """Begin an epoch with the batches index [steps, k, batch], on the host; a step has `sizes[step]` examples."""
        if self._ahead is not None:
            self._ahead[1].result()                         # a step of an earlier epoch that was left out
        if index.shape[1] != self._index.shape[1]:
            self._places, self._slots = {}, {}
        self._index, self._sizes, self._ahead = index, sizes, None

    def place(self, step: int) -> None:
        """Copy the batch of a step of the epoch to its place on the device, and begin to read the next one."""
        if self._ahead is not None:
            self._ahead[1].result()
        if self._ahead is None or self._ahead[0] != step:
            self._read(step, self._slot(step))
        batch, size = self._copied(self._slot(step)), self._sizes[step]
        if size in self._places:
            self._places[size].x.copy_(batch)
        else:
            self._places[size] = self.shown.view(batch.clone())
        self._ahead = None
        if step + 1 < len(self._sizes):
            self._ahead = step + 1, self._reader.submit(self._read, step + 1, self._slot(step + 1))

    def show_placed(self, size: int, *moves: Tensor) -> Any:
        """The inputs of the current step, [k, size, …], augmented as drawn."""
        return self._places[size].show(self._all(size), *moves)

    def placed_targets(self, size: int) -> Any:
        """The targets of the current step, [k, size, …]; None if they are not in the shards."""
        placed = self._places[size]
        return placed.targets(self._all(size)) if isinstance(placed, Unpacked) else None

    def _all(self, size: int) -> Tensor:
        return torch.arange(len(self._places[size].x), device=self.device).view(-1, size)

    def _slot(self, step: int) -> Slot:
        """The slot of a step, after its earlier batch has left the host."""
        key = step % 2, self._sizes[step]
        if key not in self._slots:
            shape = (self._index.shape[1] * self._sizes[step], *self.shards.shape[1:])
            self._slots[key] = Slot.make(shape, self.device)
        slot = self._slots[key]
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot

    def _read(self, step: int, slot: Slot) -> None:
        rows = self._index[step, :, : self._sizes[step]].reshape(-1)
        self.shards.read(rows, out=slot.host)

    def _copied(self, slot: Slot) -> Tensor:
        """The slot's batch on the device, framed; the copy runs beside the computation of earlier steps."""
        if self._copies is None:
            return self.shown.framed(slot.host)
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(slot.used)
            slot.device.copy_(slot.host, non_blocking=True)
            slot.copied.record(self._copies)
        current.wait_event(slot.copied)
        framed = self.shown.framed(slot.device).clone()
        slot.used.record(current)
        return framed


@dataclass(frozen=True)
class Slot:
    """A batch on the host, in pinned memory, and on the device."""

    host: Tensor
    device: Tensor
    copied: Any = None
    """CUDA event: the batch is on the device; None on a CPU."""
    used: Any = None
    """CUDA event: the batch on the device was read."""

    @classmethod
    def make(cls, shape: tuple[int, ...], device: torch.device) -> Slot:
        """An empty slot."""
        if device.type != "cuda":
            host = torch.empty(shape, dtype=torch.uint8)
            return cls(host, host)
        host = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        copied, used = (torch.cuda.Event() for _ in range(2))       # type: ignore[no-untyped-call]
        return cls(host, torch.empty(shape, dtype=torch.uint8, device=device), copied, used)
