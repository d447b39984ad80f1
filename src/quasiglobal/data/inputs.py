"""A data set's examples as model input: images, texts or any tensors; in memory, or on disk and read one step ahead."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from quasiglobal.common.trees import Tree, on_device
from quasiglobal.data.dataset import Dataset, Examples, Indices, side_shown
from quasiglobal.data.shards import ExampleShards, Form, Shards

PAD = 4
"""Black border in pixels around an image before a random crop (flip-crop)."""

AREA, RATIO, TRIES = (0.08, 1.0), (3 / 4, 4 / 3), 10
"""Random crop box: range of its share of the area, range of width / height, and number of draws (resize-crop)."""

BUCKET = 16
"""Batch lengths are multiples of this number of tokens: few shapes, so few programs are compiled and captured."""


def inputs_of(
    data: Dataset, examples: Examples, *, device: torch.device, dtype: torch.dtype = torch.float32, moving: bool = False
) -> Inputs:
    """The examples as model input for this data set; `moving` augments images for training."""
    shards = examples.shards
    if data.pad is not None:
        return Texts(examples.x, pad=data.pad, device=device)
    if isinstance(shards, ExampleShards):
        return Streamed(shards, Unpacked(shards.form, dtype), device)
    if shards is None and not data.mean:                    # not normalised
        return Arrays(examples.x, device, dtype)
    images = Images(
        examples.x if shards is None else shards.x[:0], scale=data.scale, mean=data.mean, std=data.std,
        augmentation=data.augmentation, device=device, dtype=dtype, moving=moving,
    )
    return images if shards is None else Streamed(shards, images, device)


class Inputs:
    """A data set's examples on the device, as model input: the base of images, texts and a user's own tensors."""

    x: Tree
    """The stored examples, a tensor or several."""
    cost = 1
    """Memory per example in evaluation, in units of one image."""
    moving = False
    """Whether examples are augmented by `draw`."""
    show: Callable[..., Tree]
    """(index, …) → the examples at these indices as model input, augmented as drawn, or truncated to a length."""

    @property
    def order(self) -> Indices:
        """Order of evaluation."""
        return np.arange(len(tree_leaves(self.x)[0]))

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` examples."""
        return ()

    def need(self, index: Indices) -> tuple[int, ...]:
        """Shape of a batch besides the batch size, such as the length in tokens; computed on the host."""
        return ()

    def framed(self, x: Tensor) -> Tensor:
        """Stored examples in the form in which `x` holds them: unchanged, or images with or without a border."""
        return x

    def view(self, x: Tensor) -> Self:
        """The same view of other examples, which are framed and on the device already."""
        other = copy.copy(self)
        other.x = x
        return other


