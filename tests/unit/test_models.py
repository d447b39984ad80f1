"""The networks have the paper's sizes, and the same gradients stacked over nodes as one by one."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, stack_module_state, vmap

from quasiglobal.errors import InputError
from quasiglobal.models import MODELS, build
from quasiglobal.models.layers import convolution
from quasiglobal.models.norms import EvoNormS0

# Small enough to run in seconds, large enough that the last stage has 2 x 2 positions. With a single position,
# the batch normalisation after the next convolution cancels a shift exactly: its gradient is only rounding.
SMALL = {
    "resnet8": {"width": 0.5, "shape": (3, 8, 8)},
    "resnet20": {"width": 0.25, "shape": (3, 8, 8)},
    "resnet18": {"width": 0.125, "shape": (3, 64, 64)},
    "vgg11": {"width": 0.0625, "shape": (3, 32, 32)},
    "mlp": {"width": 0.125, "shape": (1, 4, 4)},
    "cnn": {"width": 0.5, "shape": (1, 8, 8)},
}
CASES = [(name, norm) for name in SMALL for norm in MODELS.get(name, MODELS["resnet20"]).norms]
each = pytest.mark.parametrize(("name", "norm"), CASES)


def small(name, norm, seed=0):
    torch.manual_seed(seed)
    return build(name, norm=norm, **SMALL[name])


def images(name, *leading, dtype=torch.float32):
    random = torch.Generator().manual_seed(1)
    return torch.randn(*leading, *SMALL[name]["shape"], generator=random, dtype=dtype)


def count(model):
    return sum(weights.numel() for weights in model.parameters())


@pytest.mark.parametrize("norm", ["bn", "gn", "evonorm", "evonorm-released"])
def test_resnets_have_the_papers_number_of_parameters(norm):
    assert count(build("resnet20", norm=norm)) == 272_474
    assert count(build("resnet20", norm=norm, width=2, classes=1000)) == 1_212_296
    assert count(build("resnet18", norm=norm, classes=1000, shape=(3, 224, 224))) == 11_689_512


def test_vgg_and_the_small_networks_have_theirs():
    assert count(build("vgg11", width=0.5)) == 2_308_810
    assert count(build("vgg11-dropout")) == count(build("vgg11")) + 2 * (512 * 512 + 512) == 9_750_922
    assert count(build("mlp", shape=(1, 8, 8))) == 64 * 128 + 128 * 128 + 128 * 10 + 128 + 128 + 10
    assert all(20_000 < count(build("cnn", norm=norm, shape=(1, 8, 8))) < 60_000 for norm in MODELS["cnn"].norms)


@pytest.mark.parametrize("depth", [8, 14, 20, 32, 56])
def test_a_cifar_resnet_is_as_deep_as_its_name(depth):
    layers = build(f"resnet{depth}").modules()
    kernels = [layer.kernel_size for layer in layers if isinstance(layer, nn.Conv2d)]
    assert kernels.count((3, 3)) + 1 == depth   # and the linear layer
    assert kernels.count((1, 1)) == 2


@each
def test_one_row_of_logits_an_image_and_a_gradient_for_every_weight(name, norm):
    torch.manual_seed(0)
    model = build(name, norm=norm, classes=7, **SMALL[name])
    logits = model(images(name, 3))
    assert logits.shape == (3, 7)
    logits.square().sum().backward()
    assert all(weights.grad.isfinite().all() for weights in model.parameters())
    # Another memory layout, as a data loader or a compiler may produce.
    turned = images(name, 3).transpose(-1, -2).contiguous().transpose(-1, -2)
    torch.testing.assert_close(model(turned), logits, rtol=1e-4, atol=1e-4)


OTHERS = [
    ("resnet20", (1, 28, 28)), ("resnet18", (3, 32, 32)), ("resnet18", (3, 48, 80)), ("vgg11", (1, 64, 48)),
    ("cnn", (1, 28, 28)), ("cnn", (3, 9, 15)), ("mlp", (5,)),
]


@pytest.mark.parametrize(("name", "shape"), OTHERS)
def test_other_shapes_of_input(name, shape):
    assert build(name, width=0.25, classes=3, shape=shape)(torch.randn(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("channels", "groups"), [(1, 1), (16, 16), (32, 32), (40, 8), (48, 16), (64, 32), (33, 1)]
)
def test_evonorm_s0_is_its_formula(channels, groups):
    random = np.random.default_rng(0)
    x = random.normal(1.0, 2.0, (2, channels, 3, 4))
    gamma, beta = random.normal(size=(2, channels))
    layer = EvoNormS0(channels).double()
    layer.load_state_dict({"weight": torch.tensor(gamma), "bias": torch.tensor(beta)})
    expected = np.empty_like(x)
    size = channels // groups
    for b in range(2):
        for c in range(channels):
            group = x[b, c // size * size : c // size * size + size]
            variance = ((group - group.mean()) ** 2).sum() / (group.size - 1)
            sigmoid = 1 / (1 + np.exp(-x[b, c]))
            expected[b, c] = x[b, c] * sigmoid / math.sqrt(variance + 1e-5) * gamma[c] + beta[c]
    np.testing.assert_allclose(layer(torch.tensor(x)).detach(), expected, rtol=1e-12, atol=1e-12)


def kinds(model):
    return [type(layer) for layer in model.modules()]


def test_what_follows_a_convolution_in_each_kind_of_resnet20():
    blocks, convolutions = 9, 19 + 2
    bn = kinds(build("resnet20", norm="bn"))
    assert (bn.count(nn.BatchNorm2d), bn.count(nn.ReLU)) == (convolutions, 1 + 2 * blocks)
    gn = build("resnet20", norm="gn")
    assert {layer.num_groups for layer in gn.modules() if isinstance(layer, nn.GroupNorm)} == {2}
    assert kinds(gn).count(nn.GroupNorm) == convolutions
    text = kinds(build("resnet20", norm="evonorm"))
    assert (text.count(EvoNormS0), text.count(nn.ReLU)) == (convolutions, 0)
    released = kinds(build("resnet20", norm="evonorm-released"))
    assert released.count(EvoNormS0) == 1 + blocks          # the stem, the first of each block
    assert released.count(nn.BatchNorm2d) == blocks + 2     # the second of each block, the shortcuts
    assert released.count(nn.ReLU) == blocks                # after each sum


def test_the_first_release_tests_five_of_its_batch_norms_by_running_statistics():
    torch.manual_seed(0)
    first = build("resnet20", norm="evonorm-first-release", width=0.25).double()
    later = build("resnet20", norm="evonorm-released", width=0.25).double()
    norms = [layer for layer in first.modules() if isinstance(layer, nn.BatchNorm2d)]
    assert [layer.track_running_stats for layer in norms].count(True) == 5 == len(norms) - 6
    tracked = {name for name, layer in first.named_modules() if getattr(layer, "track_running_stats", False)}
    assert tracked == {"stages.0.residual.3", "stages.3.residual.3", "stages.3.shortcut.1", "stages.6.residual.3",
                       "stages.6.shortcut.1"}
    later.load_state_dict(first.state_dict(), strict=False)
    x = torch.rand(6, 3, 32, 32).double()
    with torch.no_grad():
        assert torch.equal(first.train()(x), later.train()(x))         # training is the same
        assert not torch.allclose(first.eval()(x), later.eval()(x))


@each
def test_train_and_eval_differ_for_running_statistics_alone(name, norm):
    """evonorm-released evaluates with the statistics of the batch, as the paper's tables did."""
    model, x = small(name, norm), images(name, 3)
    with torch.no_grad():
        trained, evaluated = model.train()(x), model.eval()(x)
    running = norm in ("bn", "evonorm-first-release", "evonorm-running")
    assert torch.equal(trained, evaluated) != running
    assert any(True for _ in model.buffers()) == running


