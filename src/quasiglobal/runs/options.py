"""Where and how to run: nothing here changes the result."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from quasiglobal.errors import InputError


@dataclass(frozen=True)
class Options:
    """Where and how to run."""

    seeds: int = 1
    """Number of seeds, from the experiment's own on; they are rows of one program."""
    runs: Path = Path("runs")
    """The folder of all runs."""
    data_dir: Path | None = None
    """The folder of the data sets; by default $QG_DATA or ./data."""
    device: str = "auto"
    """auto, cpu or cuda."""
    checkpoint_seconds: float = 60.0
    """Save at the end of an epoch when the last checkpoint is this old; 0: after every epoch."""
    tensorboard: bool = False
    """Write the metrics for TensorBoard too, into each run's folder."""
    engine: Literal["simulator", "distributed"] = "simulator"
    """All nodes in this process, or spread over processes: those that torchrun started, or `--processes`."""
    processes: int | None = None
    """With --engine distributed and without torchrun: number of processes to start here."""
    peer_timeout: float = 60.0
    """Seconds after which a process goes on without a neighbour that does not answer."""
    host: str = "127.0.0.1"
    """The address at which other processes reach this machine."""
    log: Literal["plain", "json"] = "plain"
    """Log lines: sentences, or a JSON object a line."""
    recompute: bool = False
    """For hf: models: keep only the layers' inputs and recompute the rest for the gradient. Less memory, slower."""
    on: Literal["here", "ray"] = "here"
    """This machine, or the Ray cluster it belongs to, one GPU or CPU a cell; --runs is then a folder all share."""

    def __post_init__(self) -> None:
        if self.seeds < 1:
            raise InputError(f"seeds must be >= 1, got {self.seeds}")
        if not self.checkpoint_seconds >= 0:
            raise InputError(f"checkpoint_seconds must be >= 0, got {self.checkpoint_seconds}")
        if self.on == "ray" and self.engine == "distributed":
            raise InputError("--on ray runs whole experiments; use it without --engine distributed")


def choose_device(name: str) -> torch.device:
    """auto, cpu or cuda, where there is one; processes of one machine use its GPUs in turn."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError("there is no CUDA device here; use --device cpu")
    if name == "cpu" or not there:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda")
