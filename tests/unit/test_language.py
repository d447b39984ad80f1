"""Transformers: stacked gradients equal each model's own, with all weights, the head or adapters trained."""

import copy
from dataclasses import dataclass

import pytest
import torch
from tiny_models import dataset, experiment, learned, task, texts, write_model
from torch import nn

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.common.randomness import seeded
from quasiglobal.errors import InputError
from quasiglobal.models.language import language_model, recompute
from quasiglobal.runs import local as runs
from quasiglobal.runs.export import export, read, save
from quasiglobal.runs.options import Options
from quasiglobal.stacked.layout import Layout
from quasiglobal.stacked.routes import OneByOne, Vectorised
from quasiglobal.stacked.stack import Stack
from quasiglobal.stacked.stackable import stackable
from quasiglobal.training.loop import Call, Loop
from quasiglobal.training.program import Program

pytest.importorskip("transformers", reason="needs the extra nlp")

K, BATCH, LENGTH, CLASSES = 3, 5, 16, 4
CPU = torch.device("cpu")


@dataclass
class Case:
    """K models near one start, with inputs and targets."""

    model: Stack
    x: torch.Tensor
    inputs: torch.Tensor
    targets: torch.Tensor


def case(name, train="all", route=None, **how):
    """Build a case with the default route of this machine or a given route."""
    torch.manual_seed(0)
    module = language_model(name, classes=CLASSES, pretrained=False, train=train, **how).double()
    layout = Layout.of(module)
    x = layout.row(dict(module.named_parameters())).repeat(K, 1)
    x = x + 0.05 * torch.randn(x.shape, dtype=x.dtype)
    inputs, targets = texts(K, BATCH, LENGTH), torch.randint(0, CLASSES, (K, BATCH))
    model = Stack(module, nn.functional.cross_entropy, layout, "fp64", route=route)
    return Case(model, x, inputs, targets)


def own_gradients(made, attention="eager", bf16=False):
    """Each model's loss and gradient, computed by plain PyTorch with transformers' own attention."""
    losses, gradients = [], []
    for i in range(K):
        module = copy.deepcopy(made.model.module)
        module.model.set_attn_implementation(attention)
        module.load_state_dict(made.model.layout.views(made.x[i]), strict=False)
        module.train()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            output = module(made.inputs[i])
        loss = nn.functional.cross_entropy(output.to(made.x.dtype), made.targets[i])
        loss.backward()
        grads = {name: p.grad for name, p in module.named_parameters() if p.requires_grad}
        losses.append(loss.detach())
        gradients.append(made.model.layout.row(grads))
    return torch.stack(losses), torch.stack(gradients)


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")      # from DeBERTa
@pytest.mark.parametrize("train", ["all", "head", "lora:2"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "roberta", "gpt2", "deberta"])
def test_stacked_gradients_are_each_models_own(tmp_path, kind, train):
    made = case(write_model(tmp_path, kind), train)
    route = OneByOne if kind == "deberta" else Vectorised
    assert type(made.model.route) is route, "only DeBERTa's attention cannot be replaced"
    losses, _, g, _ = made.model.gradients(made.x, {}, made.inputs, made.targets)
    expected, gradients = own_gradients(made)
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)
    assert (gradients.norm(dim=1) > 1e-3).all()
    assert ((g - gradients).norm(dim=1) <= 1e-10 * gradients.norm(dim=1)).all()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("train", ["all", "lora:2"])
def test_stacking_costs_no_precision(tmp_path, train, precision):
    made = case(write_model(tmp_path), train)
    _, exact = own_gradients(made)
    layout = made.model.layout
    made.model = Stack(made.model.module.float(), nn.functional.cross_entropy, layout, precision)
    made.x = made.x.float()
    _, _, ours, _ = made.model.gradients(made.x, {}, made.inputs, made.targets)
    _, plain = own_gradients(made, "sdpa", bf16=precision == "bf16")
    assert 0 < (ours - exact).norm() <= 1.5 * (plain - exact).norm()


