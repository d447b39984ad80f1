"""qg.metrics: every value equals scikit-learn's; shapes that do not fit raise a one-sentence error."""

import copy
import functools
import inspect
import math
import pickle
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, mean_absolute_error, mean_squared_error, roc_auc_score, top_k_accuracy_score
from torch import nn
from torch.func import vmap

from quasiglobal import metrics
from quasiglobal.errors import InputError
from quasiglobal.metrics import BUILT_IN, accuracy, auc, f1, is_lower, lower, mae, mse, name_of, percent, top5
from quasiglobal.training.experiment import Experiment

GATHERED = [metric for metric in BUILT_IN.values() if hasattr(metric, "compute")]
"""The metrics over all examples."""

EXACT = 1e-12
"""scikit-learn adds in double precision, in another order."""


def random(*shape, seed=0, ties=False):
    """Logits; with ties, whole numbers from -2 to 2."""
    numbers = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return numbers.round().clamp(-2, 2) if ties else numbers


def labels(*shape, classes=2, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def refused(call, *parts):
    with pytest.raises(InputError) as caught:
        call()
    sentence = str(caught.value)
    assert "\n" not in sentence
    for part in parts:
        assert str(part) in sentence


# ------------------------------------------------------------------------------- one number per example


def test_accuracy_of_classes_is_one_number_per_example():
    output, target = random(50, 4), labels(50, classes=4)
    right = accuracy(output, target)
    assert right.dtype == torch.float32
    assert right.tolist() == (output.argmax(1) == target).float().tolist()


def test_accuracy_finds_the_class_axis_of_label_images():
    output, target = random(3, 4, 6, 5), labels(3, 6, 5, classes=4)
    torch.testing.assert_close(accuracy(output, target), (output.argmax(1) == target).float().mean((1, 2)))


def test_accuracy_finds_the_class_axis_of_tokens():
    output, target = random(3, 7, 11), labels(3, 7, classes=11)
    torch.testing.assert_close(accuracy(output, target), (output.argmax(2) == target).float().mean(1))


def test_if_both_axes_fit_axis_1_has_the_classes():
    output, target = random(3, 5, 5), labels(3, 5, classes=5)
    torch.testing.assert_close(accuracy(output, target), (output.argmax(1) == target).float().mean(1))


@pytest.mark.parametrize("shape", [(9,), (9, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_accuracy_of_yes_or_no_is_a_threshold_at_0(shape, dtype):
    output, target = random(9), labels(9)
    expected = ((output > 0) == (target == 1)).float()
    assert accuracy(output.reshape(shape), target.to(dtype)).tolist() == expected.tolist()


def test_accuracy_of_one_class_is_yes_or_no_in_images_too():
    output, target = random(3, 1, 4, 5), labels(3, 4, 5)
    assert torch.equal(accuracy(output, target), accuracy(output[:, 0], target))


def test_accuracy_of_many_labels_is_the_share_of_right_ones():
    output, target = random(9, 4), labels(9, 4).float()
    torch.testing.assert_close(accuracy(output, target), ((output > 0) == (target > 0.5)).float().mean(1))


@pytest.mark.parametrize("classes", [6, 20])
def test_top5_is_scikit_learns(classes):
    output, target = random(200, classes), labels(200, classes=classes)
    expected = top_k_accuracy_score(target, output, k=5, labels=range(classes))
    assert top5(output, target).mean().item() == pytest.approx(expected, abs=1e-6)


def test_top5_of_fewer_classes_is_1_and_pixels_are_averaged():
    assert top5(random(8, 3), labels(8, classes=3)).tolist() == [1.0] * 8
    output, target = random(4, 9, 2, 3), labels(4, 2, 3, classes=9)
    each = torch.stack([top5(output[:, :, i, j], target[:, i, j]) for i in range(2) for j in range(3)])
    torch.testing.assert_close(top5(output, target), each.mean(0))


@pytest.mark.parametrize("shape", [(30,), (30, 3), (30, 2, 4)])
@pytest.mark.parametrize(("metric", "expected"), [(mse, mean_squared_error), (mae, mean_absolute_error)])
def test_errors_are_scikit_learns(metric, expected, shape):
    output, target = random(*shape).double(), random(*shape, seed=2).double()
    each = metric(output, target)
    assert each.shape == (30,)
    assert each.dtype == torch.float64
    assert each.mean().item() == pytest.approx(expected(target.flatten(), output.flatten()), abs=EXACT)


@pytest.mark.parametrize("metric", [mse, mae])
def test_a_column_is_compared_with_a_row_entry_by_entry(metric):
    output, target = random(5), random(5, seed=2)
    expected = metric(output, target)
    assert torch.equal(metric(output[:, None], target), expected)
    assert torch.equal(metric(output, target[:, None]), expected)
    assert torch.equal(metric(output[:, None], target[:, None]), expected)


@pytest.mark.parametrize("metric", [mse, mae])
def test_errors_of_half_precision_outputs_and_whole_targets_are_in_single_precision(metric):
    each = metric(torch.tensor([300.0, 2.0], dtype=torch.float16), torch.tensor([0, 1]))
    assert each.dtype == torch.float32
    assert each.isfinite().all()


CASES = [
    (accuracy, random(4, 6, 3), labels(6, classes=3)),
    (accuracy, random(4, 6, 3, 2, 2), labels(6, 2, 2, classes=3)),
    (accuracy, random(4, 6, 7, 3), labels(6, 7, classes=3)),
    (accuracy, random(4, 6, 1), labels(6)),
    (accuracy, random(4, 6, 5), labels(6, 5).float()),
    (top5, random(4, 6, 8), labels(6, classes=8)),
    (top5, random(4, 6, 8, 2, 3), labels(6, 2, 3, classes=8)),
    (mse, random(4, 6, 1), random(6)),
    (mae, random(4, 6, 5), random(6, 5)),
]


@pytest.mark.parametrize(("metric", "outputs", "target"), CASES)
def test_each_function_takes_stacked_models_by_vmap(metric, outputs, target):
    expected = torch.stack([metric(output, target) for output in outputs])
    assert torch.equal(vmap(metric, in_dims=(0, None))(outputs, target), expected)
    assert torch.equal(vmap(metric)(outputs, target.expand(4, *target.shape)), expected)
    assert torch.equal(vmap(lower(metric), in_dims=(0, None))(outputs, target), expected)


@pytest.mark.parametrize("metric", [accuracy, top5, *GATHERED])
@pytest.mark.parametrize(
    ("output", "target"), [((8, 3), (4,)), ((8,), (8, 1)), ((8, 3), (8, 2)), ((8, 3, 2), (8, 4)), ((), ()), ((3,), ())]
)
def test_class_outputs_that_do_not_fit_the_targets_name_both_shapes(metric, output, target):
    refused(lambda: metric(torch.zeros(output), torch.zeros(target)), name_of(metric), list(output), list(target))


@pytest.mark.parametrize("metric", [mse, mae])
@pytest.mark.parametrize(
    ("output", "target"), [((8, 2), (8,)), ((8,), (8, 2)), ((8,), (4,)), ((8, 1), (4,)), ((1,), (8,)), ((), ())]
)
def test_outputs_that_do_not_fit_the_targets_are_never_broadcast(metric, output, target):
    refused(lambda: metric(torch.zeros(output), torch.zeros(target)), name_of(metric), list(output), list(target))


def test_top5_of_yes_or_no_is_refused():
    refused(lambda: top5(random(8, 1), labels(8)), "top5", "use accuracy")
    refused(lambda: top5(random(8, 3), labels(8, 3)), "top5", "use accuracy")


# ------------------------------------------------------------------------------------ over all examples


def in_batches(metric, output, target, size=7):
    metric = metric()
    for a, b in zip(output.split(size), target.split(size), strict=True):
        metric.update(a, b)
    return metric.compute()


@pytest.mark.parametrize("average", ["macro", "micro"])
@pytest.mark.parametrize("classes", [2, 3, 40])
@pytest.mark.parametrize("seed", range(3))
def test_f1_of_classes_is_scikit_learns(classes, seed, average):
    output, target = random(30, classes, seed=seed), labels(30, classes=classes, seed=seed + 9)
    expected = f1_score(target, output.argmax(1), average=average, zero_division=0)
    assert f1(output, target, average=average) == pytest.approx(expected, abs=EXACT)
    assert in_batches(f1(average=average), output, target) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("average", ["macro", "micro"])
def test_f1_of_columns_is_scikit_learns_also_for_columns_without_a_yes(average):
    output, target = random(30, 5), labels(30, 5)
    output[:, 2], target[:, 2] = -1, 0
    target[:, 3] = 0
    expected = f1_score(target, output > 0, average=average, zero_division=0)
    assert f1(output, target.float(), average=average) == pytest.approx(expected, abs=EXACT)
    assert in_batches(f1(average=average), output, target) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("shape", [(24,), (24, 1), (6, 1, 2, 2)])
def test_f1_of_yes_or_no_is_that_of_yes(shape):
    output, target = random(24), labels(24)
    expected = f1_score(target, output > 0)
    assert f1(output.reshape(shape), target.reshape(shape)) == pytest.approx(expected, abs=EXACT)
    assert f1(output[:, None], target) == pytest.approx(expected, abs=EXACT)


def test_metrics_over_all_examples_count_every_pixel_and_every_token():
    pixels, images = random(4, 3, 5, 2), labels(4, 5, 2, classes=3)
    tokens, texts = random(4, 6, 3), labels(4, 6, classes=3)
    for metric in GATHERED:
        assert metric(pixels, images) == metric(pixels.permute(0, 2, 3, 1).reshape(-1, 3), images.flatten())
        assert metric(tokens, texts) == metric(tokens.reshape(-1, 3), texts.flatten())


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_auc_of_yes_or_no_is_scikit_learns(seed, ties):
    output, target = random(60, seed=seed, ties=ties), labels(60, seed=seed + 9)
    expected = roc_auc_score(target, output)
    assert auc(output, target) == pytest.approx(expected, abs=EXACT)
    assert auc(output[:, None], target.float()) == pytest.approx(expected, abs=EXACT)
    assert in_batches(auc, output, target) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("ties", [False, True])
def test_auc_of_two_classes_ranks_by_the_difference_of_the_logits(ties):
    output, target = random(60, 2, ties=ties), labels(60)
    expected = roc_auc_score(target, output[:, 1].double() - output[:, 0].double())
    assert in_batches(auc, output, target) == pytest.approx(expected, abs=EXACT)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("classes", [3, 6])
def test_auc_of_classes_is_scikit_learns_one_against_the_rest(classes, ties):
    output, target = random(80, classes, ties=ties), labels(80, classes=classes)
    expected = roc_auc_score(target, output.double().softmax(1), multi_class="ovr", average="macro")
    assert auc(output, target) == pytest.approx(expected, abs=EXACT)
    assert in_batches(auc, output, target) == pytest.approx(expected, abs=EXACT)


def test_auc_of_columns_is_the_mean_over_those_with_both_values():
    output, target = random(60, 4, ties=True), labels(60, 4)
    assert auc(output, target) == pytest.approx(roc_auc_score(target, output, average="macro"), abs=EXACT)
    target[:, 1] = 0
    kept = [0, 2, 3]
    assert auc(output, target) == pytest.approx(roc_auc_score(target[:, kept], output[:, kept]), abs=EXACT)


def test_an_undefined_auc_is_nan():
    assert math.isnan(auc().compute())
    assert math.isnan(auc(random(5), torch.ones(5)))
    assert math.isnan(auc(random(5, 2), torch.ones(5).long()))
    assert math.isnan(auc(random(9, 3), labels(9, classes=2)))
    assert math.isnan(auc(torch.tensor([math.nan, 1.0, 2.0]), torch.tensor([0, 1, 0])))


def test_an_f1_without_examples_is_nan_and_without_a_right_prediction_0():
    assert math.isnan(f1().compute())
    assert math.isnan(f1(random(0, 3), labels(0)))
    assert math.isnan(f1(random(0, 3), labels(0, 3)))
    assert f1(torch.tensor([-1.0, -2.0]), torch.tensor([0, 0])) == 0
    assert f1(torch.tensor([-1.0, 2.0]), torch.tensor([1, 0])) == 0


@pytest.mark.parametrize("metric", GATHERED)
def test_the_value_of_a_batch_leaves_the_gathered_ones_alone(metric):
    output, target, more = random(40, 3), labels(40, classes=3), random(40, 3, seed=5)
    ours = metric()
    ours.update(output, target)
    before = ours.compute()
    assert ours(more, target) == metric(more, target) != before
    assert ours.compute() == before
    assert math.isnan(metric().compute())
    assert math.isnan(ours().compute())


@pytest.mark.parametrize("metric", GATHERED)
def test_copies_are_independent_and_reset_forgets(metric):
    output, target, more = random(40, 3), labels(40, classes=3), random(40, 3, seed=5)
    one = metric()
    one.update(output, target)
    two = copy.deepcopy(one)
    two.update(more, target)
    assert one.compute() == metric(output, target)
    assert two.compute() == metric(torch.cat([output, more]), torch.cat([target, target]))
    two.reset()
    assert math.isnan(two.compute())
    two.update(random(8), labels(8))
    assert two.compute() == metric(random(8), labels(8))


def test_options_stay_with_the_copies():
    micro = f1(average="micro")
    assert (f1.average, micro.average, micro().average, copy.deepcopy(micro).average) == ("macro", *["micro"] * 3)


@pytest.mark.parametrize("metric", GATHERED)
def test_no_gradient_is_kept(metric):
    one = metric()
    one.update(random(9, 3).requires_grad_(), labels(9, classes=3))
    kept = [t for value in vars(one).values() for t in (sum(value, ()) if isinstance(value, list) else [value])]
    assert not any(t.requires_grad for t in kept if isinstance(t, torch.Tensor))


def test_wrong_options_and_targets_are_refused():
    refused(lambda: f1(average="makro"), "average of f1", "makro", "did you mean 'macro'")
    refused(lambda: f1(averge="macro"), "option of f1", "did you mean 'average'")
    refused(lambda: auc(average="macro"), "option of auc", "average")
    refused(lambda: f1(random(3, 2)), "f1 needs an output and a target")
    for metric in GATHERED:
        refused(lambda m=metric: m(random(3, 2), torch.tensor([0, 2, 1])), name_of(metric), "target 2", "0 to 1")
        refused(lambda m=metric: m(random(3, 2), torch.tensor([0, -100, 1])), "target -100")


@pytest.mark.parametrize("metric", GATHERED)
def test_batches_of_different_kinds_are_refused(metric):
    one = metric()
    one.update(random(9, 3), labels(9, classes=3))
    refused(lambda: one.update(random(9, 3), labels(9, 3)), "3 yes/no columns after outputs of 3 classes", "reset")
    refused(lambda: one.update(random(9, 4), labels(9)), "4 classes after outputs of 3 classes")


# ---------------------------------------------------------------------------------- properties of a metric


class Mine:
    """A user's metric with state."""

    def __init__(self):
        self.values = []

    def update(self, output, target):
        self.values.extend((output - target).abs().tolist())

    def compute(self):
        return float(np.max(self.values))

    def reset(self):
        self.values = []


@dataclass(frozen=True)
class Frozen:
    power: float

    def __call__(self, output, target):
        return (output - target).abs() ** self.power


class Slots:
    __slots__ = ()

    def __call__(self, output, target):
        return output - target


class Torchmetrics(nn.Module):
    """Has torchmetrics' attribute."""

    higher_is_better = False


def test_a_marked_function_behaves_as_before():
    marked = lower(accuracy)
    output, target = random(6, 3), labels(6, classes=3)
    assert torch.equal(marked(output, target), accuracy(output, target))
    assert marked.lower is True
    assert (marked.__name__, name_of(marked), marked.__doc__) == ("accuracy", "accuracy", accuracy.__doc__)
    assert is_lower(marked)
    assert not is_lower(accuracy)
    assert not hasattr(accuracy, "lower")
    assert not hasattr(marked, "update")


@pytest.mark.parametrize("metric", [accuracy, f1, f1(average="micro"), Mine(), Frozen(2), nn.L1Loss(), Mine().compute])
def test_marks_survive_copies_pickles_and_a_second_mark(metric):
    marked = lower(metric)
    for again in (copy.deepcopy(marked), pickle.loads(pickle.dumps(marked)), lower(marked), copy.copy(marked)):
        assert is_lower(again)
        assert again.lower is True
        assert name_of(again) == name_of(metric)
        assert percent(again) == percent(metric)
    assert not is_lower(metric)


def test_a_marked_object_has_its_own_state():
    mine = Mine()
    marked = lower(mine)
    marked.update(torch.tensor([3.0]), torch.tensor([1.0]))
    again = copy.deepcopy(marked)
    marked.reset()
    assert (mine.values, marked.values, again.compute()) == ([], [], 2.0)
    assert (name_of(marked), is_lower(marked), is_lower(mine)) == ("mine", True, False)


def test_a_marked_f1_stays_marked_in_fresh_copies():
    marked = lower(f1(average="micro"))
    output, target = random(30, 3), labels(30, classes=3)
    assert is_lower(marked())
    assert marked().average == "micro"
    assert is_lower(marked(average="macro"))
    assert marked(output, target) == f1(output, target, average="micro")
    assert in_batches(marked, output, target) == pytest.approx(f1(output, target, average="micro"), abs=EXACT)
    assert not is_lower(f1)


def test_a_marked_module_is_a_module():
    loss = nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor([2.0]))
    marked = lower(loss)
    output, target = random(6), labels(6).float()
    assert isinstance(marked, nn.Module)
    assert torch.equal(marked(output, target), loss(output, target))
    assert list(marked.state_dict()) == list(loss.state_dict())
    assert marked.double().pos_weight.dtype != loss.pos_weight.dtype
    assert is_lower(copy.deepcopy(marked))
    assert not is_lower(loss)


def test_partials_have_the_name_of_their_function():
    def distance(output, target, power):
        return (output - target).abs() ** power

    marked = lower(functools.partial(distance, power=2))
    assert name_of(marked) == "distance"
    assert is_lower(marked)
    assert marked(torch.tensor([3.0]), torch.tensor([1.0])).tolist() == [4.0]


def test_what_cannot_be_marked_is_refused():
    refused(lambda: lower("mse"), "'mse'")
    refused(lambda: lower(Mine), "Mine", "make an object")
    refused(lambda: lower(Slots()), "Slots", "lower = True")


def test_smaller_is_better_for_errors_alone():
    assert [is_lower(f) for f in (mse, mae, Torchmetrics(), lower(f1))] == [True] * 4
    assert [is_lower(f) for f in (accuracy, top5, f1, auc, nn.MSELoss(), Mine(), "lower", None)] == [False] * 8


def test_names_are_of_the_function_or_the_class():
    assert [name_of(f) for f in (accuracy, top5, mse, mae, f1, auc)] == ["accuracy", "top5", "mse", "mae", "f1", "auc"]
    assert [name_of(f) for f in (f1(average="micro"), lower(auc), nn.MSELoss(), Mine(), Mine().compute)] == [
        "f1", "auc", "mseloss", "mine", "compute",
    ]  # fmt: skip


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_help_and_the_documents_name_every_metric(name):
    assert name in metrics.__all__
    assert re.search(rf"Test metrics: [^\"]*\b{name}\b", inspect.getsource(Experiment))
    docs = Path(__file__).parents[2] / "docs"
    assert re.search(rf"^- `qg\.metrics\..*\b{name}`", (docs / "your-own.md").read_text(), re.MULTILINE)
    assert f"::: quasiglobal.metrics.{name}\n" in (docs / "api" / "metrics.md").read_text()


def test_shares_are_shown_in_per_cent():
    assert [percent(f) for f in (accuracy, top5, f1, auc, auc(), lower(accuracy), lower(f1))] == [True] * 7
    assert [percent(f) for f in (mse, mae, lower(mse), Mine(), nn.L1Loss())] == [False] * 5
