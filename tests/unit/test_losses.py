"""Losses of several models at once: values and gradients are PyTorch's for each model, and none is computed alone."""

import warnings

import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional

from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.routes import Traced
from quasiglobal.stacked.stack import Stack
from quasiglobal.stacked.stackable import LOSSES, stackable

K, BATCH, CLASSES = 3, 8, 5
WEIGHT = torch.arange(1.0, CLASSES + 1, dtype=torch.float64)


def signs(targets):
    return (2 * (targets % 2) - 1).double()


def dice(output, targets):
    """As often written for segmentation, with `one_hot`."""
    shares, classes = output.softmax(1), functional.one_hot(targets, CLASSES).double()
    return 1 - 2 * (shares * classes).sum() / (shares.sum() + classes.sum())


def by_scatter(output, targets):
    """Cross-entropy with classes that are scattered into zeros."""
    classes = torch.zeros_like(output).scatter_(1, targets[:, None], 1.0)
    return -(classes * output.log_softmax(1)).sum(1).mean()


CASES = {
    "dice": dice,
    "by-scatter": by_scatter,
    "weights": nn.CrossEntropyLoss(WEIGHT),
    "smoothing": nn.CrossEntropyLoss(label_smoothing=0.1),
    "both": nn.CrossEntropyLoss(WEIGHT, label_smoothing=0.1),
    "both, ignoring": nn.CrossEntropyLoss(WEIGHT, ignore_index=0, label_smoothing=0.1),
    "both, sum": nn.CrossEntropyLoss(WEIGHT, reduction="sum", label_smoothing=0.1),
    "both, none": lambda o, t: nn.CrossEntropyLoss(WEIGHT, reduction="none", label_smoothing=0.1)(o, t).square().mean(),
    "both, images": lambda o, t: functional.cross_entropy(
        o.T.reshape(1, CLASSES, 2, 4), t.view(1, 2, 4), WEIGHT, label_smoothing=0.1
    ),
    "kl": lambda o, t: functional.kl_div(o.log_softmax(1), 0.1 + functional.one_hot(t, CLASSES) / 2),
    "kl, batchmean, zeros": lambda o, t: functional.kl_div(
        o.log_softmax(1), functional.one_hot(t, CLASSES).double(), reduction="batchmean"
    ),
    "kl, logs": lambda o, t: functional.kl_div(
        o.log_softmax(1), (o + 1).log_softmax(1), reduction="sum", log_target=True
    ),
    "gaussian": lambda o, t: functional.gaussian_nll_loss(o[:, 0], t.double(), o[:, 1].exp()),
    "gaussian, clamped": lambda o, t: functional.gaussian_nll_loss(
        o[:, :2], t[:, None].double(), o[:, 2].square(), full=True, eps=0.05, reduction="sum"
    ),
    "triplet": lambda o, t: functional.triplet_margin_loss(o[:2], o[2:4], o[4:6]),
    "triplet, swap": lambda o, t: functional.triplet_margin_loss(o[:2], o[2:4], o[4:6], 0.5, p=1, swap=True),
    "ranking": lambda o, t: functional.margin_ranking_loss(o[:, 0], o[:, 1], signs(t), 0.2),
    "soft margin": lambda o, t: functional.soft_margin_loss(o[:, 0], signs(t), reduction="sum"),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides the total loss")
def test_a_loss_of_all_models_is_pytorchs_for_each(name, caplog):
    torch.manual_seed(0)
    loss, module = CASES[name], nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())) + 0.3 * torch.randn(K, layout.size, dtype=torch.float64)
    inputs, targets = torch.randn(K, BATCH, 6, dtype=torch.float64), torch.randint(0, CLASSES, (K, BATCH))
    model = Stack(module, loss, layout, "fp64")
    found = model.gradients(x, {}, inputs, targets)
    assert type(model.route) is Traced
    assert not caplog.records, "vmap computes no operation for one model after the other"
    for i in range(K):
        module.load_state_dict(layout.views(x[i]))
        module.zero_grad()
        expected = loss(module(inputs[i]), targets[i])
        expected.backward()
        torch.testing.assert_close(found.losses[i], expected.detach(), rtol=1e-12, atol=1e-14)
        g = layout.row({key: parameter.grad for key, parameter in module.named_parameters()})
        torch.testing.assert_close(found.g[i], g, rtol=1e-9, atol=1e-13)


def test_deprecated_arguments_are_pytorchs():
    x, y = torch.rand(K, 4), torch.rand(K, 4)

    def loss(x, y):
        with stackable((x, y)):
            return functional.soft_margin_loss(x, y, size_average=False)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(vmap(loss)(x, y), torch.stack([loss(*pair) for pair in zip(x, y, strict=True)]))
    assert set(LOSSES) <= set(dir(functional))