@each
def test_stacked_over_nodes_is_each_alone(name, norm):
    """vmap over three models' parameters and buffers: losses, gradients and batch statistics of each.

    Both sides are float64 sums in different orders, 4e-15 apart when this was written. The tolerance is
    1e-10 of a gradient's largest entry, which an error in a single image of a layer would exceed.
    """
    nodes, batch = 3, 3
    models = [small(name, norm, seed).double() for seed in range(nodes)]
    x = images(name, nodes, batch, dtype=torch.float64)
    y = torch.arange(nodes * batch).view(nodes, batch) % 10
    weights, buffers = stack_module_state(models)

    def loss(weights, buffers, x, y):
        logits = functional_call(models[0], (weights, buffers), (x,))
        return nn.functional.cross_entropy(logits, y)

    # The vmapped call writes the batch statistics into `buffers`, in place.
    losses = vmap(loss)(weights, buffers, x, y)
    slopes = torch.autograd.grad(losses.sum(), list(weights.values()))

    for i, model in enumerate(models):
        alone = nn.functional.cross_entropy(model(x[i]), y[i])
        alone.backward()
        torch.testing.assert_close(losses[i], alone, rtol=1e-12, atol=0)
        for (key, own), stacked in zip(model.named_parameters(), slopes, strict=True):
            error = (stacked[i] - own.grad).abs().max()
            assert error <= 1e-10 * own.grad.abs().max(), key
        for key, own in model.named_buffers():
            torch.testing.assert_close(buffers[key][i], own, rtol=1e-12, atol=1e-15)
            assert not key.endswith("num_batches_tracked") or own == 1