def test_stacked_linear_layers_are_in_the_precision_that_autocast_has_for_one():
    x, weight, bias = torch.randn(3, 5, 4), torch.randn(3, 6, 4), torch.randn(3, 6)
    layers = {
        "linear": lambda x, weight, bias: nn.functional.linear(x, weight, bias),
        "without bias": lambda x, weight, bias: nn.functional.linear(x, weight),
        "by name": lambda x, weight, bias: nn.functional.linear(x, weight=weight, bias=bias),
        "addmm": lambda x, weight, bias: torch.addmm(bias, x, weight.T),
        "scaled": lambda x, weight, bias: torch.addmm(bias, x, weight.T, alpha=2),
    }
    for name, layer in layers.items():
        with torch.autocast("cpu", torch.bfloat16):
            one = torch.stack([layer(*arguments) for arguments in zip(x, weight, bias, strict=True)])
            with stackable(x):
                stacked, shared = torch.vmap(layer)(x, weight, bias), layer(x[0], weight[0], bias[0])
        assert one.dtype == stacked.dtype == shared.dtype == torch.bfloat16, name
        torch.testing.assert_close(stacked, one, rtol=2**-6, atol=2**-6)


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


def kept_bytes(made):
    """Bytes saved for the backward pass, and the gradient."""
    kept = []

    def keep(value):
        kept.append(value.nbytes)
        return value

    with seeded(CPU, 1), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        _, _, g, _ = made.model.gradients(made.x, {}, made.inputs, made.targets)
    return sum(kept), g


@pytest.mark.parametrize("train", ["all", "lora:2"])
@pytest.mark.parametrize("kind", ["bert", "distilbert", "gpt2"])
def test_recomputing_keeps_less_and_changes_nothing_dropout_included(tmp_path, kind, train):
    for route in (Vectorised, OneByOne):
        made = case(write_model(tmp_path, kind, dropout=True), train, route)
        usual, g = kept_bytes(made)
        recompute(made.model.module)
        made.model.route = route(made.model.route.one)      # which copies the module anew
        fewer, again = kept_bytes(made)
        assert fewer < usual / 2
        assert (again - g).norm() <= 1e-14 * g.norm()


# ------------------------------------------------------------------------------------------------------ training


def trained(chosen, experiments=None):
    program, records = Program(task(chosen), experiments or [chosen], CPU), []
    Loop(program, [Call(lambda loop: records.append(loop.latest[0]))]).run()
    return program, records


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [pytest.param("dadam", marks=pytest.mark.slow), "qg-dadam:released=true"])
def test_adam_makes_steps_of_rounding_where_there_is_no_gradient_and_nowhere_else(tmp_path, algorithm):
    model = write_model(tmp_path)
    chosen = experiment(model, algorithm=algorithm, epochs=4)
    stacked = Program(task(chosen), [chosen], CPU)
    one_by_one = Stack(
        task(chosen).module(0).double(), nn.functional.cross_entropy, stacked.layout, "fp64", route=OneByOne
    )
    alone = Program(task(chosen), [chosen], CPU, model=one_by_one)
    for program in (stacked, alone):
        Loop(program).run()
    apart, learns = (stacked.state.x - alone.state.x).abs(), learned(model)
    assert apart[:, learns].max() < 1e-12
    assert apart[:, ~learns].max() > 1e-10


@pytest.mark.parametrize("train", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("all", "head")), "lora:2"])
def test_a_stopped_training_with_dropout_goes_on_bit_for_bit(tmp_path, train):
    chosen = experiment(write_model(tmp_path, dropout=True), epochs=3, train=train)
    whole, _ = trained(chosen)
    first, second = (Program(task(chosen), [chosen], CPU) for _ in range(2))
    torch.rand(7)                                           # unrelated random draws
    first.train_epoch()
    second.restore([first.checkpoint(0)])
    torch.rand(5)
    Loop(second).run()
    assert second.state.x.equal(whole.state.x)


