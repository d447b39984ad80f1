"""Functions that vmap does not support, or computes slowly, replaced by equal ones for the models of a stack.

- `scaled_dot_product_attention`: the backward passes of its fused kernels have no batching rule. The batches of all
  models become one batch. The fast path of `nn.MultiheadAttention` in evaluation is off.
- `lstm`, `gru`, `rnn_tanh`, `rnn_relu` and their cells have no batching rule. They are written out.
- Convolutions, `linear`, `addmm` and `prelu` are decomposed before autocast applies: the bias, and with it the output,
  would stay in float32. Their arguments are cast first.
- `batch_norm` and `instance_norm` do not accept weights in float32 for inputs in 16 bits. They are written out.
- Average pooling with padding, or of windows beyond the edge: the gradient is wrong for images with channels last on a
  GPU (pytorch/pytorch#188344), and compiled (pytorch/pytorch#198119). Images are padded first.
- `embedding`: vmap ignores `padding_idx` and `scale_grad_by_freq` in its gradient.
- `data` would not stop a gradient in a trace. `requires_grad` and `grad_fn` of stacked tensors are those of all models.
- Some losses have no rule, or are computed for one model after the other. They are written out.
- `rrelu` has no batching rule in training.
- Others read values (`one_hot`), write into an argument that is not stacked (`normalize` with `out`), have no rule, or
  none for another memory format (`contiguous`, `to`).

The replacements need autograd outside of vmap (`routes.by_autograd`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial, reduce
from importlib.util import find_spec
from inspect import signature
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from quasiglobal.common.trees import Tree
from quasiglobal.stacked.compiling import by_inductor
from quasiglobal.stacked.recording import Untraceable, is_recording

Function = Callable[..., object]
"""A function of torch, or its replacement."""


@contextmanager
def stackable(given: Tree, everywhere: bool = False, writable: bool = False) -> Iterator[None]:
    """Replace these functions for tensors that vmap has stacked; leave other tensors alone.

    `given` are the model's parameters and inputs: if they are stacked, so are new tensors of zeros, into which a model
    may write; with `writable`, other new tensors too, such as masks, which are larger then. With `everywhere`, replace
    functions for all tensors, by plain operations to be traced; what the model computes without gradients is detached,
    since a trace does not record `torch.no_grad`.
    """
    new = NEW + CONSTANTS if writable else NEW
    with no_fast_path(given), sdpa_kernel(SDPBackend.MATH), Replacing(given, everywhere, new):
        yield                                               # `Replacing` is off in nn.MultiheadAttention


@contextmanager
def no_fast_path(given: Tree) -> Iterator[None]:
    """Turn off the fast path of `nn.MultiheadAttention` and transformer layers in evaluation.

    It has no batching rule, and on a GPU it needs weights at aligned addresses, which views of a row do not have.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


@contextmanager
def unstacked(given: Tree) -> Iterator[None]:
    """For a single model: turn off the fast path, and on a GPU average pooling whose gradient is wrong."""
    on_gpu = any(isinstance(leaf, Tensor) and leaf.is_cuda for leaf in tree_leaves(given))
    with no_fast_path(given), _PaddedFirst() if on_gpu else nullcontext():
        yield


