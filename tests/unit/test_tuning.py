"""Tuning, with a fake trainer and once with real training."""

import math
from dataclasses import replace

import pytest
from terminal import inside

from quasiglobal import InputError
from quasiglobal.runs import plots
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunFolder, find_runs
from quasiglobal.runs.tuning import NUMBERS, parse_over, tune
from quasiglobal.training.experiment import Experiment

TINY = Experiment(model="mlp", topology="ring:4", algorithm="dsgdm-n", epochs=1, alpha=1.0, warmup=0.0)


class Made:
    """Fake trainer: write runs with an accuracy computed from the experiment; None means diverged."""

    def __init__(self, accuracy):
        self.accuracy = accuracy
        self.calls = []

    def __call__(self, experiments, options, watch):
        assert len(set(experiments)) == len(experiments), "no experiment is requested twice"
        self.calls.append([(one, options.seeds) for one in experiments])
        for one in experiments:
            for seed in range(one.seed, one.seed + options.seeds):
                run = RunFolder.of(one.with_seed(seed), options.runs)
                run.describe()
                reached = self.accuracy(one)
                run.rewrite([] if reached is None else [{"epoch": 1, "accuracy": reached}])
                run.finish("diverged" if reached is None else "finished", {})


def tuned(tmp_path, accuracy, over, experiment=TINY, seeds=1, **more):
    trainer = Made(accuracy)
    (found,) = tune([experiment], over, Options(runs=tmp_path, seeds=seeds), train=trainer, **more)
    return found, trainer.calls


def near(rate):
    """Return an accuracy function with its maximum at this learning rate."""
    return lambda one: 1 - 0.1 * abs(math.log(one.lr / rate))


def test_the_first_grid_lies_around_the_experiments_own_rate(tmp_path):
    found, calls = tuned(tmp_path, near(TINY.peak_lr), {"lr": ()})
    assert found.grid == {"lr": (0.1, 0.2, 0.4)}
    assert found.experiment.lr == TINY.peak_lr == 0.2
    assert found.inside
    assert [len(call) for call in calls] == [3, 1]


@pytest.mark.parametrize("ended", [False, True])
def test_a_run_that_was_begun_without_a_rate_is_taken_up(tmp_path, ended):
    begun = RunFolder.of(TINY, tmp_path)
    assert begun.experiment.lr is None
    begun.describe()
    if ended:
        begun.rewrite([{"epoch": 1, "accuracy": 0.9}])
        begun.finish("finished", {})
    found, calls = tuned(tmp_path, lambda one: 1 - 0.1 * abs(math.log(one.peak_lr / 0.2)), {"lr": ()})
    assert TINY in [one for one, _ in calls[0]]
    assert found.trials[(0.2,)].folder == begun.folder
    assert not RunFolder.of(replace(TINY, lr=0.2), tmp_path).read().begun


def test_the_grid_grows_by_its_own_ratio_where_the_best_is_at_an_end(tmp_path):
    above, _ = tuned(tmp_path / "a", near(2.7), {"lr": (0.1, 0.3, 0.9)})
    assert above.grid["lr"] == (0.1, 0.3, 0.9, 2.7, 8.1)
    assert (above.best, above.inside) == ((2.7,), True)
    below, _ = tuned(tmp_path / "b", near(0.02), {"lr": (0.1, 0.2)})
    assert below.grid["lr"] == (0.0125, 0.025, 0.05, 0.1, 0.2)
    assert (below.best, below.inside) == ((0.025,), True)


def test_a_grid_that_starts_at_0_grows_too(tmp_path):
    found, _ = tuned(tmp_path / "a", lambda one: min(one.weight_decay, 3e-4), {"weight_decay": (0, 1e-4)})
    assert found.grid["weight_decay"] == (0, 1e-4, 2e-4, 4e-4, 8e-4)
    assert (found.best, found.inside) == ((4e-4,), True)
    capped, _ = tuned(tmp_path / "b", lambda one: one.weight_decay, {"weight_decay": (0, 1e-4)}, cap=2)
    assert not capped.inside
    zero, _ = tuned(tmp_path / "c", lambda one: -one.weight_decay, {"weight_decay": (0, 1e-4)})
    assert (zero.grid["weight_decay"], zero.inside) == ((0, 1e-4), True), "the grid does not grow below 0"


def test_growth_ends_at_the_cap_and_says_so(tmp_path):
    found, _ = tuned(tmp_path / "a", near(1e9), {"lr": (0.1, 0.2, 0.4)}, cap=5)
    assert found.grid["lr"] == (0.1, 0.2, 0.4, 0.8, 1.6)
    assert not found.inside
    assert found.best == (1.6,)
    fixed, _ = tuned(tmp_path / "b", near(1e9), {"lr": (0.1, 0.2, 0.4)}, cap=0)
    assert (fixed.grid["lr"], fixed.inside) == ((0.1, 0.2, 0.4), False)


