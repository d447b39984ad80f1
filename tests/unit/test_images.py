"""Batches and images: order of the examples, and augmentation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import CPU, SHORT, run_all
from torch import nn

from quasiglobal.data.batches import Owner, Plan
from quasiglobal.data.inputs import PAD, Images, random_boxes
from quasiglobal.data.sources import Dataset, Examples
from quasiglobal.runs.building import make_task


def test_nodes_of_unequal_size_cycle_their_own_examples():
    owners = [Owner(0, 0, np.arange(10)), Owner(0, 1, np.arange(10, 14))]
    plan = Plan(owners, batch=4)
    assert plan.sizes == [4, 4]
    index = plan.epoch(0, CPU).index
    assert sorted(index[:, 1].flatten().tolist()) == sorted([*range(10, 14)] * 2)
    assert len(set(index[:, 0].flatten().tolist())) == 8


PICTURES = torch.randint(0, 256, (5, 3, 24, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


MEAN, STD = (0.1, 0.2, 0.3), (1.0, 2.0, 3.0)


def images(augmentation, moving):
    return Images(PICTURES, scale=255.0, mean=MEAN, std=STD, augmentation=augmentation, moving=moving, device=CPU)


def normalised(picture):
    return (picture / 255 - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize("augmentation", ["flip-crop", "resize-crop"])
def test_an_epoch_is_a_function_of_seed_node_and_epoch(augmentation):
    def draws(owners, epoch):
        drawn = Plan(owners, 8, images(augmentation, moving=True).draw).epoch(epoch, CPU)
        return [drawn.index, *drawn.moves]

    owner, other = Owner(3, 1, np.arange(50)), Owner(3, 0, np.arange(50))
    both, alone, later = draws([other, owner], 2), draws([owner], 2), draws([owner], 3)
    assert len(alone) == 3
    for ours, same, new in zip(alone, both, later, strict=True):
        assert ours.equal(same[:, 1:])
        assert not ours.equal(new)


def test_images_are_mirrored_then_moved_then_normalised():
    index, flip = torch.tensor([[3, 1]]), torch.tensor([[True, False]])
    shift = torch.tensor([[[0, 8], [5, 2]]])
    shown = images("flip-crop", moving=True).show(index, flip, shift)
    for k in range(2):
        image = PICTURES[index[0, k]].float()
        image = image.flip(-1) if flip[0, k] else image
        padded = nn.functional.pad(image, (PAD, PAD, PAD, PAD))
        dy, dx = shift[0, k].tolist()
        torch.testing.assert_close(shown[0, k], normalised(padded[:, dy : dy + 24, dx : dx + 32]))
    still = torch.zeros(1, 2, dtype=torch.bool), torch.full((1, 2, 2), PAD)
    unmoved = images("flip-crop", moving=False).show(index)
    torch.testing.assert_close(images("flip-crop", moving=True).show(index, *still), unmoved)


def test_boxes_are_scaled_as_pytorch_scales_a_crop_then_mirrored():
    index, flip = torch.tensor([[3, 1, 0]]), torch.tensor([[True, False, False]])
    box = torch.tensor([[[2, 5, 7, 9], [0, 0, 24, 32], [23, 31, 1, 1]]])
    shown = images("resize-crop", moving=True).show(index, flip, box)
    assert shown.shape == (1, 3, 3, 21, 28)
    for k in range(3):
        top, left, tall, wide = box[0, k].tolist()
        cut = PICTURES[index[0, k], :, top : top + tall, left : left + wide].float()
        scaled = nn.functional.interpolate(cut[None], size=(21, 28), mode="bilinear", align_corners=False)[0]
        expected = normalised(scaled.flip(-1) if flip[0, k] else scaled)
        torch.testing.assert_close(shown[0, k], expected, rtol=0, atol=1e-5)
    middle = PICTURES[index[0, 0], :, 1:22, 2:30].float()
    torch.testing.assert_close(images("resize-crop", moving=False).show(index)[0, 0], normalised(middle))


def test_random_boxes_lie_in_the_picture_and_have_the_stated_sizes():
    boxes = random_boxes(np.random.default_rng(0), 20_000, 256, 200)
    top, left, tall, wide = boxes.T
    assert top.min() == left.min() == 0
    assert (top + tall).max() == 256
    assert (left + wide).max() == 200
    share = tall * wide / (256 * 200)
    assert share.min() > 0.075
    assert share.max() <= 1
    assert 0.35 < share.mean() < 0.55
    whole = (tall == 256) & (wide == 200)
    assert whole.mean() < 0.02
    ratio = (wide / tall)[~whole]
    assert ratio.min() > 0.73
    assert ratio.max() < 1.37


def test_large_pictures_are_trained_on_boxes_and_tested_in_the_middle():
    x = torch.randint(0, 256, (40, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    examples = Examples(x, torch.arange(40) % 4)
    data = Dataset("pictures", examples, examples, tuple("abcd"), 255.0, MEAN, STD, "resize-crop")
    assert data.shape == (3, 28, 28)
    experiment = replace(SHORT, model="cnn", partition="iid", batch=5, epochs=2)
    program, records = run_all(experiment, task=make_task(experiment, data))
    assert program.evaluation.inputs.x.shape == (40, 3, 28, 28)
    assert 0 < records[-1][0]["loss"] < 10
    whole, _ = run_all(experiment, task=make_task(experiment, data))
    assert whole.state.x.equal(program.state.x)
