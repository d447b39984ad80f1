"""Band: adjacent rows with the same algorithm and topology, from one or several runs."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable

from torch import Tensor

from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.costs import sends_model_first
from quasiglobal.engines.host import Host
from quasiglobal.engines.traced import step_of_tensors, traced_step, wiring_of
from quasiglobal.stacked.capture import overwrite
from quasiglobal.stacked.compiling import step_by_inductor
from quasiglobal.stacked.precision import full_precision
from quasiglobal.stacked.step import recorded_step
from quasiglobal.stacked.step_kernel import StepKernel, step_kernel

log = logging.getLogger("quasiglobal")

GradientAt = Callable[[Tensor], Tensor]
"""The gradients of the band's rows at given models."""


class Band:
    """An algorithm with its state and the engine that hosts its nodes; `rows` is the band's slice of x."""

    def __init__(self, algorithm: Algorithm, engine: Host, first: int, weight_decay: float) -> None:
        self.algorithm, self.engine, self.weight_decay = algorithm, engine, weight_decay
        self.rows = slice(first, first + engine.rows)
        self.state: State = {}
        self.programs: dict[Hashable, Callable[..., None] | None] = {}

    @property
    def sends_model_first(self) -> bool:
        """Whether the first message of a step is of models."""
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
        """Return the kernel of steps of the kind of t; None if there is none."""
        wiring = wiring_of(self.engine, t, x)
        if wiring is None:
            return None
        step = traced_step(self.algorithm, self.engine, self.weight_decay, t, list(self.state))
        names = ["x", "g", "time", "lr", *self.state]
        arguments = (x, g, time, lr, *self.state.values())
        return step_kernel(step, arguments, self._outputs, wiring, names, f"the step of {self.algorithm}")

    def _fused(self, t: int, x: Tensor, g: Tensor, time: Tensor, lr: Tensor) -> Callable[..., None] | None:
        """Return the program of steps of the kind of t by the compiler; None if they need further gradients.

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
