"""Rows of a program grouped into bands: one band for each algorithm, topology and number of completed epochs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Hashable, Sequence
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.costs import Ledger, sends_model_first
from quasiglobal.engines.draws import Faults
from quasiglobal.engines.host import Host
from quasiglobal.engines.needs import check_needs
from quasiglobal.engines.simulator import Simulator
from quasiglobal.engines.traced import step_of_tensors, traced_step, wiring_of
from quasiglobal.stacked.capture import overwrite
from quasiglobal.stacked.compiling import step_by_inductor
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.step import recorded_step
from quasiglobal.stacked.step_kernel import StepKernel, step_kernel
from quasiglobal.topology import Topology
from quasiglobal.training.experiment import Experiment

log = logging.getLogger("quasiglobal")

EngineFactory = Callable[..., Host]
"""(topology, seeds=, shared=, rounded=, and drop= or churn= if not 0, wire= if it compresses) → an engine."""

RowGradient = Callable[[slice, Tensor], Tensor]
"""The gradients of some rows at given models."""

GradientAt = Callable[[Tensor], Tensor]
"""The gradients of the band's rows at given models."""


class Bands:
    """The bands of all experiments, in row order."""

    def __init__(
        self, experiments: Sequence[Experiment], topologies: Sequence[Topology], epochs: Sequence[int], shared: int,
        engine: EngineFactory = Simulator,
    ) -> None:
        """`epochs` are the completed epochs of each experiment; `shared` leading columns of a row are communicated."""
        self.bands: list[Band] = []
        algorithms = [one.resolved.algorithm for one in experiments]       # equal, whatever their spelling
        alike = list(zip(algorithms, topologies, epochs, strict=True))
        for _, places in groupby(range(len(experiments)), key=alike.__getitem__):
            group = list(places)
            first = self.bands[-1].rows.stop if self.bands else 0
            chosen = [experiments[place] for place in group]
            self.bands.append(_band(chosen, topologies[group[0]], shared, engine, first, group[0]))
        self.engine = self.bands[0].engine
        self.rows = self.bands[-1].rows.stop
        self.communication = experiments[0].resolved.communication
        self.total = 0
        self.shared = shared
        """Number of parameters that are communicated."""
        self.type = torch.float64 if experiments[0].precision == "fp64" else torch.float32
        self._ledgers: list[Ledger] = []

    def schedule(self, total: int) -> None:
        """Resolve the schedule of communication for a run of this many steps."""
        self.total = total
        for band in self.bands:
            band.algorithm = self.communication.around(band.algorithm, total)
        self._ledgers = [Ledger(band.algorithm, band.engine, self.shared, self.type) for band in self.bands]

    def bytes_per_step(self) -> float:
        """Bytes that a node of the first experiment sends per step, on average over the nodes and the steps."""
        return self._ledgers[0].per_step()

    def bytes_sent(self, run: int, steps: int, buffers: Collection[Tensor] = ()) -> float:
        """Bytes that a node of an experiment has sent after some steps, on average over the nodes.

        `buffers` are those that `merge` averages as well.
        """
        band = self._of(run)
        ledger = self._ledgers[self.bands.index(band)]
        sent = float(ledger.after(steps)[run - band.run])
        if self.communication.merges and steps >= self.total:
            sent += ledger.all_reduce(sum(value[0].nbytes for value in buffers if value.is_floating_point()))
        return sent

    def merge(self, x: Tensor, buffers: Collection[Tensor], done: Sequence[int]) -> Tensor:
        """Replace models and buffers by their means over all nodes, in place, where merge@end says so; return x.

        `done` is the number of completed steps of each experiment.
        """
        if not self.communication.merges:
            return x
        x = x.contiguous()                                  # rows that are an exact mean share their storage
        for band in (band for band in self.bands if done[band.run] == self.total):
            engine, models = band.engine, x[band.rows]
            models.copy_(engine.with_own(engine.averaged(engine.by_run(models)), models))
            for values in (value[band.rows] for value in buffers if value.is_floating_point()):
                rows = values.reshape(len(engine.seeds), len(engine.nodes), -1)
                values.copy_(engine.averaged(rows).expand_as(rows).reshape(values.shape))
        return x

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
        return tuple(band.kind(t[band.run]) for band in self.bands)

    def refresh(self, t: Sequence[int]) -> None:
        """Update the tensors that a captured step reads to step `t[r]` of experiment r."""
        for band in self.bands:
            band.engine.refresh(t[band.run])

    def step(
        self, x: Tensor, g: Tensor, t: Sequence[int], time: Sequence[Tensor], lr: Tensor,
        full_gradient: RowGradient, gradient: RowGradient, in_place: bool, fused: bool,
    ) -> Tensor:
        """Run one step of every algorithm on its own rows, step `t[r]` of experiment r; return the new x.

        `full_gradient` is over all data, `gradient` over the batch of this step, at other models.
        `in_place` overwrites x and the states; `fused` then compiles a step without its own kernel.
        """
        stepped = []
        for band in self.bands:
            rows = band.rows
            own = lr if lr.ndim == 0 else lr[rows]
            how = (t[band.run], time[band.run], own, partial(full_gradient, rows), partial(gradient, rows))
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
        nodes, band = len(self.engine.nodes), self._of(run)
        first = (run - band.run) * nodes
        return {name: value[first : first + nodes] for name, value in band.state.items()}

    def restore(self, saved: Sequence[dict[str, Tensor]], device: torch.device) -> None:
        """Restore the states of all experiments, as returned by `state_of`; an empty one stays as it is initially."""
        nodes = len(self.engine.nodes)
        for band in self.bands:
            own = list(enumerate(saved[band.run : band.run + len(band.engine.seeds)]))
            band.state = {
                name: torch.cat([run[name].to(device) if run else value[k * nodes : (k + 1) * nodes] for k, run in own])
                for name, value in band.state.items()
            }

    def _of(self, run: int) -> Band:
        return next(band for band in reversed(self.bands) if band.run <= run)


