"""Transformers: stacked gradients are each model's own, whatever of them is trained."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tiny_models import texts, write_model
from torch import nn

from quasiglobal.flat import Layout
from quasiglobal.tasks.gradients import StackedModel

pytest.importorskip("transformers", reason="needs the extra nlp")

from quasiglobal.tasks.models.language import language_model

K, BATCH, LENGTH, CLASSES = 3, 5, 16, 4


@dataclass
class Case:
    """K models around one start, and what they see."""

    model: StackedModel
    x: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor


def case(name, train="all", **how):
    torch.manual_seed(0)
    module = language_model(name, classes=CLASSES, pretrained=False, train=train, **how).double()
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    x = x + 0.05 * torch.randn(x.shape, dtype=x.dtype)
    inputs, targets = texts(K, BATCH, LENGTH), torch.randint(0, CLASSES, (K, BATCH))
    return Case(StackedModel(module, nn.functional.cross_entropy, layout, "fp64"), x, inputs, targets)


def own_gradients(made, attention="eager"):
    """Each model's loss and gradient by plain PyTorch and transformers' own attention."""
    losses, gradients = [], []
    for i in range(K):
        module = copy.deepcopy(made.model.module)
        module.model.set_attn_implementation(attention)
        module.load_state_dict(made.model.layout.views(made.x[i]), strict=False)
        module.train()
        loss = nn.functional.cross_entropy(module(made.inputs[i]), made.targets[i])
        loss.backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
        losses.append(loss.detach())
        gradients.append(made.model.layout.row(grads))
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")      # DeBERTa's
@pytest.mark.parametrize("train", ["all", "head", "lora:2"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "gpt2", "deberta"])
def test_stacked_gradients_are_each_models_own(tmp_path, kind, train):
    made = case(write_model(tmp_path, kind), train)
    assert made.model.outside == (kind != "deberta"), "which does not let its attention be replaced"
    losses, _, g, _ = made.model.gradients(made.x, {}, made.inputs, made.targets)
    expected, gradients = own_gradients(made)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert (gradients.norm(dim=1) > 1e-3).all()
    assert ((g - gradients).norm(dim=1) <= 1e-10 * gradients.norm(dim=1)).all()


@pytest.mark.parametrize("train", ["all", "head", "lora:2"])
def test_outputs_are_each_models_own_and_padding_changes_nothing(tmp_path, train):
    made = case(write_model(tmp_path, dropout=True), train)
    padded = nn.functional.pad(made.inputs, (0, 16))
    outputs, longer = (made.model.outputs(made.x, {}, shown) for shown in (made.inputs, padded))
    torch.testing.assert_close(longer, outputs, rtol=1e-10, atol=1e-12)
    for i in range(K):
        module = copy.deepcopy(made.model.module).eval()
        module.load_state_dict(made.model.layout.views(made.x[i]), strict=False)
        for batch in range(K):
            torch.testing.assert_close(outputs[i, batch], module(made.inputs[batch]).detach(), rtol=1e-10, atol=1e-12)
