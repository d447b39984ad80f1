"""A zoo of small networks as users write them: `ZOO` has each with its examples and its loss.

The tests (`test_zoo.py`) compute the gradients of several copies of each by every route; the benchmark
(`benchmarks/zoo.py`) trains some of them at a realistic width.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._pytree import tree_map
from zoo_attention import GPT, HandmadeViT, Mixer, Swin, Translator, ViT
from zoo_classifiers import (
    ConvNeXt,
    DenseNet,
    EfficientNet,
    GhostNet,
    Inception,
    MobileNetV2,
    MobileNetV3,
    RepVGG,
    ResNeXt,
    ShuffleNet,
    SqueezeNet,
)
from zoo_habits import (
    ChannelsLast,
    Checkpointed,
    ChecksValues,
    ClippedWeights,
    Derivative,
    Embeddings,
    Fourier,
    HalvedBackward,
    KeepsActivations,
    Latents,
    NormalisesInPlace,
    PartlyFrozen,
    Pruned,
    ReadByNumPy,
    Rotary,
    ScaledByAHook,
    SparseGraph,
    StoppedByData,
    Teacher,
    TiedPadding,
    WritesIntoConstants,
    distance,
)
from zoo_images import (
    Autoencoder,
    Choosy,
    Codebook,
    DeepLab,
    Discriminator,
    Dropouts,
    FrozenParts,
    InPlace,
    Norms,
    OddKernels,
    Pools,
    Siamese,
    SimSiam,
    SuperResolution,
    UNet,
    VariationalAutoencoder,
    alignment,
    commitment,
    evidence_bound,
)
from zoo_sequences import (
    GRU,
    LSTM,
    RNN,
    BagOfWords,
    CellLoop,
    Conv1d,
    Conv3d,
    DeepSets,
    GraphNetwork,
    Highway,
    PointNet,
    Tabular,
    TemporalConvolutions,
    TextCNN,
)

Drawing = Callable[[torch.Generator, int, torch.dtype], Any]
"""drawing(generator, size, dtype) → tensors of this many examples."""


@dataclass(frozen=True)
class Entry:
    """A network: how to make it, its examples and its loss."""

    module: Callable[[], nn.Module]
    batch: Drawing
    """Draws (inputs, targets)."""
    loss: Callable[[Any, Any], Tensor] = functional.cross_entropy
    draws: bool = False
    """Whether a training step draws random numbers: dropout, stochastic depth, a random code."""
    one_by_one: bool = False
    """Whether copies cannot be computed together: control flow that depends on the data, hooks, written weights."""
    jumps: bool = False
    """Whether a rounding error may change the result at once, as a choice of the nearest code does."""
    convolutional: bool = False
    """Whether its inputs are images and some layer a convolution that our kernels compute."""
    uncompiled: bool = False
    """Whether a GPU may have to compute it by vmap alone: it reads values, or has complex numbers in bf16."""


def normal(*shape: int) -> Drawing:
    """Draw tensors of this shape from the normal distribution."""
    return lambda generator, size, dtype: torch.randn(size, *shape, generator=generator, dtype=torch.float64).to(dtype)


def whole(end: int, *shape: int, begin: int = 0) -> Drawing:
    """Draw tensors of this shape of whole numbers from `begin` to end − 1, such as classes and tokens."""
    return lambda generator, size, _: torch.randint(begin, end, (size, *shape), generator=generator)


def padded(vocabulary: int, length: int) -> Drawing:
    """Draw texts; the second half of every other text is padding, 0."""
    def draw(generator: torch.Generator, size: int, dtype: torch.dtype) -> Tensor:
        ids: Tensor = whole(vocabulary, length, begin=1)(generator, size, dtype)
        ids[::2, length // 2 :] = 0
        return ids

    return draw


def edges(vertices: int) -> Drawing:
    """Draw symmetric adjacency matrices."""
    def draw(generator: torch.Generator, size: int, dtype: torch.dtype) -> Tensor:
        half = torch.randint(2, (size, vertices, vertices), generator=generator).triu(1)
        return (half | half.mT).to(dtype)

    return draw


def pairs(inputs: Any, targets: Any) -> Drawing:
    """Draw inputs and targets, each a tensor or a tuple or dict of tensors."""
    return lambda *how: tree_map(lambda draw: draw(*how), (inputs, targets))


def by_token(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy of logits [m, length, classes]."""
    return functional.cross_entropy(output.transpose(1, 2), target)


