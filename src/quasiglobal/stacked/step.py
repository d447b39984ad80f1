"""A step of an algorithm as a recorded function of tensors [k, d], which runs in place by one of the back ends.

Exchanges between rows stay opaque: `MIX`, `MEAN` and the others are one operation each. To a kernel, a `Wiring` says
what they mean; where a step runs in blocks of columns, the caller exchanges the rows.

| back end | runs a step |
|---|---|
| `step_kernel.py` | on a GPU, as one Triton kernel |
| `step_blocks.py` | on a CPU, in blocks of columns that stay in the cache |
| `compiling.py` | on a GPU, compiled by Inductor, where it has no kernel |
| `capture.py` | as a part of a CUDA graph, with the gradients before it |
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor, fx

from quasiglobal.stacked.recording import operation, recorded

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

aten = torch.ops.aten

Update = Callable[..., Sequence[Tensor]]
"""A pure function of tensors to the new values of some of them."""

MIX = operation("mix(Tensor[] v) -> Tensor[]", lambda v: [torch.empty_like(one) for one in v])
"""Gossip: each tensor averaged with the weights of the rows, all in one message."""

MEAN = operation("mean(Tensor v) -> Tensor", torch.empty_like)
"""The exact mean over the rows of a run."""

EXCHANGE = operation("exchange(Tensor v, int t) -> Tensor", lambda v, t: torch.empty_like(v))
"""Messages per edge, [rows, slots, columns], along the links of step t; 0 at slots to which nothing comes."""

LINKED = operation(
    "linked(Tensor like, int slots, int columns, int t) -> Tensor",
    lambda like, slots, columns, t: like.new_zeros(len(like), slots, columns, dtype=torch.bool),
)
"""Mask of the slots with a sender at step t; at any step, if t is 0. If t is -1: with a receiver."""

OPAQUE = operation("opaque(Tensor[] v, str what) -> Tensor[]", lambda v, what: [torch.empty_like(one) for one in v])
"""An exchange that no program translates, such as a push."""

SAME = {
    aten.alias.default, aten.clone.default, aten.detach.default, aten.expand.default, aten.lift_fresh_copy.default,
    aten.view.default, aten._unsafe_view.default,
}
"""Operations that change nothing, if they keep the shape."""


class SlotTable(Protocol):
    """Numbered slots for the messages between the rows of a run."""

    degree: int
    has_sender: NDArray[np.bool_]
    has_receiver: NDArray[np.bool_]

    def active(self, t: int) -> NDArray[np.bool_]:
        """[rows, degree]: whether a message comes into the slot at step t."""

    def messages(self, t: int) -> list[tuple[int, int, int, int]]:
        """The messages of step t as (sender, its slot, receiver, its slot)."""


@dataclass(frozen=True)
class Wiring:
    """The links between the rows of a run: the meaning of the opaque operations of a step to a kernel."""

    nodes: int
    """Rows of a run."""
    weights: Tensor | None = None
    """[nodes, nodes], off the diagonal; None if there is no gossip."""
    senders: Sequence[Sequence[int]] = ()
    """The rows that each row may receive from."""
    drawn: bool = False
    """Whether the weights are overwritten for each step."""
    shared: int | None = None
    """Leading columns that are exchanged; None: all."""
    links: Callable[[], SlotTable] | None = None
    """The slots of messages per edge."""

    def columns(self, width: int) -> int:
        """Number of columns of a tensor of this width that are exchanged."""
        return width if self.shared is None else min(self.shared, width)


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step: the program returns the new values of the arguments at `outputs`, in order."""

    program: fx.GraphModule
    outputs: Sequence[int]

    @cached_property
    def nodes(self) -> list[fx.Node]:
        """The arguments, constants and operations, in order."""
        return list(self.program.graph.nodes)[:-1]

    @cached_property
    def arguments(self) -> list[fx.Node]:
        """The arguments."""
        return [node for node in self.nodes if node.op == "placeholder"]

    @cached_property
    def results(self) -> dict[int, fx.Node]:
        """The new values, by the position of the argument that they replace."""
        values = cast(list[fx.Node], self.program.graph.output_node().args[0])
        return dict(zip(self.outputs, values, strict=True))

    @property
    def changed(self) -> dict[int, fx.Node]:
        """The new values that are not the old ones."""
        return {at: result for at, result in self.results.items() if result is not self.arguments[at]}


def recorded_step(update: Update, arguments: Sequence[Tensor], outputs: Sequence[int]) -> RecordedStep:
    """Record a function of tensors that returns the new values of the arguments at `outputs`.

    It runs on tensors without numbers, and may not write into them; on the device `meta`, reading them fails too.
    """
    program = recorded(update, arguments, values=False)
    for node in program.graph.nodes:
        if node.target in SAME and shape_of(node) == shape_of(node.all_input_nodes[0]):
            node.replace_all_uses_with(node.all_input_nodes[0])
    program.graph.eliminate_dead_code()
    return RecordedStep(program, outputs)


def shape_of(node: fx.Node) -> torch.Size:
    """The shape of a recorded value."""
    shape: torch.Size = node.meta["val"].shape
    return shape


def sources(mix: fx.Node) -> list[fx.Node]:
    """The values that are mixed together."""
    return cast(list[fx.Node], mix.args[0])


def mixed(node: fx.Node) -> fx.Node | None:
    """The value that was mixed, if a node is a result of gossip."""
    if node.target is not operator.getitem or node.all_input_nodes[0].target is not MIX:
        return None
    return sources(node.all_input_nodes[0])[cast(int, node.args[1])]