class Band:
    """An algorithm with its state and the engine that hosts its nodes; `rows` is the band's slice of x."""

    def __init__(self, algorithm: Algorithm, engine: Host, first: int, weight_decay: float, run: int = 0) -> None:
        """`first` is its first row, `run` its first experiment."""
        self.algorithm, self.engine, self.weight_decay = algorithm, engine, weight_decay
        self.rows, self.run = slice(first, first + engine.rows), run
        self.state: State = {}
        self.programs: dict[Hashable, Callable[..., None] | None] = {}

    @property
    def sends_model_first(self) -> bool:
        """Whether the first message of a step holds the models."""
        return sends_model_first(self.algorithm)

    def begin_at(self, x: Tensor) -> None:
        """Initialise the algorithm's state from these models."""
        self.state = {name: value.clone() for name, value in self.engine.begin(self.algorithm, x).items()}

    def kind(self, t: int) -> Hashable:
        """Return the kind of step t; steps of one kind apply the same operations to their tensors."""
        return self.algorithm.phase(t), self.engine.topology.position(t)

    def take_kernels(self, other: Band) -> None:
        """Use the kernels of a band that may have another number of runs."""
        if (self.algorithm, self.engine.topology) == (other.algorithm, other.engine.topology):
            kernels = {kind: one for kind, one in other.programs.items() if isinstance(one, StepKernel)}
            self.programs |= {kind: one for kind, one in kernels.items() if one.any_rows}

    def step(
        self, x: Tensor, g: Tensor, t: int, time: Tensor, lr: Tensor, full_gradient: GradientAt,
        gradient: GradientAt | None = None,
    ) -> Tensor:
        """Return the new x, given x and the gradients of the loss; replace the state.

        `full_gradient` is over all data of each node, `gradient` over the batch of this step.
        """
        x, self.state = self._stepped(x, g, self.state, t, time, lr, full_gradient, gradient)
        return x

    def step_in_place(
        self, x: Tensor, g: Tensor, t: int, time: Tensor, lr: Tensor, full_gradient: GradientAt,
        gradient: GradientAt | None = None, *, fused: bool,
    ) -> None:
        """Run a step in place on x and the state, by one kernel if there is one (`step_kernel`).

        `fused` compiles any other step to few kernels, which takes seconds for each kind of step.
        """
        self.engine.refresh(t)
        kind = self.kind(t), lr.ndim
        if kind not in self.programs:
            kernel = self.kernel(t, x, g, time, lr)
            self.programs[kind] = self._fused(t, x, g, time, lr) if kernel is None and fused else kernel
        program = self.programs[kind]
        if program is not None:
            with full_precision(x.device.type):
                program(x, g, time, lr, *self.state.values())
            return
        new, state = self._stepped(x, g, self.state, t, time, lr, full_gradient, gradient)
        overwrite([x, *self.state.values()], [new, *(state[name] for name in self.state)])

    def _stepped(
        self, x: Tensor, g: Tensor, state: State, t: int, time: Tensor, lr: Tensor, full_gradient: GradientAt,
        gradient: GradientAt | None = None,
    ) -> tuple[Tensor, State]:
        return self.engine.step(
            self.algorithm, x, g, state, t=t, time=time, lr=lr, full_gradient=full_gradient, gradient=gradient,
            weight_decay=self.weight_decay,
        )

    def kernel(self, t: int, x: Tensor, g: Tensor, time: Tensor, lr: Tensor) -> StepKernel | None:
        """Return the kernel for steps of the same kind as t; None if there is none."""
        wiring = wiring_of(self.engine, t, x)
        if wiring is None:
            return None
        step = traced_step(self.algorithm, self.engine, self.weight_decay, t, list(self.state))
        names = ["x", "g", "time", "lr", *self.state]
        arguments = (x, g, time, lr, *self.state.values())
        return step_kernel(step, arguments, self._outputs, wiring, names, f"the step of {self.algorithm}")

    def _fused(self, t: int, x: Tensor, g: Tensor, time: Tensor, lr: Tensor) -> Callable[..., None] | None:
        """Compile the program for steps of the same kind as t; return None if they need further gradients.

        None too if W is drawn: the compiler may take weights that are no argument for constants.
        """
        if self.engine.topology.is_drawn(t):
            return None
        step = step_of_tensors(self.algorithm, self.engine, self.weight_decay, t, list(self.state))
        self.engine.prepare(t, x)
        try:
            return step_by_inductor(recorded_step(step, (x, g, time, lr, *self.state.values()), self._outputs))
        except Exception as error:                          # an algorithm may do anything; its plain step still works
            log.debug(f"the step of {self.algorithm} is not compiled: {error!r}")
            return None

    @property
    def _outputs(self) -> list[int]:
        """The positions of x and of the state among (x, g, time, lr, *state)."""
        return [0, *range(4, 4 + len(self.state))]


def _band(
    group: Sequence[Experiment], graph: Topology, shared: int, engine: EngineFactory, first: int, run: int
) -> Band:
    """The band of experiments with the same algorithm and topology; see `Band` for `first` and `run`."""
    experiment = group[0]
    resolved = experiment.resolved
    chosen, wire = resolved.algorithm, resolved.wire
    check_needs(chosen, graph, Faults(experiment.drop, experiment.churn), alike=experiment.data_alike)
    faults = {what: p for what in ("drop", "churn") if (p := getattr(experiment, what))}
    resolved.communication.check(chosen, experiment.algorithm, bool(faults))
    rounded = experiment.wire == "bf16"
    further = faults | ({} if wire is None else {"wire": wire})
    host = engine(graph, seeds=tuple(one.seed for one in group), shared=shared, rounded=rounded, **further)
    return Band(chosen, host, first, experiment.weight_decay, run)