IMAGE, SMALL_IMAGE, SERIES = normal(3, 16, 16), normal(3, 8, 8), normal(7, 3)
LABELLED, SERIES_LABELLED = pairs(IMAGE, whole(10)), pairs(SERIES, whole(5))

CONVOLUTIONAL = {
    "convnext": Entry(ConvNeXt, LABELLED),
    "mobilenet-v2": Entry(MobileNetV2, LABELLED, draws=True),
    "mobilenet-v3": Entry(MobileNetV3, LABELLED),
    "densenet": Entry(DenseNet, LABELLED),
    "efficientnet": Entry(EfficientNet, LABELLED, draws=True),
    "resnext": Entry(ResNeXt, LABELLED),
    "inception": Entry(Inception, LABELLED),
    "shufflenet": Entry(ShuffleNet, LABELLED),
    "squeezenet": Entry(SqueezeNet, LABELLED, draws=True),
    "ghostnet": Entry(GhostNet, LABELLED),
    "repvgg": Entry(RepVGG, LABELLED),
    "odd-kernels": Entry(OddKernels, LABELLED),
    "norms": Entry(Norms, LABELLED),
    "pools": Entry(Pools, LABELLED),
    "in-place": Entry(InPlace, pairs(SMALL_IMAGE, whole(10)), draws=True),
    "dropouts": Entry(Dropouts, LABELLED, draws=True),
    "frozen-parts": Entry(FrozenParts, LABELLED),
    "vit": Entry(ViT, LABELLED, draws=True),
    "swin": Entry(Swin, LABELLED),
    "mixer": Entry(Mixer, LABELLED),
    "unet": Entry(UNet, pairs(IMAGE, whole(3, 16, 16))),
    "deeplab": Entry(DeepLab, pairs(IMAGE, whole(3, 16, 16))),
    "super-resolution": Entry(SuperResolution, pairs(SMALL_IMAGE, IMAGE), functional.l1_loss),
    "autoencoder": Entry(Autoencoder, pairs(IMAGE, IMAGE), functional.mse_loss),
    "variational-autoencoder": Entry(VariationalAutoencoder, pairs(IMAGE, IMAGE), evidence_bound, draws=True),
    "codebook": Entry(Codebook, pairs(IMAGE, IMAGE), commitment, jumps=True),
    "simsiam": Entry(SimSiam, LABELLED, alignment),
    "stopped-by-data": Entry(StoppedByData, LABELLED),
    "channels-last": Entry(ChannelsLast, LABELLED),
    "discriminator": Entry(Discriminator, pairs(IMAGE, normal()), functional.mse_loss),
}

