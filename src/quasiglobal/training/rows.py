"""Content of a checkpoint: the rows of a run's nodes, and metadata.

The tensors are x, state.NAME, buffer.NAME and, of complex buffers, pairs.NAME; one row per node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from quasiglobal.common.modules import converted
from quasiglobal.stacked.layout import Layout, load_state
from quasiglobal.training.metrics import average

STATE, BUFFER, PAIRS = "state.", "buffer.", "pairs."

NamedRows = dict[str, Tensor]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Everything that a run needs to resume. `Program.checkpoint` makes it, `Program.restore` uses it.

    Files (`runs/checkpoints.py`) hold the rows as tensors and all other fields as JSON. A field added here needs a
    default, for checkpoints without it.
    """

    rows: NamedRows
    epochs: int
    """Number of completed epochs."""
    metrics: int = 0
    """Size of metrics.jsonl at that time, in bytes; set by the run folder."""
    topology: str = ""
    """Fingerprint of the topology, if a file or Python code defines it."""
    route: str = ""
    """Route by which the gradients were computed (`stacked/routes.py`)."""
    device: str = ""
    """Kind of the device that computed the gradients: cpu or cuda."""


def named_rows(x: Tensor, state: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> NamedRows:
    """CPU copies of a run's models, algorithm state and model buffers."""
    tensors = {"x": x}
    tensors |= {f"{STATE}{name}": value for name, value in state.items()}
    real = {name for name, value in buffers.items() if not value.is_complex()}
    tensors |= {f"{BUFFER}{name}": value for name, value in buffers.items() if name in real}
    tensors |= {f"{PAIRS}{name}": torch.view_as_real(value) for name, value in buffers.items() if name not in real}
    return {name: value.clone().cpu() for name, value in tensors.items()}


def state_of(rows: Mapping[str, Tensor]) -> NamedRows:
    """The algorithm's state."""
    return _with_prefix(rows, STATE)


def buffers_of(rows: Mapping[str, Tensor]) -> NamedRows:
    """The models' buffers."""
    pairs = _with_prefix(rows, PAIRS)                       # a file's memory may not be aligned for complex numbers
    return _with_prefix(rows, BUFFER) | {name: torch.complex(*value.unbind(-1)) for name, value in pairs.items()}


def models_of(rows: Mapping[str, Tensor]) -> NamedRows:
    """The rows without the algorithm's state."""
    return {name: value for name, value in rows.items() if not name.startswith(STATE)}


def state_dict_of(
    rows: Mapping[str, Tensor], layout: Layout, node: int | None, weights: Tensor | None = None
) -> NamedRows:
    """The state_dict of a node's model, or of the average of all models if `node` is None."""
    chosen = {name: average(value, 0, weights) if node is None else value[node] for name, value in rows.items()}
    return {name: value.contiguous() for name, value in (layout.views(chosen["x"]) | buffers_of(chosen)).items()}


def module_of(
    module: nn.Module, rows: Mapping[str, Tensor], layout: Layout, node: int | None, weights: Tensor | None = None
) -> nn.Module:
    """Give a module the weights of a row, or of the average of all rows if `node` is None; in evaluation mode."""
    if rows["x"].dtype == torch.float64:
        module = converted(module, torch.device("cpu"), torch.float64)
    load_state(module, state_dict_of(rows, layout, node, weights))
    return module.eval()


def complete_state(
    module: nn.Module, rows: Mapping[str, Tensor], layout: Layout, node: int | None, weights: Tensor | None = None
) -> NamedRows:
    """The whole state_dict of a module with the weights of a row: also frozen and tied parameters, each a copy."""
    filled = module_of(module, rows, layout, node, weights)
    return {name: value.clone() for name, value in nn.Module.state_dict(filled).items()}


def _with_prefix(rows: Mapping[str, Tensor], prefix: str) -> NamedRows:
    return {name.removeprefix(prefix): value for name, value in rows.items() if name.startswith(prefix)}