class _PaddedFirst(TorchFunctionMode):
    """Mode in which images are padded before they are averaged."""

    def __torch_function__(
        self, function: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        name = getattr(function, "__name__", "")
        return (PLAIN[name] if name in POOLS else function)(*args, **(kwargs or {}))


class Replacing(TorchFunctionMode):
    """Mode that calls the replacement of a function if an argument is stacked."""

    def __init__(self, given: Tree, everywhere: bool, new: Sequence[str]) -> None:
        super().__init__()
        self.stacked, self.everywhere = [leaf for leaf in tree_leaves(given) if is_stacked(leaf)], everywhere
        self.new = new
        self.checks: list[Tensor] = []
        """Results of `any` and `all`, which models use to check values."""

    def __torch_function__(
        self, function: Function, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        named = kwargs or {}
        if self.everywhere and not torch.is_grad_enabled():
            args, named = tree_map_only(Tensor, Tensor.detach, (args, named))
        name, stacked = getattr(function, "__name__", ""), any(map(is_stacked, tree_leaves((args, named))))
        if name == "__get__":
            name = getattr(getattr(function, "__self__", None), "__name__", name)
        if self.everywhere and name in UNRECORDED:
            raise Untraceable(f"a trace does not record {name}")
        if name in ("__bool__", "item"):
            for check in self.checks:
                if args[0] is check:                        # one value for all models, or they have to be separate
                    every = innermost(check).flatten()
                    agreed = len(every) and (every == every[0]).all()
                    return getattr(every[0] if agreed else check, name)()
        own = PLAIN | STACKED if stacked else PLAIN if self.everywhere else {}
        if name in NORMS and function is not NORMS[name]:   # torch's functions of these names have other arguments
            own = {}
        result = own.get(name, function)(*args, **named)
        if name in ("any", "all") and is_stacked(result):
            self.checks.append(result)
        if name in self.new and not stacked and isinstance(result, Tensor):
            for leaf in self.stacked:
                result = torch.where(leaf.new_ones((), dtype=torch.bool), result, result)
        return result


def is_stacked(value: object) -> TypeGuard[Tensor]:
    """Whether this is a tensor with a dimension that vmap hides."""
    return isinstance(value, Tensor) and torch._C._functorch.is_batchedtensor(value)


def innermost(value: Tensor) -> Tensor:
    """The tensor of all models behind the dimensions that vmap hides."""
    while is_stacked(value):
        value = torch._C._functorch.get_unwrapped(value)
    return value


class _OfAll(torch.autograd.Function):
    """A function of the tensors of all models, with autograd outside of vmap.

    The function gets the number of models, the dimension of the models in each tensor, and the tensors; the results
    have the models first.
    """

    @staticmethod
    def forward(function: Callable[..., Tensor | Results], *tensors: Tensor | None) -> Tensor:
        raise NotImplementedError("call it under vmap only")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Save nothing for the backward pass."""

    @staticmethod
    def vmap(
        info: Any, in_dims: Sequence[int | None], function: Callable[..., Tensor | Results], *tensors: Tensor | None
    ) -> tuple[Tensor | Results, int | tuple[int, ...]]:
        results = function(info.batch_size, in_dims[1:], tensors)
        return results, 0 if isinstance(results, Tensor) else (0,) * len(results)


# ------------------------------------------------------------------------------------------ linear layers


def _lowered(exact: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`exact` with its arguments cast first, if autocast is on: floating-point numbers, but not float64."""
    def own(*args: object, **named: object) -> Tensor:
        device = next(value for value in tree_leaves((args, named)) if isinstance(value, Tensor)).device.type
        if not torch.is_autocast_enabled(device):
            return exact(*args, **named)
        lower = torch.get_autocast_dtype(device)

        def cast(value: Tensor) -> Tensor:
            return value.to(lower) if value.is_floating_point() and value.dtype != torch.float64 else value

        with torch.autocast(device, enabled=False):
            args, named = tree_map_only(Tensor, cast, (args, named))
            return exact(*args, **named)

    return own


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = input @ weight.mT
    return product if bias is None else product + bias


def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    return alpha * (mat1 @ mat2) + beta * input if (alpha, beta) != (1, 1) else mat1 @ mat2 + input


# --------------------------------------------------------------------------------------- normalisation


def _batch_norm(
    input: Tensor, running_mean: Tensor | None, running_var: Tensor | None, weight: Tensor | None = None,
    bias: Tensor | None = None, training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel over the batch and all positions."""
    others = [0, *range(2, input.ndim)]
    return _normalised(input, others, others, running_mean, running_var, weight, bias, training, momentum, eps)


def _instance_norm(
    input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None, weight: Tensor | None = None,
    bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1, eps: float = 1e-5,
) -> Tensor:
    """Normalise each channel of each example over all positions."""
    places = list(range(2, input.ndim))
    return _normalised(
        input, places, [0, *places], running_mean, running_var, weight, bias, use_input_stats, momentum, eps
    )


def _normalised(
    input: Tensor, dims: list[int], others: list[int], running_mean: Tensor | None, running_var: Tensor | None,
    weight: Tensor | None, bias: Tensor | None, by_own: bool, momentum: float, eps: float,
) -> Tensor:
    """Normalise by the statistics over `dims`, or by the running ones; these are means over all dims but channels."""
    wide = next((value for value in (weight, running_mean) if value is not None), input).dtype
    x, shape = input.to(wide), (-1, *(1 for _ in range(2, input.ndim)))
    if by_own or running_mean is None or running_var is None:
        variance, mean = torch.var_mean(x, dims, correction=0, keepdim=True)
        if by_own and running_mean is not None and running_var is not None:
            count = x.numel() // mean.numel()
            for running, value in ((running_mean, mean), (running_var, variance * (count / max(1, count - 1)))):
                seen = value.detach().mean(others, keepdim=True).reshape(running.shape)
                running.copy_(torch.lerp(running, seen.to(running.dtype), momentum))
    else:
        mean, variance = running_mean.view(shape), running_var.view(shape)
    y = (x - mean) * (variance + eps).rsqrt()
    y = y if weight is None else y * weight.view(shape)
    return (y if bias is None else y + bias.view(shape)).to(input.dtype)


def _if_mixed(usual: Callable[..., Tensor], written_out: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`written_out` if the floating-point arguments differ in dtype, otherwise the usual function."""
    def own(*args: object, **named: object) -> Tensor:
        tensors = (value for value in tree_leaves((args, named)) if isinstance(value, Tensor))
        dtypes = {value.dtype for value in tensors if value.is_floating_point()}
        return (written_out if len(dtypes) > 1 else usual)(*args, **named)

    return own


NORMS: dict[str, Function] = {
    "batch_norm": nn.functional.batch_norm, "instance_norm": nn.functional.instance_norm
}


# ---------------------------------------------------------------------------------------- other functions


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    if num_classes < 0:
        return nn.functional.one_hot(tensor)
    return (tensor[..., None] == torch.arange(num_classes, device=tensor.device)).long()


def _normalize(
    input: Tensor, p: float = 2.0, dim: int = 1, eps: float = 1e-12, out: Tensor | None = None
) -> Tensor:
    value = input / input.norm(p, dim, keepdim=True).clamp(min=eps)
    return value if out is None else out.copy_(value)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    others = [at for at in range(v.ndim) if at != dim % v.ndim] if dim != -1 else None
    norm: Tensor = torch.linalg.vector_norm(v, 2, others, keepdim=others is not None)
    return v * (g / norm)


Sizes = int | Sequence[int]
"""A number for each dimension, or one for all."""


def _avg_pool(pool: Callable[..., Tensor], dims: int) -> Callable[..., Tensor]:
    """Average pooling over the last `dims` dimensions without padding, of images that are padded first if necessary."""
    def own(
        input: Tensor, kernel_size: Sizes, stride: Sizes | None = None, padding: Sizes = 0, ceil_mode: bool = False,
        count_include_pad: bool = True, divisor_override: int | None = None,
    ) -> Tensor:
        kernel, step, pad = (
            [value] * dims if isinstance(value, int) else [*value] * (dims // len(value))
            for value in (kernel_size, stride or kernel_size, padding)
        )
        if not ceil_mode and not any(pad):
            further = {} if divisor_override is None else {"divisor_override": divisor_override}
            return pool(input, kernel, step, **further)
        edges, factors = [], []
        for size, k, s, p in zip(input.shape[-dims:], kernel, step, pad, strict=True):
            count = (size + 2 * p - k + (s - 1 if ceil_mode else 0)) // s + 1
            count -= ceil_mode and (count - 1) * s >= size + p
            first = torch.arange(count, device=input.device) * s - p
            low, high = (-p, size + p) if count_include_pad else (0, size)
            factors.append(k / ((first + k).clamp(max=high) - first.clamp(min=low)))
            edges.append((p, max(0, (count - 1) * s + k - size - p)))
        mean = pool(nn.functional.pad(input, [edge for pair in reversed(edges) for edge in pair]), kernel, step)
        if divisor_override is not None:
            return mean * (math.prod(kernel) / divisor_override)
        for at, factor in enumerate(reversed(factors)):
            mean = mean * factor.to(mean.dtype).view(-1, *(1,) * at)
        return mean

    return own


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute in the widest dtype of the arguments, as autocast on a GPU does."""
    wide = reduce(torch.promote_types, (value.dtype for value in (input1, input2, weight)))
    with torch.autocast(weight.device.type, enabled=False):
        product = torch.einsum("...i,oij,...j->...o", input1.to(wide), weight.to(wide), input2.to(wide))
        return product if bias is None else product + bias


def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Tensor:
    """Rows of a table; padding has no gradient, and with `scale_grad_by_freq` each row's is a mean over its uses."""
    if max_norm is not None:
        raise NotImplementedError("vmap does not support embeddings that write into their weights")
    vectors = nn.functional.embedding(input, weight)
    if scale_grad_by_freq:
        ones = torch.ones_like(input, dtype=vectors.dtype).flatten()
        uses = torch.zeros_like(weight[:, 0], dtype=vectors.dtype).scatter_add(0, input.flatten(), ones)
        share = vectors / uses[input][..., None]
        vectors = vectors.detach() + share - share.detach()
    if padding_idx is not None:
        vectors = torch.where((input == padding_idx % len(weight))[..., None], vectors.detach(), vectors)
    return vectors


def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None, norm_type: float = 2,
    scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Tensor:
    special = (offsets, max_norm, per_sample_weights, padding_idx)
    if scale_grad_by_freq or any(value is not None for value in special):
        return nn.functional.embedding_bag(
            input, weight, offsets, max_norm, norm_type, scale_grad_by_freq, mode, sparse, per_sample_weights,
            include_last_offset, padding_idx,
        )
    vectors = nn.functional.embedding(input, weight)
    return vectors.amax(dim=1) if mode == "max" else vectors.sum(dim=1) if mode == "sum" else vectors.mean(dim=1)


def _rrelu(
    input: Tensor, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Tensor:
    """A leaky ReLU with random slopes."""
    slopes = lower + (upper - lower) * torch.rand_like(input) if training else (lower + upper) / 2
    result = torch.where(input > 0, input, slopes * input)
    return input.copy_(result) if inplace else result


def _in_place(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The operation that writes the result of a function into its first argument."""
    return lambda input, *args, **named: input.copy_(function(input.clone(), *args, **named))


def _set_item(input: Tensor, index: Any, value: Any) -> None:
    """`input[mask] = number` without a selection, which would have another size in each model."""
    mask = index[0] if isinstance(index, tuple) and len(index) == 1 else index
    single = not isinstance(value, Tensor) or value.ndim == 0
    if isinstance(mask, Tensor) and mask.dtype is torch.bool and mask.ndim <= input.ndim and single:
        input.copy_(torch.where(mask.view(*mask.shape, *(1,) * (input.ndim - mask.ndim)), value, input))
    else:
        input[index] = value


# -------------------------------------------------------------------------------------------- attention


def attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, **how: Any,
) -> Tensor:
    """Scaled-dot-product attention of all models, as one call on the batches of all models."""
    how |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if any(map(is_stacked, (query, key, value, attn_mask))):
        attend = partial(_attention_of_all, how)
        folded: Tensor = _OfAll.apply(attend, query, key, value, attn_mask)  # type: ignore[no-untyped-call]
        return folded
    return nn.functional.scaled_dot_product_attention(query, key, value, attn_mask, **how)


def _attention_of_all(
    how: dict[str, Any], models: int, dims: Sequence[int | None], tensors: tuple[Tensor, Tensor, Tensor, Tensor | None]
) -> Tensor:
    """Attention on the tensors of all models."""
    def of_all(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(models, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    wide = [of_all(tensor, dim) for tensor, dim in zip(tensors[:3], dims[:3], strict=True)]
    few = wide[0].ndim < 4                                  # [models, length, size], without heads
    wide = [tensor if tensor.ndim > 3 else tensor.unsqueeze(1) for tensor in wide]
    lead = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in wide))  # type: ignore[no-untyped-call]
    mask = tensors[3]
    if mask is not None and (dims[3] is not None or mask.ndim > 2):
        mask = of_all(mask, dims[3])
        mask = mask.reshape(len(mask), *(1,) * (len(lead) + 3 - mask.ndim), *mask.shape[1:])
        mask = mask.expand(*lead, *mask.shape[-3:]).flatten(0, len(lead) - 1)
    query, key, value = (tensor.expand(*lead, *tensor.shape[-3:]).flatten(0, len(lead) - 1) for tensor in wide)
    result = _by_kernels(query, key, value, mask, how)
    if result is None:
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            result = attention(query, key, value, mask, **how)          # there may be an outer vmap
    result = result.reshape(*lead, *result.shape[1:])
    return result.squeeze(1) if few else result


def _by_kernels(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, how: dict[str, Any]) -> Tensor | None:
    """Attention by our own kernels, which are faster for short texts; None if they do not suit."""
    if find_spec("triton") is None or any(map(is_stacked, (query, key, value, mask))):
        return None
    from quasiglobal.stacked.kernels.attention import attend, suits

    if not suits(query, key, value, mask, how):
        return None
    return attend(query, key, value, mask, how["dropout_p"], how.get("scale"))


# ------------------------------------------------------------------------------------- recurrent layers
# The signatures are those of the functions that nn.LSTM, nn.GRU and nn.RNN call.


class Weights(NamedTuple):
    """Weights of one layer and direction."""

    input: Tensor
    hidden: Tensor
    input_bias: Tensor | None = None
    hidden_bias: Tensor | None = None
    projection: Tensor | None = None


Results = tuple[Tensor, ...]

Step = Callable[[Tensor, Results, Weights], Results]
"""(input's share of the gates, state, weights) → the new state, whose first tensor is the output."""


def recurrent(
    step: Step, input: Tensor, state: Tensor | Sequence[Tensor], weights: Sequence[Tensor], biased: bool, layers: int,
    dropout: float, training: bool, bidirectional: bool, batch_first: bool,
) -> Results:
    """Run all layers and directions; return the outputs and the last states."""
    if not isinstance(biased, bool):
        raise NotImplementedError("vmap does not support packed sequences")
    first: Results = (state,) if isinstance(state, Tensor) else tuple(state)
    directions = 2 if bidirectional else 1
    each = len(weights) // (layers * directions)
    x, last = input.transpose(0, 1) if batch_first else input, []
    for layer in range(layers):
        ways = []
        for way in range(directions):
            at = layer * directions + way
            given = weights[at * each : (at + 1) * each]
            own = Weights(*given) if biased else Weights(given[0], given[1], None, None, *given[2:])
            outputs, end = _one_way(step, x.flip(0) if way else x, tuple(part[at] for part in first), own)
            ways.append(outputs.flip(0) if way else outputs)
            last.append(end)
        x = torch.cat(ways, dim=-1) if bidirectional else ways[0]
        if dropout and training and layer < layers - 1:
            x = nn.functional.dropout(x, dropout)
    ends = (torch.stack(parts) for parts in zip(*last, strict=True))
    return x.transpose(0, 1) if batch_first else x, *ends


def _one_way(step: Step, x: Tensor, state: Results, weights: Weights) -> tuple[Tensor, Results]:
    shares, outputs = nn.functional.linear(x, weights.input, weights.input_bias), []
    if torch.is_autocast_enabled(x.device.type):            # once, and not in each step
        weights = weights._replace(hidden=weights.hidden.to(torch.get_autocast_dtype(x.device.type)))
    for share in shares.unbind(0):
        state = step(share, state, weights)
        outputs.append(state[0])
    return torch.stack(outputs), state


def fused(function: Callable[..., Results], *tensors: Tensor | None) -> Results:
    """Call a pointwise function that treats the last dimension of its arguments, and computes the others alike.

    On a GPU it is compiled, for the tensors of all models: a step of a layer is few kernels instead of many.
    """
    on_gpu = any(tensor is not None and tensor.is_cuda for tensor in tensors)
    if not any(map(is_stacked, tensors)) or not on_gpu or is_recording():
        return function(*tensors)
    results: Results = _OfAll.apply(partial(_fused_of_all, function), *tensors)  # type: ignore[no-untyped-call]
    return results


def _fused_of_all(
    function: Callable[..., Results], models: int, dims: Sequence[int | None], tensors: Sequence[Tensor | None]
) -> Results:
    """The compiled function of tensors of all models, with equal numbers of dimensions."""
    each = [
        None if tensor is None else tensor[None] if dim is None else tensor.movedim(dim, 0)
        for tensor, dim in zip(tensors, dims, strict=True)
    ]
    most = max(tensor.ndim for tensor in each if tensor is not None)
    physical = [
        None if tensor is None else tensor.reshape(len(tensor), *(1,) * (most - tensor.ndim), *tensor.shape[1:])
        for tensor in each
    ]
    outer = any(map(is_stacked, physical))                  # there is an outer vmap
    return fused(function, *physical) if outer else _compiled(function)(*physical)


_compiled = cache(by_inductor)


def _lstm(share: Tensor, state: Results, weights: Weights) -> Results:
    h, c = state
    h, c = fused(_lstm_gates, share, h @ weights.hidden.mT, weights.hidden_bias, c)
    return (h if weights.projection is None else nn.functional.linear(h, weights.projection)), c


def _lstm_gates(share: Tensor, hidden: Tensor, bias: Tensor | None, c: Tensor) -> Results:
    gates = share + hidden if bias is None else share + hidden + bias
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru(share: Tensor, state: Results, weights: Weights) -> Results:
    (h,) = state
    return fused(_gru_gates, share, h @ weights.hidden.mT, weights.hidden_bias, h)


def _gru_gates(share: Tensor, hidden: Tensor, bias: Tensor | None, h: Tensor) -> Results:
    (r, z, n), (hr, hz, hn) = share.chunk(3, dim=-1), (hidden if bias is None else hidden + bias).chunk(3, dim=-1)
    r, z = torch.sigmoid(r + hr), torch.sigmoid(z + hz)
    n = torch.tanh(n + r * hn)
    return (n + z * (h - n),)


def _rnn(activation: Callable[[Tensor], Tensor]) -> Step:
    def gates(share: Tensor, hidden: Tensor, bias: Tensor | None) -> Results:
        return (activation(share + hidden if bias is None else share + hidden + bias),)

    def step(share: Tensor, state: Results, weights: Weights) -> Results:
        return fused(gates, share, state[0] @ weights.hidden.mT, weights.hidden_bias)

    return step


def _step(
    step: Step, input: Tensor, state: Tensor | Sequence[Tensor], w_input: Tensor, w_hidden: Tensor,
    b_input: Tensor | None = None, b_hidden: Tensor | None = None,
) -> Tensor | Results:
    """One step of `nn.LSTMCell`, `nn.GRUCell` or `nn.RNNCell`."""
    before = (state,) if isinstance(state, Tensor) else tuple(state)
    weights = Weights(w_input, w_hidden, b_input, b_hidden)
    after = step(nn.functional.linear(input, w_input, b_input), before, weights)
    return after[0] if isinstance(state, Tensor) else after


_STEPS: dict[str, Step] = {"lstm": _lstm, "gru": _gru, "rnn_tanh": _rnn(torch.tanh), "rnn_relu": _rnn(torch.relu)}

RECURRENT: dict[str, Function] = {
    **{name: partial(recurrent, step) for name, step in _STEPS.items()},
    **{f"{name}_cell": partial(_step, step) for name, step in _STEPS.items()},
}
"""Names of torch's functions, and their written-out forms."""


# ----------------------------------------------------------------------------------------------- losses
# The signatures are those of torch.nn.functional, without the deprecated arguments.


def cross_entropy(output: Tensor, targets: Tensor) -> Tensor:
    """`nn.functional.cross_entropy`, with the same bits inside vmap; it does not load SymPy.

    PyTorch decomposes the loss of class numbers [batch] for vmap, and the checks in it load SymPy, which takes half of
    the time that a small model takes to start. The loss of [batch, 1] is decomposed to the same operations, without it.
    """
    if output.ndim != 2 or targets.is_floating_point():
        return nn.functional.cross_entropy(output, targets)
    return nn.functional.nll_loss(nn.functional.log_softmax(output, 1)[..., None], targets[..., None])


def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, ignore_index: int = -100, *, reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """With weights and label smoothing, PyTorch selects the targets that count; here the others have weight 0."""
    if weight is None or not label_smoothing or target.is_floating_point():
        return nn.functional.cross_entropy(
            input, target, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    dim = min(1, input.ndim - 1)
    logs, counts = nn.functional.log_softmax(input, dim), target != ignore_index
    classes = torch.where(counts, target, 0)
    weights = weight[classes] * counts
    at_target = -logs.gather(dim, classes.unsqueeze(dim)).squeeze(dim) * weights
    everywhere = -(logs * weight.view(-1, *(1,) * (input.ndim - dim - 1))).sum(dim) * counts
    values = (1 - label_smoothing) * at_target + label_smoothing / input.shape[dim] * everywhere
    return values.sum() / weights.sum() if reduction == "mean" else _reduced(values, reduction)


def _kl_div(input: Tensor, target: Tensor, *, reduction: str = "mean", log_target: bool = False) -> Tensor:
    values = target.exp() * (target - input) if log_target else torch.xlogy(target, target) - target * input
    return values.sum() / len(input) if reduction == "batchmean" else _reduced(values, reduction)


def _gaussian_nll(
    input: Tensor, target: Tensor, var: Tensor | float, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Tensor:
    """Omit the check that no variance is negative, which reads values; the first plain gradient has it."""
    variance = var if isinstance(var, Tensor) else torch.full_like(input, var)
    if variance.shape == input.shape[:-1] and variance.shape != input.shape:
        variance = variance[..., None]
    variance = variance + (variance.clamp(min=eps) - variance).detach()
    values = 0.5 * (variance.log() + (input - target) ** 2 / variance)
    return _reduced(values + 0.5 * math.log(2 * math.pi) if full else values, reduction)


def _triplet_margin(
    anchor: Tensor, positive: Tensor, negative: Tensor, margin: float = 1.0, p: float = 2, eps: float = 1e-6,
    swap: bool = False, *, reduction: str = "mean",
) -> Tensor:
    near, far = (nn.functional.pairwise_distance(anchor, other, p, eps) for other in (positive, negative))
    if swap:
        far = torch.minimum(far, nn.functional.pairwise_distance(positive, negative, p, eps))
    return _reduced((margin + near - far).clamp(min=0), reduction)


def _margin_ranking(
    input1: Tensor, input2: Tensor, target: Tensor, margin: float = 0, *, reduction: str = "mean"
) -> Tensor:
    return _reduced((margin - target * (input1 - input2)).clamp(min=0), reduction)


def _soft_margin(input: Tensor, target: Tensor, *, reduction: str = "mean") -> Tensor:
    values = -target * input
    return _reduced(torch.logaddexp(values, torch.zeros_like(values)), reduction)


def _reduced(values: Tensor, reduction: str) -> Tensor:
    return values.mean() if reduction == "mean" else values.sum() if reduction == "sum" else values


def _or_pytorchs(written_out: Callable[..., Tensor], usual: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The loss written out, unless a deprecated argument is given."""
    def own(*args: object, **named: object) -> Tensor:
        given = dict(signature(usual).bind(*args, **named).arguments)
        if any(given.pop(name, None) is not None for name in ("size_average", "reduce")):
            return usual(*args, **named)
        return written_out(**given)

    return own


LOSSES: dict[str, Callable[..., Tensor]] = {
    "cross_entropy": _or_pytorchs(_cross_entropy, nn.functional.cross_entropy),
    "kl_div": _or_pytorchs(_kl_div, nn.functional.kl_div),
    "gaussian_nll_loss": _gaussian_nll,
    "triplet_margin_loss": _or_pytorchs(_triplet_margin, nn.functional.triplet_margin_loss),
    "margin_ranking_loss": _or_pytorchs(_margin_ranking, nn.functional.margin_ranking_loss),
    "soft_margin_loss": _or_pytorchs(_soft_margin, nn.functional.soft_margin_loss),
}
"""Names of losses of `torch.nn.functional`, and their written-out forms."""


# ------------------------------------------------------------------------------------------ all of them


CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")

STACKED: dict[str, Callable[..., Any]] = {
    "linear": _lowered(_linear),
    "addmm": _lowered(_addmm),
    "prelu": _lowered(torch.prelu),
    **{name: _lowered(getattr(torch, name)) for name in CONVOLUTIONS},
    "__setitem__": _set_item,
    "requires_grad": lambda input: innermost(input).requires_grad,
    "grad_fn": lambda input: innermost(input).grad_fn,
    "batch_norm": _if_mixed(nn.functional.batch_norm, _batch_norm),
    "instance_norm": _if_mixed(nn.functional.instance_norm, _instance_norm),
}
"""Names of functions, and their replacements for stacked tensors."""

POOLS = ("avg_pool1d", "avg_pool2d")
"""Pooling whose gradient PyTorch computes wrongly on a GPU."""

UNRECORDED = ("requires_grad", "grad_fn", "numpy", "__array__", "tolist")
"""Attributes and values that a trace would freeze."""

NEW = ("zeros", "zeros_like", "empty", "empty_like")
"""Functions that make a tensor, each model its own: vmap cannot write stacked values into a tensor that is not."""

CONSTANTS = ("ones", "ones_like", "full", "full_like", "eye", "arange", "tensor")
"""Further functions that make a tensor, into which few models write."""

PLAIN: dict[str, Function] = {
    "scaled_dot_product_attention": attention,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "one_hot": _one_hot,
    "normalize": _normalize,
    "_weight_norm": _weight_norm,
    "avg_pool1d": _avg_pool(nn.functional.avg_pool1d, 1),
    "avg_pool2d": _avg_pool(nn.functional.avg_pool2d, 2),
    "bilinear": _bilinear,
    "embedding": _embedding,
    "rrelu": _rrelu,
    "embedding_bag": _embedding_bag,
    "data": Tensor.detach,
    "view_as_complex": lambda input: torch.complex(input[..., 0], input[..., 1]),
    **{f"{name}_": _in_place(getattr(torch, name)) for name in ("addcmul", "clamp", "lerp", "scatter", "tril", "triu")},
    "contiguous": lambda input, memory_format=None: input.contiguous(),
    "to": lambda input, *args, memory_format=None, **named: input.to(*args, **named) if args or named else input,
    **RECURRENT,
    **LOSSES,
}
"""Names of functions, and their replacements for all tensors."""
