"""The steps of an engine's rows in blocks of columns, in place (`stacked/step_blocks.py`)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from quasiglobal.algorithms import Algorithm, State
from quasiglobal.engines.host import Host
from quasiglobal.engines.traced import TracedEngine, step_of_tensors
from quasiglobal.stacked.step_blocks import BlockStep, ByColumns, Mix, ModelRows, blocks_of

log = logging.getLogger("quasiglobal")

MOST_KINDS = 64
"""Kinds of steps that are kept."""


class BlockSteps:
    """Steps of an engine's rows in blocks, in place.

    `empty` returns memory for a message of c tensors of some columns, [c, runs, nodes, columns]; `exchange` sends it at
    step t and returns how to mix tensors like a given one with what came. `ahead` returns the first message of step t,
    if it was sent before.
    """

    def __init__(
        self, engine: Host, empty: Callable[[int, int, torch.dtype], Tensor],
        exchange: Callable[[int, Tensor, Tensor], Mix], ahead: Callable[[int], Tensor | None],
    ) -> None:
        self.engine, self.empty, self.exchange, self.ahead = engine, empty, exchange, ahead
        self.algorithm: Algorithm | None = None
        self.programs: dict[Hashable, BlockStep | None] = {}
        """The program of each kind of step of the algorithm; None for one that cannot be computed in blocks."""

    def step(
        self, algorithm: Algorithm, x: ModelRows, g: ModelRows, state: State, *, t: int, lr: Tensor,
        weight_decay: float | Tensor = 0.0, keeps_state: bool = False, copy: Tensor | None = None, **further: object,
    ) -> bool:
        """Run a step as `Host.step_in_place` does, if it can be computed in blocks; return whether it was.

        `copy` gets the shared columns of the new x too.
        """
        few, (k, d), widths = x.pieces[0], x.shape, [piece.shape[1] for piece in x.pieces]
        shared, blocks = self.engine.columns(d), blocks_of(k, widths, self.engine.shared)
        if len(blocks) == 1 or few.device.type != "cpu":
            return False
        decay = [weight_decay] if isinstance(weight_decay, Tensor) else []
        rest = (torch.tensor(t, dtype=few.dtype), lr, *state.values(), *decay)
        wide = [ModelRows([value]) if value.ndim and value.shape[-1] == d else value for value in rest]
        arguments: list[ByColumns] = [x, g, *wide]
        program = self._program(algorithm, weight_decay, t, state, arguments)
        if program is None:
            return False
        ahead = [self.ahead(t)]                             # of the first mix only

        def exchange(count: int, fill: Callable[[Tensor], None]) -> Mix:
            message = ahead.pop() if ahead else None
            if message is None:
                message = self.empty(count, shared, few.dtype)
                fill(message)
            return self.exchange(t, message, few)

        places = [(0, x)] if copy is None else [(0, x), (0, ModelRows([copy.view(k, shared)]))]
        if not keeps_state:
            new = arguments[4 : 4 + len(state)]
            places += [(at, place) for at, place in enumerate(new, 4) if isinstance(place, ModelRows)]
        program(arguments, places, blocks, shared, exchange, self.engine.writing)
        return True

    def _program(
        self, algorithm: Algorithm, weight_decay: float | Tensor, t: int, state: State, arguments: Sequence[ByColumns]
    ) -> BlockStep | None:
        """The program of steps of the kind of t; None if they cannot be computed in blocks."""
        shapes = tuple(one.shape for one in arguments)
        kind = algorithm.phase(t), shapes, None if isinstance(weight_decay, Tensor) else weight_decay
        if algorithm is not self.algorithm or len(self.programs) > MOST_KINDS:
            self.algorithm = algorithm
            self.programs.clear()
        if kind not in self.programs:
            self.programs[kind] = None
            if all(value.shape == arguments[0].shape for value in state.values()):
                step = step_of_tensors(algorithm, TracedEngine(self.engine), weight_decay, t, list(state))
                try:
                    self.programs[kind] = BlockStep(step, arguments, [0, *range(4, 4 + len(state))])
                except Exception as error:                  # an algorithm may do anything; its plain step still works
                    log.debug(f"a step of {algorithm} is not computed in blocks: {error!r}")
        return self.programs[kind]