def test_dropout_differs_from_step_to_step_and_from_seed_to_seed_and_leaves_torchs_numbers_alone(tmp_path):
    chosen = experiment(write_model(tmp_path, dropout=True), lr=1e-30, epochs=1, weight_decay=0.0)
    program = Program(task(chosen), [chosen], CPU)
    program.begin_epoch()
    before = torch.random.get_rng_state()
    losses = []
    for t in (1, 2, 1):
        with program.seeded(t):
            losses.append(program.gradients().losses)
    assert losses[0].equal(losses[2])
    assert not losses[0].isclose(losses[1], rtol=1e-6).any()
    assert torch.random.get_rng_state().equal(before)
    other = Program(task(chosen), [chosen.with_seed(1)], CPU)
    other.begin_epoch()
    with program.seeded(1):
        ours = torch.rand(3)
    with other.seeded(1):
        assert not ours.equal(torch.rand(3))


def test_nodes_that_see_the_same_texts_drop_different_numbers(tmp_path):
    made = case(write_model(tmp_path, dropout=True))
    same = made.inputs[:1].expand_as(made.inputs), made.targets[:1].expand_as(made.targets)
    losses, _, _, _ = made.model.gradients(made.x[:1].expand_as(made.x), {}, *same)
    assert len(set(losses.tolist())) == K


@pytest.mark.parametrize("algorithm", [
    pytest.param(name, marks=() if name in ("qg-dsgdm-n", "qg-dadam", "slowmo") else pytest.mark.slow)
    for name in ALGORITHMS if "gossip" not in name
])
def test_every_algorithm_fine_tunes(tmp_path, algorithm):
    adam = "adam" in algorithm
    chosen = experiment(
        write_model(tmp_path), algorithm=algorithm, topology="star:4" if algorithm == "relaysgd" else "lazy/ring:4",
        lr=0.01 if adam else 0.05, epochs=3, eval_every=3, partition="iid", train="lora:2",
    )
    _, records = trained(chosen)
    assert records[-1]["loss"] < records[0]["loss"]


@pytest.mark.parametrize("train", ["head", "lora:2"])
def test_what_is_frozen_is_nobodys_row_and_the_same_for_all_seeds(tmp_path, train):
    chosen = experiment(write_model(tmp_path), train=train, epochs=1)
    seeds = [chosen, chosen.with_seed(1)]
    together, _ = trained(chosen, seeds)
    head = 4 * 32 + 4
    adapters = 2 * 2 * 2 * (2 * 32)                         # layers, query and value, A and B, rank × width
    assert together.state.x.shape == (8, head + (adapters if train != "head" else 0))
    assert together.bands.bytes_per_step() == 2 * 8 * together.state.x.shape[1]
    for k, seed in enumerate(seeds):
        alone, _ = trained(seed)
        torch.testing.assert_close(together.state.x[4 * k : 4 * k + 4], alone.state.x, rtol=0, atol=1e-10)
    frozen = [name for name, p in together.model.module.named_parameters() if not p.requires_grad]
    ours, theirs = (dict(Program(task(seed), [seed], CPU).model.module.named_parameters()) for seed in seeds)
    assert frozen
    assert all(ours[name].equal(theirs[name]) for name in frozen)


@pytest.mark.parametrize("train", ["all", "lora:2"])
def test_an_exported_model_has_what_was_trained_and_scores_as_its_node_did(tmp_path, train):
    names = tuple(map(str, range(CLASSES)))
    chosen = experiment(write_model(tmp_path / "model"), train=train, precision="fp32", classes=names, shape=(16,))
    (run,) = runs.simulate(chosen, Options(runs=tmp_path, device="cpu"), task=task(chosen))
    data = dataset()
    scores = []
    for node in range(4):
        save(export(run, str(node)), tmp_path / "model.safetensors")
        exported = read(tmp_path / "model.safetensors")
        assert sum(value.numel() for value in exported.state.values()) == run.summary.parameters
        scores.append(float((exported.outputs(data).argmax(dim=-1) == data.test.y).double().mean()))
    assert min(scores) == pytest.approx(run.summary.last["accuracy_worst"], abs=1e-6)
    assert max(scores) == pytest.approx(run.summary.last["accuracy_best"], abs=1e-6)
    if train != "all":
        write_model(tmp_path / "model", num_hidden_layers=3)
        with pytest.raises(InputError, match="other weights"):
            exported.outputs(data)
