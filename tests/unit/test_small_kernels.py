"""Small kernels: a batch of images, the usual loss, LayerNorm. On a CPU, in Triton's interpreter."""

import os

import pytest
import torch
from torch import nn

from quasiglobal.data.inputs import PAD, Images
from quasiglobal.metrics import accuracy

pytest.importorskip("triton")

from quasiglobal.data.image_kernel import show
from quasiglobal.stacked.kernels import operations
from quasiglobal.stacked.kernels.cross_entropy import CrossEntropy
from quasiglobal.stacked.kernels.normalisation import layer_norm, layer_norm_back, layer_norm_shares

DEVICE = torch.device("cpu" if "TRITON_INTERPRET" in os.environ else "cuda")


def generator():
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("augmentation", ["flip-crop", "resize-crop", "none"])
def test_a_kernel_shows_images_bit_for_bit(augmentation):
    moving = augmentation == "flip-crop"
    pictures = torch.randint(0, 256, (5, 3, 8, 16), dtype=torch.uint8, generator=generator())
    images = Images(
        pictures, scale=255.0, mean=(0.1, 0.2, 0.3), std=(0.3, 0.7, 0.9), device=torch.device("cpu"),
        augmentation=augmentation, moving=moving,
    )
    index = torch.tensor([[4, 0, 1], [1, 1, 3]])
    moves = (
        (torch.tensor([[True, False, True], [False, True, True]]),
         torch.randint(0, 2 * PAD + 1, (2, 3, 2), generator=generator()))
        if moving
        else ()
    )
    for part in (slice(None), slice(2)):                    # the last batch of an epoch may be smaller
        drawn = [values[:, part] for values in (index, *moves)]
        expected = images.show(*drawn)
        stored, mean, std, at, *how = (
            value.to(DEVICE) for value in (images.x, images.mean, images.std, *drawn)
        )
        shown = show(stored, expected.shape[2:], mean, std, at, *how or (None, None))
        assert shown.cpu().equal(expected)


@pytest.mark.parametrize(("examples", "classes"), [(5, 3), (300, 17)])
def test_a_kernel_computes_cross_entropy_and_accuracy(examples, classes):
    outputs = 3 * torch.randn(2, examples, classes, generator=generator())
    targets = torch.randint(0, classes, (2, examples), generator=generator())
    targets[0, 1] = -100                                    # does not count
    outputs[1, 0, :2] = 50.0                                # a tie, and far from the others
    ours, theirs = (outputs.to(device).clone().requires_grad_() for device in (DEVICE, "cpu"))
    losses, right = CrossEntropy.apply(ours, targets.to(DEVICE))
    pairs = list(zip(theirs, targets, strict=True))
    expected = torch.stack([nn.functional.cross_entropy(*pair) for pair in pairs])
    torch.testing.assert_close(losses.cpu(), expected)
    torch.testing.assert_close(right.cpu(), torch.stack([accuracy(*pair).mean() for pair in pairs]))
    weights = torch.tensor([1.0, 0.5])
    (losses * weights.to(DEVICE)).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(ours.grad.cpu(), theirs.grad)


@pytest.mark.parametrize(("pixels", "channels"), [(300, 24), (3, 96)])
def test_a_kernel_normalises_pixels_as_layer_norm_does(pixels, channels):
    dtype = torch.float64 if DEVICE.type == "cpu" else torch.float32
    x, dy = (torch.randn(2, pixels, channels, dtype=dtype, generator=generator()).to(DEVICE) for _ in range(2))
    rows = torch.randn(2, 2 * channels + 1, dtype=dtype, generator=generator()).to(DEVICE)
    weight, bias = rows[:, :channels], rows[:, channels:-1]
    y, moments = layer_norm(x, weight, bias, 1e-5, dtype)
    sums = x.new_empty(layer_norm_shares(2, pixels), 2, 2 * channels)
    dx = layer_norm_back(x, weight, moments, dy, sums)
    for k in range(2):
        given = [value[k].detach().clone().requires_grad_() for value in (x, weight, bias)]
        expected = operations.layer_norm(*given, 1e-5)
        expected.backward(dy[k])
        torch.testing.assert_close(y[k], expected.detach())
        torch.testing.assert_close(dx[k], given[0].grad)
        torch.testing.assert_close(sums.sum(0)[k], torch.cat([given[1].grad, given[2].grad]))
