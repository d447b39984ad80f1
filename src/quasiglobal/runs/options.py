"""Execution options: none of them changes the result."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, get_type_hints

import torch

from quasiglobal.errors import InputError
from quasiglobal.training.experiment import typed

MOST_SEEDS = 10_000
"""Maximum number of seeds of one experiment."""


@dataclass(frozen=True)
class Options:
    """Execution options. The string under a field is its `--help` text."""

    seeds: int = 1
    """Number of seeds, counting up from `seed`; trained as rows of one program."""
    runs: Path = Path("runs")
    """Folder for all runs."""
    data_dir: Path | None = None
    """Folder of the data sets; by default $QG_DATA or ./data."""
    stream: bool = False
    """Read examples from disk during the training, not from memory; for imagenet, folder:PATH and your Datasets."""
    memory_limit: float | None = None
    """Memory for the data in GB; larger data are streamed. By default 64, or less if less is free."""
    workers: int = 0
    """Processes that read your own data with cache=False ahead of the training; 0: the training process reads them."""
    device: str = "auto"
    """Device: auto, cpu or cuda."""
    checkpoint_seconds: float = 60.0
    """Maximum age of a checkpoint in seconds, unless an epoch or 20 times its saving takes longer; 0: every epoch."""
    keep_best: bool = False
    """Also keep each node's best model by its score, in best/ of the run folder."""
    tensorboard: bool = False
    """Also write the metrics for TensorBoard, into each run folder."""
    engine: Literal["simulator", "distributed"] = "simulator"
    """simulator: all nodes in this process; distributed: processes started by torchrun or `--processes`."""
    processes: int | None = None
    """Number of local processes to start, for --engine distributed without torchrun."""
    peer_timeout: float = 60.0
    """Seconds after which training continues without a neighbour that does not answer."""
    trust: float | None = None
    """Clip models this many times as far away as other neighbours', for one node per process; by default none."""
    host: str = "127.0.0.1"
    """Address at which other processes reach this machine."""
    log: Literal["plain", "json"] = "plain"
    """Log format: plain text, or one JSON object per line."""
    recompute: bool = False
    """Activation checkpointing for hf: models: store only layer inputs. Less memory, slower."""
    utilisation: Path | None = None
    """File to which each program appends the time that the device trained, and its number of rows."""
    on: Literal["here", "ray"] = "here"
    """here: this machine; ray: its Ray cluster, a GPU per experiment or a CPU per run; share the folder --runs."""

    def __post_init__(self) -> None:
        for name, least in {"seeds": 1, "processes": 1, "workers": 0, "checkpoint_seconds": 0}.items():
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InputError(f"{name} must be >= {least}, got {value}")
        if self.seeds > MOST_SEEDS:
            raise InputError(f"seeds must be at most {MOST_SEEDS:,}, got {self.seeds:,}")
        if not self.peer_timeout > 0:
            raise InputError(f"peer_timeout must be > 0 seconds, got {self.peer_timeout}")
        if self.trust is not None and not self.trust >= 1:
            raise InputError(f"trust must be >= 1, got {self.trust}; leave it out to clip nothing")
        if self.trust is not None and math.isfinite(self.trust) and self.engine == "simulator":
            raise InputError("trust is about neighbours in other processes; use it with --engine distributed")
        if self.memory_limit is not None and not self.memory_limit > 0:
            raise InputError(f"memory_limit must be > 0 GB, got {self.memory_limit}; --stream keeps nothing in memory")
        if self.on == "ray" and self.engine == "distributed":
            raise InputError("--on ray runs whole experiments; use it without --engine distributed")

    @property
    def of_program(self) -> ProgramOptions:
        """The options of `training.program.Program`."""
        return {"recomputing": self.recompute, "workers": self.workers}


TYPED = ("utilisation", "on")
"""Options that a file cannot have, since files come by e-mail: it would append to any file, or use other machines."""


class ProgramOptions(TypedDict):
    """Arguments of `training.program.Program`."""

    recomputing: bool
    workers: int


def split_options(values: Mapping[str, object], source: str) -> tuple[dict[str, object], Options]:
    """Take the options out of the settings in a file; return the other settings, and the options."""
    hints = get_type_hints(Options)
    if refused := [name for name in TYPED if name in values]:
        raise InputError(f"{refused[0]} cannot be in {source}; give it on the command line, as --{refused[0]}")
    found = {name: typed(hints[name], value, f"{name} in {source}") for name, value in values.items() if name in hints}
    return {name: value for name, value in values.items() if name not in hints}, Options(**found)


def choose_device(name: str) -> torch.device:
    """The device for auto, cpu or cuda; processes on one machine are assigned to its GPUs round-robin."""
    if name not in ("auto", "cpu", "cuda"):
        raise InputError(f"device must be auto, cpu or cuda, got {name!r}")
    there = torch.cuda.is_available()
    if name == "cuda" and not there:
        raise InputError("no CUDA device found; use the device cpu")
    if name == "cpu" or not there:
        return torch.device("cpu")
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
    return torch.device("cuda")