OTHERS = {
    "choosy": Entry(Choosy, LABELLED, one_by_one=True),
    "siamese": Entry(Siamese, pairs((IMAGE, IMAGE), normal()), functional.smooth_l1_loss),
    "handmade-vit": Entry(HandmadeViT, LABELLED),
    "handmade-vit-20": Entry(partial(HandmadeViT, width=40, depth=1), LABELLED),
    "gpt": Entry(GPT, pairs(whole(17, 8), whole(17, 8)), by_token, draws=True),
    "translator": Entry(
        Translator, pairs({"source": padded(13, 7), "target": whole(13, 5, begin=1)}, whole(13, 5)), by_token
    ),
    "conv1d": Entry(Conv1d, pairs(normal(3, 32), whole(5))),
    "conv3d": Entry(Conv3d, pairs(normal(1, 4, 8, 8), whole(5))),
    "temporal-convolutions": Entry(TemporalConvolutions, pairs(normal(3, 12), whole(5, 12)), draws=True),
    "lstm": Entry(LSTM, SERIES_LABELLED, draws=True),
    "gru": Entry(GRU, SERIES_LABELLED),
    "rnn": Entry(RNN, SERIES_LABELLED),
    "cell-loop": Entry(CellLoop, pairs(SERIES, whole(5, 7))),
    "text-cnn": Entry(TextCNN, pairs(padded(17, 8), whole(5)), draws=True),
    "bag-of-words": Entry(BagOfWords, pairs(padded(17, 8), whole(5))),
    "graph-network": Entry(GraphNetwork, pairs((normal(6, 4), edges(6)), whole(3, 6))),
    "deep-sets": Entry(
        DeepSets, pairs({"elements": normal(5, 3), "present": whole(2, 5)}, normal(1)), functional.huber_loss
    ),
    "point-net": Entry(PointNet, pairs(normal(9, 3), whole(5))),
    "highway": Entry(Highway, pairs(normal(6), whole(5)), partial(functional.cross_entropy, label_smoothing=0.1)),
    "tabular": Entry(Tabular, pairs((normal(4), whole(3, 2)), normal()), functional.mse_loss, draws=True),
}

VECTORS, TEXTS = pairs(normal(6), whole(5)), pairs(padded(13, 8), whole(5))

HABITS = {
    "scaled-by-a-hook": Entry(ScaledByAHook, LABELLED, one_by_one=True),
    "read-by-numpy": Entry(ReadByNumPy, LABELLED, one_by_one=True),
    "keeps-activations": Entry(KeepsActivations, LABELLED, one_by_one=True),
    "checkpointed": Entry(Checkpointed, LABELLED, one_by_one=True),
    "checkpointed-reentrant": Entry(partial(Checkpointed, reentrant=True), LABELLED, one_by_one=True),
    "partly-frozen": Entry(PartlyFrozen, VECTORS, one_by_one=True),
    "halved-backward": Entry(HalvedBackward, VECTORS, one_by_one=True),
    "clipped-weights": Entry(ClippedWeights, VECTORS, one_by_one=True),
    "normalises-in-place": Entry(NormalisesInPlace, VECTORS),
    "writes-into-constants": Entry(WritesIntoConstants, VECTORS),
    "checks-values": Entry(ChecksValues, VECTORS, uncompiled=True),
    "pruned": Entry(Pruned, VECTORS),
    "sparse-graph": Entry(SparseGraph, pairs(normal(6, 6), whole(3, 6))),
    "derivative": Entry(Derivative, pairs(normal(2), normal(3)), functional.mse_loss, one_by_one=True),
    "tied-padding": Entry(TiedPadding, pairs(padded(13, 8), whole(13, 8)), by_token),
    "embeddings": Entry(partial(Embeddings, padding_idx=-1), TEXTS),
    "embeddings-by-frequency": Entry(partial(Embeddings, padding_idx=0, scale_grad_by_freq=True), TEXTS),
    "embeddings-sparse": Entry(partial(Embeddings, sparse=True), TEXTS),
    "embeddings-max-norm": Entry(partial(Embeddings, max_norm=1.0), TEXTS, one_by_one=True),
    "fourier": Entry(Fourier, pairs(normal(1, 16), normal(1, 16)), functional.mse_loss, uncompiled=True),
    "fourier-pairs": Entry(
        partial(Fourier, as_pairs=True), pairs(normal(1, 16), normal(1, 16)), functional.mse_loss, uncompiled=True
    ),
    "rotary": Entry(Rotary, pairs(whole(13, 8), whole(13, 8)), by_token),
    "latents": Entry(Latents, SERIES_LABELLED),
    "teacher": Entry(Teacher, pairs(normal(6), normal(6)), distance),
}

ZOO = {name: replace(entry, convolutional=True) for name, entry in CONVOLUTIONAL.items()} | OTHERS | HABITS