def test_of_equals_the_smaller_is_best(tmp_path):
    found, _ = tuned(tmp_path, lambda one: 0.5 if one.lr < 0.15 else 0.7, {"lr": (0.1, 0.2, 0.4)})
    assert found.best == (0.2,)


def test_diverged_is_worse_than_any_accuracy(tmp_path):
    found, _ = tuned(tmp_path, lambda one: None if one.lr > 0.3 else 0.0, {"lr": (0.2, 0.4)}, cap=3)
    assert found.grid["lr"] == (0.1, 0.2, 0.4)
    assert found.scores == {(0.1,): 0.0, (0.2,): 0.0, (0.4,): -math.inf}


def test_where_all_diverge_smaller_rates_are_tried(tmp_path):
    found, _ = tuned(tmp_path, lambda one: one.lr if one.lr <= 0.05 else None, {"lr": (0.2, 0.4, 0.8)})
    assert found.grid["lr"] == (0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
    assert (found.best, found.inside) == ((0.05,), True)


def test_several_names_are_tuned_over_their_product(tmp_path):
    def accuracy(one):
        return near(0.2)(one) - ("beta=0.8" not in one.algorithm) * 0.01

    over = {"lr": (0.1, 0.2, 0.4), "beta": (0.5, 0.8, 0.9)}
    found, calls = tuned(tmp_path, accuracy, over)
    assert len(calls[0]) == 9
    assert found.best == (0.2, 0.8)
    assert found.experiment.algorithm == "dsgdm-n:beta=0.8"
    by_default = next(one for one, _ in calls[0] if one.lr == 0.1 and "beta" not in one.algorithm)
    assert by_default.algorithm == "dsgdm-n", "the default value adds no option, so existing runs are reused"


def test_momentum_factors_grow_towards_one_and_end_at_zero(tmp_path):
    def factor(one):
        return float(one.algorithm.partition("beta=")[2] or 0.9)

    above, _ = tuned(tmp_path / "a", lambda one: factor(one) if factor(one) < 0.96 else 0, {"beta": (0.8, 0.9)})
    assert above.grid["beta"] == (0.8, 0.9, 0.95, 0.975)
    below, _ = tuned(tmp_path / "b", lambda one: 1 - factor(one), {"beta": (0.8, 0.9)})
    assert below.grid["beta"] == (0.0, 0.2, 0.6, 0.8, 0.9)
    assert below.inside, "the grid does not grow below 0"


def test_whole_numbers_stay_whole(tmp_path):
    one = Experiment(algorithm="qg-dsgdm-n", topology="ring:4", epochs=1)
    found, _ = tuned(tmp_path, lambda one: 0.5, {"tau": (2, 4)}, one)
    assert found.grid["tau"] == (1, 2, 4)
    assert found.experiment.algorithm == "qg-dsgdm-n"
    assert found.inside, "there is no tau below 1"
    batches, _ = tuned(tmp_path, lambda one: 1 / one.batch, {"batch": (16, 32), "lr": (0.1,)}, cap=3)
    assert batches.grid == {"batch": (8, 16, 32), "lr": (0.1,)}
    assert isinstance(batches.experiment.batch, int)


def test_all_seeds_run_at_the_best_alone(tmp_path):
    found, calls = tuned(tmp_path, near(0.2), {"lr": (0.1, 0.2, 0.4)}, TINY.with_seed(3), seeds=3)
    assert [(one.lr, one.seed, seeds) for one, seeds in calls[-1]] == [(0.2, 3, 3)]
    assert all(seeds == 1 and one.seed == 3 for one, seeds in calls[0])
    assert [run.experiment.seed for run in found.runs] == [3, 4, 5]


def test_several_experiments_are_tuned_together(tmp_path):
    def accuracy(one):
        return near(0.1 if one.algorithm == "dsgd" else 0.8)(one)

    trainer = Made(accuracy)
    cells = [TINY, replace(TINY, algorithm="dsgd"), TINY]
    found = tune(cells, {"lr": (0.1, 0.2, 0.4)}, Options(runs=tmp_path), train=trainer)
    assert [one.experiment.lr for one in found] == [0.8, 0.1, 0.8]
    assert len(trainer.calls[0]) == 6, "one call for all trials, without duplicates"


BAD = {
    "momentum=0.1,0.2": "unknown name to tune with dsgdm-n 'momentum'",
    "seed=0,1": "unknown name to tune",
    "augment=0,1": "unknown name to tune",
    "lr=0.1,0.2,lr=0.4": "names lr twice",
    "lr=0.1,0.2,0.1": "lr has a value twice",
    "lr=a,b": "lr must be a number, got 'a'",
    "lr=inf": "lr must be finite",
    "lr=0,0.1": "lr must be > 0",
    "0.1,0.2": "cannot read --over 0.1,0.2",
    "beta=0.9,1.5": r"beta must be in \[0, 1\], got 1.5",
    "batch=16.5": "batch must be a whole number, got 16.5",
    "beta": "cannot read --over beta",
    "decay=-1,2": "decay must be > 0 and finite, got -1",
}


@pytest.mark.parametrize("text", BAD)
def test_what_cannot_be_tuned_is_one_sentence_and_nothing_runs(tmp_path, text):
    with pytest.raises(InputError, match=BAD[text]):
        tuned(tmp_path, near(0.1), parse_over(text))
    assert list(find_runs(tmp_path)) == []


def test_a_field_of_the_experiment_goes_before_an_option_of_the_same_name(tmp_path):
    assert "alpha" in NUMBERS
    one = Experiment(algorithm="slowmo", topology="ring:4", epochs=1)
    found, _ = tuned(tmp_path, lambda one: one.alpha, {"alpha": (0.1, 1.0)}, one, cap=2)
    assert (found.experiment.alpha, found.experiment.algorithm) == (1.0, "slowmo")


def test_qg_tune_prints_the_grid_draws_it_and_runs_nothing_twice(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--model", "mlp", "--topology", "ring:4", "--algorithm", "dsgd", "--epochs", "1", "--cap", "3"]
    words += ["--over", "lr=0.05,0.2,0.8", "--seeds", "2", "--plot", "grid.svg"]
    status, out, _ = inside(monkeypatch, capsys, *words)
    assert status == 0
    assert out.count("← best") == 1
    assert "of 3 trials with seed 0" in out
    assert "<svg" in (tmp_path / "grid.svg").read_text()
    runs = {run.folder.name: (run.folder / "summary.json").stat().st_mtime_ns for run in find_runs(tmp_path / "runs")}
    assert len(runs) == 4, "three rates, and a second seed at the best rate"
    assert inside(monkeypatch, capsys, *words)[0] == 0
    again = {run.folder.name: (run.folder / "summary.json").stat().st_mtime_ns for run in find_runs(tmp_path / "runs")}
    assert again == runs


def test_where_everything_diverged_nothing_is_best(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--model", "mlp", "--topology", "ring:4", "--algorithm", "dsgd", "--epochs", "1"]
    words += ["--over", "lr=1e30,2e30"]
    status, out, _ = inside(monkeypatch, capsys, *words, "--cap", "0")
    assert status == 0
    assert "all 2 trials diverged; give other values" in out
    assert "best:" not in out
    assert "← best" not in out
    status, _, err = inside(monkeypatch, capsys, *words, "--cap", "-1")
    assert status == 2
    assert "cap must be >= 0, got -1" in err


def test_two_names_are_a_table_of_two_sides_and_a_heat_map(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    words = ["tune", "--model", "mlp", "--topology", "ring:4", "--algorithm", "dsgdm", "--epochs", "1", "--cap", "0"]
    words += ["--over", "lr=0.1,0.2", "--over", "beta=0.5,0.9", "--plot", "grid.png"]
    status, out, _ = inside(monkeypatch, capsys, *words)
    assert status == 0
    assert "of 4 trials with seed 0" in out
    assert "beta = 0.5" in out
    assert "it lies at an end of the grid" in out
    assert (tmp_path / "grid.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_tuned_or_drawn_is_refused_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    for words, sentence in (
        (("--plot", "grid.doc"), "cannot draw into grid.doc"),
        (("--over", "lr=0.1,0.2", "--over", "lr=0.4"), "--over names lr twice"),
        (("--over", "lr=0.1,beta=0.5,alpha=1", "--plot", "a.png"), "a plot shows one or two hyperparameters"),
    ):
        status, _, err = inside(monkeypatch, capsys, "tune", *words)
        assert status == 2
        assert sentence in err
    assert list(tmp_path.iterdir()) == []


def test_a_diverged_trial_is_a_cross_in_the_picture():
    curve = plots.draw_tuning({"lr": (0.1, 0.2)}, {(0.1,): 0.5, (0.2,): -math.inf}, (0.1,))
    assert [text.get_text() for text in curve.axes[0].get_legend().get_texts()] == ["diverged", "best: 0.1"]
    scores = {(0.1, 0.5): 0.5, (0.1, 0.9): -math.inf, (0.2, 0.5): 0.625, (0.2, 0.9): 0.25}
    chart = plots.draw_tuning({"lr": (0.1, 0.2), "beta": (0.5, 0.9)}, scores, (0.2, 0.5))
    assert [text.get_text() for text in chart.axes[0].texts] == ["50.0", "×", "62.5", "25.0"]
