"""Recurrent layers written out in plain operations, which vmap supports: LSTM, GRU and vanilla RNN.

The signatures are those of the functions that `nn.LSTM`, `nn.GRU` and `nn.RNN` call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quasiglobal.stacked.fusing import fused

Weights = Sequence[Any]
"""Of one layer and direction: input, hidden, both biases, projection; the last three are None if there is none."""

Step = Callable[[Tensor, tuple[Tensor, ...], Weights], tuple[Tensor, ...]]
"""(input's share of the gates, state, weights) → the new state, whose first tensor is the output."""


def recurrent(
    step: Step, input: Tensor, state: Any, weights: Sequence[Tensor], biased: bool, layers: int, dropout: float,
    training: bool, bidirectional: bool, batch_first: bool,
) -> tuple[Tensor, ...]:
    """Run all layers and directions; return the outputs and the last states."""
    if not isinstance(biased, bool):
        raise NotImplementedError("vmap does not support packed sequences")
    first: tuple[Tensor, ...] = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    x, last = input.transpose(0, 1) if batch_first else input, []
    for layer in range(layers):
        ways = []
        for way in range(directions):
            at = layer * directions + way
            own = _with_biases(weights[at * each : (at + 1) * each], biased)
            outputs, end = _one_way(step, x.flip(0) if way else x, tuple(part[at] for part in first), own)
            ways.append(outputs.flip(0) if way else outputs)
            last.append(end)
        x = torch.cat(ways, dim=-1) if bidirectional else ways[0]
        if dropout and training and layer < layers - 1:
            x = nn.functional.dropout(x, dropout)
    ends = (torch.stack(parts) for parts in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, *ends


def _with_biases(weights: Sequence[Tensor], biased: bool) -> Weights:
    rest = list(weights[2:])
    biases: Weights = rest[:2] if biased else [None, None]
    projection: Weights = rest[2 if biased else 0 :] or [None]
    return [*weights[:2], *biases, *projection]


def _one_way(step: Step, x: Tensor, state: tuple[Tensor, ...], weights: Weights) -> tuple[Tensor, tuple[Tensor, ...]]:
    shares, outputs = nn.functional.linear(x, weights[0], weights[2]), []
    if torch.is_autocast_enabled(x.device.type):            # once, and not in each step
        weights = [weights[0], weights[1].to(torch.get_autocast_dtype(x.device.type)), *weights[2:]]
    for share in shares.unbind(0):
        state = step(share, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs), state


def _lstm(share: Tensor, state: tuple[Tensor, ...], weights: Weights) -> tuple[Tensor, ...]:
    h, c = state
    h, c = fused(_lstm_gates, share, h @ weights[1].mT, weights[3], c)
    return (h if weights[4] is None else nn.functional.linear(h, weights[4])), c


def _lstm_gates(share: Tensor, hidden: Tensor, bias: Tensor | None, c: Tensor) -> tuple[Tensor, ...]:
    gates = share + hidden if bias is None else share + hidden + bias
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(share: Tensor, state: tuple[Tensor, ...], weights: Weights) -> tuple[Tensor, ...]:
    (h,) = state
    return fused(_gru_gates, share, h @ weights[1].mT, weights[3], h)


def _gru_gates(share: Tensor, hidden: Tensor, bias: Tensor | None, h: Tensor) -> tuple[Tensor, ...]:
    (r, z, n), (hr, hz, hn) = share.chunk(3, dim=-1), (hidden if bias is None else hidden + bias).chunk(3, dim=-1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return (n + z * (h - n),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def gates(share: Tensor, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
        return (activation(share + hidden if bias is None else share + hidden + bias),)

    def step(share: Tensor, state: tuple[Tensor, ...], weights: Weights) -> tuple[Tensor, ...]:
        return fused(gates, share, state[0] @ weights[1].mT, weights[3])

    return step


def _step(
    step: Step, input: Tensor, state: Any, w_input: Tensor, w_hidden: Tensor,
    b_input: Tensor | None = None, b_hidden: Tensor | None = None,
) -> Any:
    """One step of `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`."""
    before = (state,) if isinstance(state, Tensor) else tuple(state)
    after = step(nn.functional.linear(input, w_input, b_input), before, [w_input, w_hidden, b_input, b_hidden, None])
    return after[0] if isinstance(state, Tensor) else after


_STEPS: dict[str, Step] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu)}

RECURRENT: dict[str, Callable[..., Any]] = {
    **{name: partial(recurrent, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_step, step) for name, step in _STEPS.items()},
}
"""Names of torch's functions, and their written-out forms."""
