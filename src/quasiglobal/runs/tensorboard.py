"""TensorBoard output: `qg train --tensorboard`, then `tensorboard --logdir runs`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quasiglobal.errors import InputError


class EventFiles:
    """Writes each run's records into its subfolder `tensorboard`: a scalar per metric, and NAME_nodes/i per node i."""

    def __init__(self) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter  # optional dependency
        except ImportError:
            raise InputError("TensorBoard is not installed: pip install 'quasiglobal[tensorboard]'") from None
        self._make: Callable[..., Any] = SummaryWriter
        self._writers: dict[Path, Any] = {}

    def write(self, folder: Path, record: Mapping[str, Any]) -> None:
        """Add an epoch's record; the epochs of a resumed run replace earlier entries."""
        epoch = record["epoch"]
        if folder not in self._writers:
            self._writers[folder] = self._make(str(folder / "tensorboard"), purge_step=epoch)
        for name, value in record.items():
            if name.endswith("_nodes"):
                for node, own in enumerate(value):
                    if own is not None:
                        self._writers[folder].add_scalar(f"{name}/{node}", own, epoch)
            elif name not in ("epoch", "step") and value is not None and not isinstance(value, list):
                self._writers[folder].add_scalar(name, value, epoch)
        self._writers[folder].flush()

    def close(self) -> None:
        """Close the files."""
        for writer in self._writers.values():
            writer.close()