class Arrays(Inputs):
    """A tensor, tuple or dict of tensors with m rows, passed to the model as they are.

    Floating-point numbers get the precision of the training; nothing else is changed.

    >>> Arrays({"a": torch.arange(6.0).view(3, 2)}).show(torch.tensor([[2, 0]]))
    {'a': tensor([[[4., 5.],
             [0., 1.]]])}
    """

    def __init__(self, x: Tree, device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> None:
        self.x = on_device(x, device, dtype)

    def show(self, index: Tensor) -> Tree:
        """The examples at these indices."""
        return tree_map(lambda values: values[index], self.x)


class Texts(Inputs):
    """Padded ids [m, length] on the device.

    >>> texts = Texts(torch.arange(1, 41).repeat(2, 1) * torch.tensor([[1] * 20 + [0] * 20, [1] * 40]), pad=0)
    >>> texts.need(np.array([[0]])), texts.need(np.array([[0, 1]]))
    ((32,), (40,))
    >>> texts.show(torch.tensor([[0]]), 32).shape, texts.show(torch.tensor([[0]])).shape
    (torch.Size([1, 1, 32]), torch.Size([1, 1, 40]))
    """

    x: Tensor
    cost = 16

    def __init__(self, x: Tensor, *, pad: int, device: torch.device | None = None) -> None:
        places = torch.arange(1, x.shape[1] + 1)
        self._lengths = ((x != pad) * places).amax(dim=1).numpy()      # up to the last id that is not padding
        self.x = x.to(device)

    @cached_property
    def order(self) -> Indices:
        """Order of evaluation: sorted by length, which reduces padding."""
        return np.argsort(self._lengths, kind="stable")

    def need(self, index: Indices) -> tuple[int, ...]:
        """Length in tokens of a batch of these texts; computed on the host, without a device synchronisation."""
        longest = int(self._lengths[index].max(initial=1))
        return (min(-(-longest // BUCKET) * BUCKET, self.x.shape[1]),)

    def show(self, index: Tensor, length: int | None = None) -> Tensor:
        """The ids of the texts at these indices, [..., length], int64; all columns if no length is given."""
        return self.x[:, :length][index].long()


class Images(Inputs):
    """uint8 images [m, C, H, W] on the device, augmented if `moving` (for training).

    flip-crop mirrors an image with probability 1/2, adds a black border and crops it to its old size at a random
    place. resize-crop scales a random box to 7/8 of the image's side, and mirrors it with probability 1/2; without
    `moving` it is a center crop of that size. Inputs that are not images are features, and are never augmented.
    """

    x: Tensor

    def __init__(
        self, x: Tensor, *, scale: float, mean: Sequence[float], std: Sequence[float], device: torch.device,
        dtype: torch.dtype = torch.float32, augmentation: str = "none", moving: bool = False,
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


# ------------------------------------------------------------------------------------------------------- in shards


class Unpacked(Inputs):
    """A batch of records on the device as model input and targets."""

    x: Tensor

    def __init__(self, form: Form, dtype: torch.dtype) -> None:
        """Make it without records; `view` adds them."""
        self.form, self.dtype = form, dtype
        self.x = torch.empty(0, form.size, dtype=torch.uint8)

    def show(self, index: Tensor) -> Tree:
        """The inputs at these indices."""
        return self._at(index, 0)

    def targets(self, index: Tensor) -> Tree:
        """The targets at these indices."""
        return self._at(index, 1)

    def _at(self, index: Tensor, which: int) -> Tree:
        found = self.form.unpack(self.x)[which]
        return on_device(tree_map(lambda values: values[index], found), self.x.device, self.dtype)


class Streamed(Inputs):
    """Data in shards as model input; the results are those of data in memory, bit for bit on a CPU.

    In training, `begin` names the batches of an epoch, `place` copies the batch of a step to a fixed place on the
    device, and `show_placed` shows it there, also in a captured step. Batches alternate between two slots: while one is
    copied to the device, during the computation there, a thread reads the next one into the other. The thread calls
    nothing of CUDA, since a step may be captured at the same time.
    """

    def __init__(self, shards: Shards, shown: Images | Unpacked, device: torch.device) -> None:
        """`shown` has no examples: it defines how a batch is shown."""
        self.shards, self.shown, self.device = shards, shown, device
        self.x, self.moving = shards.x, shown.moving
        self._index, self._sizes = torch.zeros(0, 0, 0, dtype=torch.int64), [0]
        self._places: dict[int, Images | Unpacked] = {}
        self._slots: dict[tuple[int, int], Slot] = {}
        self._reader = ThreadPoolExecutor(1)
        self._ahead: tuple[int, Future[None]] | None = None
        self._copies = torch.cuda.Stream(device) if device.type == "cuda" else None     # type: ignore[no-untyped-call]

    def draw(self, rng: np.random.Generator, count: int) -> tuple[NDArray[np.generic], ...]:
        """Draw the augmentation of `count` examples."""
        return self.shown.draw(rng, count)

    def show(self, index: Tensor, *moves: Tensor) -> Tree:
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

    def show_placed(self, size: int, *moves: Tensor) -> Tree:
        """The inputs of the current step, [k, size, …], augmented as drawn."""
        return self._places[size].show(self._all(size), *moves)

    def placed_targets(self, size: int) -> Tree | None:
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
            host = torch.empty(shape, dtype=torch.uint8, pin_memory=self._copies is not None)
            self._slots[key] = Slot(host, host)
            if self._copies is not None:
                copied, used = (torch.cuda.Event() for _ in range(2))       # type: ignore[no-untyped-call]
                there = torch.empty(shape, dtype=torch.uint8, device=self.device)
                self._slots[key] = Slot(host, there, copied, used)
        slot = self._slots[key]
        if slot.copied is not None:
            slot.copied.synchronize()
        return slot

    def _read(self, step: int, slot: Slot) -> None:
        rows = self._index[step, :, : self._sizes[step]].reshape(-1)
        self.shards.read(rows, out=slot.host)

    def _copied(self, slot: Slot) -> Tensor:
        """The slot's batch on the device, framed; the copy runs during the computation of earlier steps."""
        if self._copies is None or slot.copied is None or slot.used is None:       # on a CPU
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
    copied: torch.cuda.Event | None = None
    """The batch is on the device; None on a CPU."""
    used: torch.cuda.Event | None = None
    """The batch on the device was read; None on a CPU."""
