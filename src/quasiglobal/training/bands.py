"""Rows of a program grouped into bands: one band for each algorithm, topology and number of completed epochs."""

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
"""(topology, seeds=, shared=, rounded=, and drop= or churn= if not 0) → an engine."""


class Bands:
    """The bands of all experiments, in row order."""

    def __init__(
        self, experiments: Sequence[Experiment], epochs: Sequence[int], shared: int, engine: EngineFactory = Simulator
    ) -> None:
        """`epochs` are those that each experiment has completed; `shared` leading columns of a row are communicated."""
        self.bands: list[Band] = []
        self.firsts: list[int] = []
        """The first experiment of each band."""
        alike = [(steps_alike(one), done) for one, done in zip(experiments, epochs, strict=True)]
        for _, places in groupby(range(len(experiments)), key=alike.__getitem__):
            group = list(places)
            first = self.bands[-1].rows.stop if self.bands else 0
            self.firsts.append(group[0])
            self.bands.append(_band([experiments[place] for place in group], shared, engine, first))
        self.engine = self.bands[0].engine
        self.rows = self.bands[-1].rows.stop
        self.bytes_per_step = [
            traffic(band.algorithm).bytes(band.engine.topology, shared, band.engine.rounded)
            for band in self.bands
            for _ in band.engine.seeds
        ]

    def begin_at(self, x: Tensor) -> None:
        """Initialise the algorithms at the models x."""
        for band in self.bands:
            band.begin_at(x[band.rows])

    def take_kernels(self, earlier: Bands) -> None:
        """Use the kernels of earlier bands with the same algorithm and topology."""
        for band in self.bands:
            for other in earlier.bands:
                band.take_kernels(other)

    def kind(self, t: Sequence[int]) -> tuple[Hashable, ...]:
        """Key that is equal for steps with the same operations on the same tensors; `t` is each experiment's step."""
        return tuple(band.kind(t[first]) for band, first in zip(self.bands, self.firsts, strict=True))

    def step(
        self, x: Tensor, g: Tensor, t: Sequence[int], time: Sequence[Tensor], lr: Tensor,
        full_gradient: Callable[[slice, Tensor], Tensor], in_place: bool, fused: bool,
    ) -> Tensor:
        """Run one step of every algorithm on its own rows, step `t[r]` of experiment r; return the new x.

        `in_place` overwrites x and the states; `fused` then compiles a step that has no kernel of its own.
        """
        stepped = []
        for band, first in zip(self.bands, self.firsts, strict=True):
            rows = band.rows
            own = lr if lr.ndim == 0 else lr[rows]
            how = (t[first], time[first], own, partial(full_gradient, rows))
            if in_place:
                band.step_in_place(x[rows], g[rows], *how, fused=fused)
            else:
                stepped.append(band.step(x[rows], g[rows], *how))
        if in_place:
            return x
        return stepped[0] if len(stepped) == 1 else torch.cat(stepped)

    def tensors(self) -> list[Tensor]:
        """The algorithms' states."""
        return [value for band in self.bands for value in band.state.values()]

    def state_of(self, run: int) -> dict[str, Tensor]:
        """The algorithm state of one experiment."""
        nodes = len(self.engine.nodes)
        band = next(band for band in self.bands if run * nodes < band.rows.stop)
        first = run * nodes - band.rows.start
        return {name: value[first : first + nodes] for name, value in band.state.items()}

    def restore(self, saved: Sequence[dict[str, Tensor]], device: torch.device) -> None:
        """Restore the states of all experiments, as returned by `state_of`; an empty one stays as it is initially."""
        nodes = len(self.engine.nodes)
        for band, first in zip(self.bands, self.firsts, strict=True):
            own = list(enumerate(saved[first : first + len(band.engine.seeds)]))
            band.state = {
                name: torch.cat([run[name].to(device) if run else value[k * nodes : (k + 1) * nodes] for k, run in own])
                for name, value in band.state.items()
            }


def _band(group: Sequence[Experiment], shared: int, engine: EngineFactory, first: int) -> Band:
    """The band of experiments with the same algorithm and topology; `first` is its first row."""
    experiment = group[0]
    chosen, graph = algorithm(experiment.algorithm), parse(experiment.topology)
    warn_of_w(chosen, graph)
    faults = {what: p for what in ("drop", "churn") if (p := getattr(experiment, what))}
    if faults and traffic(chosen).everybody:                # raise before the run, not at its first mean
        raise InputError(NO_MEAN)
    rounded = experiment.wire == "bf16"
    if rounded and chosen.needs_full_precision:
        raise InputError(
            f"{experiment.algorithm} uses small differences of mixed models, which the rounding of messages to 16 bits "
            "would hide; use --wire full"
        )
    host = engine(graph, seeds=tuple(one.seed for one in group), shared=shared, rounded=rounded, **faults)
    return Band(chosen, host, first, experiment.weight_decay)
