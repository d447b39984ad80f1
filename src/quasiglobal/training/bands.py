"""The rows of a program by how they step: one band for each algorithm on each topology."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from quasiglobal.algorithms import algorithm
from quasiglobal.engines.band import Band
from quasiglobal.engines.costs import traffic
from quasiglobal.engines.host import Host
from quasiglobal.engines.simulator import NO_MEAN, Simulator, warn_of_w
from quasiglobal.errors import InputError
from quasiglobal.topology import parse
from quasiglobal.training.experiment import Experiment, steps_alike

EngineFactory = Callable[..., Host]
"""(topology, seeds=, shared=, rounded=, and drop= or churn= where they are not 0) → an engine."""


class Bands:
    """The bands of all experiments, one after the other."""

    def __init__(self, experiments: Sequence[Experiment], shared: int, engine: EngineFactory = Simulator) -> None:
        """`shared` columns of a row are communicated."""
        self.bands: list[Band] = []
        for _, alike in groupby(experiments, key=steps_alike):
            group = list(alike)
            first = self.bands[-1].rows.stop if self.bands else 0
            self.bands.append(_band(group, shared, engine, first))
        self.engine = self.bands[0].engine
        self.rows = self.bands[-1].rows.stop
        self.bytes_per_step = [
            traffic(band.algorithm).bytes(band.engine.topology, shared, band.engine.rounded)
            for band in self.bands
            for _ in band.engine.seeds
        ]

    def begin_at(self, x: Tensor) -> None:
        """Start the algorithms at these models."""
        for band in self.bands:
            band.begin_at(x[band.rows])

    def kind(self, t: int) -> tuple[Hashable, ...]:
        """Equal for steps that do the same to the same tensors."""
        return tuple(band.kind(t) for band in self.bands)

    def step(
        self, x: Tensor, g: Tensor, t: int, time: Tensor, lr: Tensor,
        full_gradient: Callable[[slice, Tensor], Tensor], in_place: bool, fused: bool,
    ) -> Tensor:
        """Step t of every algorithm on its own rows; `in_place` writes into x and the states, and may be `fused`."""
        stepped = []
        for band in self.bands:
            rows = band.rows
            own = lr if lr.ndim == 0 else lr[rows]
            how = (t, time, own, partial(full_gradient, rows))
            if in_place:
                band.overwrite(x[rows], g[rows], *how, fused=fused)
            else:
                stepped.append(band.step(x[rows], g[rows], *how))
        if in_place:
            return x
        return stepped[0] if len(stepped) == 1 else torch.cat(stepped)

    def tensors(self) -> list[Tensor]:
        """The algorithms' states."""
        return [value for band in self.bands for value in band.state.values()]

    def state_of(self, run: int) -> dict[str, Tensor]:
        """The rows of an experiment's algorithm's state."""
        nodes = len(self.engine.nodes)
        band = next(band for band in self.bands if run * nodes < band.rows.stop)
        first = run * nodes - band.rows.start
        return {name: value[first : first + nodes] for name, value in band.state.items()}

    def restore(self, saved: Sequence[dict[str, Tensor]], device: torch.device) -> None:
        """Take over the states of every experiment, as `state_of` gave them."""
        first = 0
        for band in self.bands:
            own = saved[first : (first := first + len(band.engine.seeds))]
            band.state = {name: torch.cat([run[name] for run in own]).to(device) for name in band.state}


def _band(group: Sequence[Experiment], shared: int, engine: EngineFactory, first: int) -> Band:
    """The band of experiments that step alike, its first row at `first`."""
    experiment = group[0]
    chosen, graph = algorithm(experiment.algorithm), parse(experiment.topology)
    warn_of_w(chosen, graph)
    faults = {what: p for what in ("drop", "churn") if (p := getattr(experiment, what))}
    if faults and traffic(chosen).everybody:                # refused before the run, not at its first mean
        raise InputError(NO_MEAN)
    rounded = experiment.wire == "bf16"
    if rounded and chosen.needs_full_precision:
        raise InputError(
            f"{experiment.algorithm} takes its momentum from the difference of two mixed models over the learning "
            "rate, where 16 bits leave nothing but noise; use --wire full"
        )
    host = engine(graph, seeds=tuple(one.seed for one in group), shared=shared, rounded=rounded, **faults)
    return Band(chosen, host, first, experiment.weight_decay)