def test_a_convolution_starts_at_hes_scale():
    torch.manual_seed(0)
    layer = convolution(64, 128, kernel=3, bias=True)
    # 73,728 draws. Standard errors: 0.3 % for the deviation, 0.4 % of it for the mean. Tolerance: four of these.
    deviation = math.sqrt(2 / (3 * 3 * 128))
    assert layer.weight.std().item() == pytest.approx(deviation, rel=0.012)
    assert abs(layer.weight.mean().item()) < 0.016 * deviation
    assert layer.weight.abs().max() > 3.5 * deviation   # normal, not uniform
    assert not layer.bias.any()


@each
def test_norms_start_at_one_and_zero_and_only_vgg_and_bare_convolutions_have_biases(name, norm):
    for layer in small(name, norm).modules():
        if isinstance(layer, nn.BatchNorm2d | nn.GroupNorm | EvoNormS0):
            assert (layer.weight == 1).all()
            assert (layer.bias == 0).all()
        if isinstance(layer, nn.Conv2d):
            assert (layer.bias is not None) == (norm == "none")


@each
def test_a_seed_makes_the_network(name, norm):
    one, same, other = (list(small(name, norm, seed).parameters()) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@each
def test_no_activation_is_overwritten(name, norm):
    assert not any(getattr(layer, "inplace", False) for layer in small(name, norm).modules())
    x = images(name, 3)
    small(name, norm)(x)
    assert torch.equal(x, images(name, 3))


def test_defaults_are_bn_or_what_there_is():
    torch.manual_seed(0)
    assert nn.BatchNorm2d in kinds(build("resnet20"))
    assert count(build("vgg11", norm="none")) == count(build("vgg11"))
    assert count(build("mlp", norm="none")) == count(build("mlp"))


BAD = {
    "unknown model 'resnt20'; did you mean 'resnet20'?": ("resnt20", {}),
    "unknown model 'transformer'; known: resnet20, resnet18, vgg11, vgg11-dropout, mlp, cnn": ("transformer", {}),
    "resnet21: the depth must be 6k + 2, such as resnet20": ("resnet21", {}),
    "resnet34: the depth must be 6k + 2, such as resnet32": ("resnet34", {}),
    "resnet2: the depth must be 6k + 2, such as resnet8": ("resnet2", {}),
    "unknown norm 'evo'; did you mean 'evonorm'?": ("resnet20", {"norm": "evo"}),
    "resnet20 has no norm 'none'; use bn, gn, evonorm, evonorm-released, evonorm-first-release, evonorm-running": (
        "resnet20", {"norm": "none"}
    ),
    "vgg11 has no norm 'bn'; use none": ("vgg11", {"norm": "bn"}),
    "mlp has no norm 'gn'; use none": ("mlp", {"norm": "gn"}),
    "gn needs an even number of channels for two groups, got 5; change width":
        ("resnet20", {"norm": "gn", "width": 0.3}),
    "width must be a positive number, got 0; the paper's are 0.5, 1 and 2": ("resnet20", {"width": 0}),
    "width must be a positive number, got nan; the paper's are 0.5, 1 and 2": ("cnn", {"width": math.nan}),
    "classes must be at least 1, the number of outputs, got 0": ("resnet20", {"classes": 0}),
    "shape must be positive whole numbers, such as (3, 32, 32), got nothing": ("mlp", {"shape": ()}),
    "shape must be positive whole numbers, such as (3, 32, 32), got 1 x 8 x 0": ("cnn", {"shape": (1, 8, 0)}),
    "vgg11 needs images of shape (channels, height, width), got 64; use mlp": ("vgg11", {"shape": (64,)}),
    "vgg11 needs images of 32 x 32 or more, got 1 x 28 x 28; enlarge them": ("vgg11", {"shape": (1, 28, 28)}),
    "cnn needs images of 4 x 4 or more, got 1 x 3 x 8; enlarge them": ("cnn", {"shape": (1, 3, 8)}),
}


@pytest.mark.parametrize("sentence", BAD)
def test_bad_input_is_one_sentence_with_the_remedy(sentence):
    name, options = BAD[sentence]
    with pytest.raises(InputError) as error:
        build(name, **options)
    assert str(error.value) == sentence


def test_evonorm_says_when_there_is_nothing_to_vary():
    with pytest.raises(InputError, match="needs two numbers in a group"):
        EvoNormS0(16)(torch.randn(2, 16, 1, 1))
