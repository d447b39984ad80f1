"""Worker processes that read examples ahead of the training, for data that are read anew in each epoch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader, Dataset

from quasiglobal.data.fresh import Fresh, Keyed
from quasiglobal.errors import InputError


class Workers:
    """Reads the batches of an epoch in several processes, a few steps ahead. Examples depend on their keys alone."""

    def __init__(self, fresh: Fresh, count: int) -> None:
        self._fresh, self._count = fresh, count
        self._plan, self._next = _Plan(), 0
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[list[Any]] = iter(())

    def begin(self, steps: list[list[Keyed]]) -> None:
        """Begin an epoch with the examples of each step."""
        if self._loader is None:
            self._loader = DataLoader(
                _Examples(self._fresh), batch_sampler=self._plan, num_workers=self._count, collate_fn=list,
                persistent_workers=True,
            )
        self._plan.steps, self._next = steps, 0
        self._batches = iter(self._loader)

    def end(self) -> None:
        """End the processes; the next epoch starts others. A loader that is collected as garbage waits 5 s for them."""
        self._loader, self._batches = None, iter(())

    def batch(self, step: int) -> list[Any]:
        """The examples of a step; steps are asked for in order, and may be left out."""
        while True:
            found = next(self._batches)
            self._next += 1
            if self._next > step:
                break
        for example in found:
            if isinstance(example, InputError):
                raise example
        return found


class _Examples(Dataset[Any]):
    """Reads one example in a worker; an error is returned, since a worker would wrap it in a stack trace."""

    def __init__(self, fresh: Fresh) -> None:
        self.fresh = fresh

    def __getitem__(self, keyed: Any) -> Any:
        try:
            return self.fresh.example(*keyed)
        except InputError as error:
            return error


class _Plan:
    """The examples of each step of the current epoch, for a loader whose workers live longer than an epoch."""

    def __init__(self) -> None:
        self.steps: list[list[Keyed]] = []

    def __iter__(self) -> Iterator[list[Keyed]]:
        return iter(self.steps)

    def __len__(self) -> int:
        return len(self.steps)
