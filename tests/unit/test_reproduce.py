"""Tables from the run store: the best learning rate, the criteria for tuned, and running missing cells."""

import re
from dataclasses import replace
from functools import partial

import pytest
import torch
from hand_made_stores import leave_table
from rich.console import Console
from terminal import inside

from quasiglobal import InputError
from quasiglobal.cli import terminal
from quasiglobal.reproduction.paper import reproduce as command
from quasiglobal.reproduction.paper.figures import TRAINED, draw_from_store
from quasiglobal.reproduction.paper.outcomes import TRIAL_SEED, outcomes, trial_of
from quasiglobal.reproduction.paper.reproduce import TARGETS, cost, recorded, run_missing, seeds_to_run, stand
from quasiglobal.reproduction.paper.summary import left_out
from quasiglobal.reproduction.paper.tables import TABLES, at_scale
from quasiglobal.runs import store
from quasiglobal.runs.comparison import Score
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import RunFolder, RunStore, find_runs
from quasiglobal.runs.tuning import tune


def cell_of(table, name):
    return next(cell for cell in TABLES[table].cells if cell.name == name)


HEADLINE = cell_of("motivation", "QG-DSGDm-N | ring 16, α = 0.1")


def ended(root, experiment, accuracy, status="finished"):
    """Write a run with this accuracy to the store, without training."""
    run = RunFolder.of(experiment, root)
    run.describe()
    test = {"epoch": 10, "loss": 0.1, "accuracy": accuracy, "accuracy_averaged": accuracy + 0.01}
    run.rewrite([] if status == "diverged" else [test | {"epoch": 5, "accuracy": accuracy + 0.02}, test])
    run.finish(status, {})


def headline(root, scores, status="finished"):
    for rate, accuracy in scores.items():
        ended(root, replace(HEADLINE.experiment, lr=rate), accuracy, status)


def outcome(root, table="motivation", cell=HEADLINE, scale="paper"):
    return next(one for one in outcomes(TABLES[table], RunStore.read(root), scale) if one.cell == cell)


def test_an_empty_store_has_nothing_and_says_so(tmp_path):
    for name, table in TABLES.items():
        for one in outcomes(table, RunStore.read(tmp_path)):
            assert (one.ours(), one.runs, one.tuned, one.difference) == (None, (), False, None), name


def test_the_best_rate_is_that_of_seed_0_and_its_seeds_make_the_number(tmp_path):
    headline(tmp_path, {0.4: 0.70, 0.8: 0.80, 1.6: 0.75})
    for seed, accuracy in ((1, 0.82), (2, 0.84)):
        ended(tmp_path, replace(HEADLINE.experiment, lr=0.8, seed=seed), accuracy)
    ended(tmp_path, replace(HEADLINE.experiment, lr=1.6, seed=1), 0.99)
    one = outcome(tmp_path)
    assert one.experiment == replace(HEADLINE.experiment, lr=0.8)
    assert [run.experiment.seed for run in one.runs] == [0, 1, 2]
    assert list(one.trials) == [0.4, 0.8, 1.6]
    assert one.tuned
    assert one.how == "best of 3"
    assert one.ours() == Score(pytest.approx(82.0), pytest.approx(2.0))
    assert one.ours("best").mean == pytest.approx(84.0)
    assert one.ours("averaged").mean == pytest.approx(83.0)
    assert one.difference == pytest.approx(-0.2)


def test_of_equal_rates_the_smaller_is_best(tmp_path):
    headline(tmp_path, {0.4: 0.7, 0.8: 0.8, 1.6: 0.8, 3.2: 0.7})
    assert outcome(tmp_path).experiment.lr == 0.8


def test_a_diverged_trial_is_worse_than_any(tmp_path):
    headline(tmp_path, {0.4: 0.11, 0.8: 0.12})
    headline(tmp_path, {1.6: 0.99}, "diverged")
    one = outcome(tmp_path)
    assert one.experiment.lr == 0.8
    assert one.tuned, "the next larger rate was tried, so the best is not at an end"


@pytest.mark.parametrize(
    ("scores", "how"),
    [
        ({0.8: 0.8}, "not tuned"),
        ({0.4: 0.7, 0.8: 0.8}, "not tuned"),
        ({0.4: 0.7, 0.8: 0.75, 1.6: 0.8}, "at an end of 3"),
    ],
)
def test_few_rates_or_a_best_at_the_end_do_not_count_as_tuned(tmp_path, scores, how):
    headline(tmp_path, scores)
    assert not outcome(tmp_path).tuned
    assert outcome(tmp_path).how == how
    assert outcome(tmp_path).ours().std is None


def test_a_rate_from_short_runs_counts_where_it_was_run_and_is_marked(tmp_path):
    short = at_scale(HEADLINE.experiment, "short")
    for rate, accuracy in ((0.4, 0.5), (0.8, 0.7), (1.6, 0.6)):
        ended(tmp_path, replace(short, lr=rate), accuracy)
    assert outcome(tmp_path).how == "not run"
    headline(tmp_path, {0.4: 0.79})
    assert outcome(tmp_path).how == "not tuned"
    headline(tmp_path, {0.8: 0.78})
    one = outcome(tmp_path)
    assert (one.how, one.tuned, one.ours().mean) == ("best of 3 short runs", True, pytest.approx(78.0))
    assert one.experiment == replace(HEADLINE.experiment, lr=0.8)
    headline(tmp_path, {1.6: 0.1})
    assert outcome(tmp_path).how == "at an end of 3", "enough rates at the paper's scale take precedence"
    ended(tmp_path, replace(short, lr=3.2), 0.9)
    assert outcome(tmp_path, scale="short").how == "at an end of 4"


def test_tuning_on_short_runs_trains_at_the_papers_scale_at_their_best_alone(tmp_path, monkeypatch):
    trained = []

    def train(experiments, options, watch):
        trained.extend(experiments)
        for one in experiments:
            ended(tmp_path, one, 0.9 - abs(one.lr - 1.6))
        return [RunFolder.of(one, tmp_path).read() for one in experiments]

    monkeypatch.setattr("quasiglobal.reproduction.paper.reproduce.sweep", train)
    monkeypatch.setattr("quasiglobal.reproduction.paper.reproduce.tune", partial(tune, train=train))
    monkeypatch.setattr("quasiglobal.reproduction.paper.reproduce.absent", lambda names, data_dir: [])
    (one,) = run_missing(
        TABLES["motivation"], seeds=2, cells=[HEADLINE.name], options=Options(runs=tmp_path), tune_short=True
    )
    assert (one.how, one.experiment.lr, len(one.runs)) == ("best of 4 short runs held out", 1.6, 2)
    assert [(run.epochs, run.lr, run.seed) for run in trained if run.epochs == 300] == [(300, 1.6, 0), (300, 1.6, 1)]
    done = len(trained)
    run_missing(TABLES["motivation"], seeds=2, cells=[HEADLINE.name], options=Options(runs=tmp_path), tune_short=True)
    assert len(trained) == done, "nothing is run twice"
    assert stand(TABLES["motivation"], RunStore.read(tmp_path), "paper", seeds=2, short=True).done == 1
    assert stand(TABLES["motivation"], RunStore.read(tmp_path), "paper", seeds=2).done == 0
    (one,) = run_missing(TABLES["motivation"], seeds=2, cells=[HEADLINE.name], options=Options(runs=tmp_path))
    assert (one.how, one.experiment.lr) == ("best of 3 held out", 1.6), "at the paper's scale, unless asked otherwise"
    assert {run.epochs for run in trained[done:]} == {300}
    with pytest.raises(InputError, match="leave it out"):
        run_missing(TABLES["motivation"], "smoke", tune_short=True)


def test_rates_are_tuned_on_held_out_examples_with_a_seed_that_is_not_reported(tmp_path):
    headline(tmp_path, {0.4: 0.9, 0.8: 0.8, 1.6: 0.7})
    assert (outcome(tmp_path).how, outcome(tmp_path).experiment.lr) == ("at an end of 3", 0.4), "on the test set"
    trial = trial_of(HEADLINE.experiment)
    assert trial.validation > 0
    assert trial.seed not in range(100)
    for rate, accuracy in ((0.8, 0.6), (1.6, 0.5)):
        ended(tmp_path, replace(trial, lr=rate), accuracy)
    one = outcome(tmp_path)
    assert (one.how, one.experiment.lr, one.ours().mean) == ("at an end of 2 held out", 0.8, pytest.approx(80.0))
    assert [run.experiment.seed for run in one.runs] == [0], "a trial is never reported"
    ended(tmp_path, replace(trial, lr=0.4), 0.5)
    assert outcome(tmp_path).how == "best of 3 held out"
    assert left_out(RunStore.read(tmp_path)) == []


def test_a_seed_that_diverged_is_no_number_rather_than_left_out(tmp_path):
    headline(tmp_path, {0.8: 0.8})
    ended(tmp_path, replace(HEADLINE.experiment, lr=0.8, seed=1), 0.0, "diverged")
    one = outcome(tmp_path)
    assert one.diverged
    assert one.ours() is None


def test_runs_of_another_setting_or_scale_do_not_count(tmp_path):
    headline(tmp_path, {0.8: 0.8})
    ended(tmp_path, replace(at_scale(HEADLINE.experiment, "short"), lr=0.8), 0.7)
    ended(tmp_path, replace(HEADLINE.experiment, lr=0.4, precision="fp32"), 0.9)
    assert list(outcome(tmp_path).trials) == [0.8]
    assert outcome(tmp_path, scale="short").ours().mean == pytest.approx(70.0)
    assert outcome(tmp_path, scale="smoke").ours() is None


def test_a_reference_counts_whatever_alpha_and_graph_it_was_run_with(tmp_path):
    cell = cell_of("ring-scales", "SGDm-N (centralized) | ring 32, iid")
    ended(tmp_path, replace(cell.experiment, topology="social", alpha=10.0, lr=1.6), 0.9)
    assert outcome(tmp_path, "ring-scales", cell).ours().mean == pytest.approx(90.0)


def test_a_further_tuned_option_counts_at_its_best(tmp_path):
    cell = cell_of("momentum-variants", "DMSGD | α = 0.1")
    for name, accuracy in (("dmsgd", 0.7), ("dmsgd:mu=0.25", 0.8), ("dmsgd:mu=0.75", 0.6)):
        ended(tmp_path, replace(cell.experiment, algorithm=name, lr=0.8), accuracy)
    one = outcome(tmp_path, "momentum-variants", cell)
    assert one.experiment.algorithm == "dmsgd:mu=0.25"
    assert one.ours().mean == pytest.approx(80.0)


def test_what_is_to_be_run_shrinks_with_what_the_store_has(tmp_path):
    table = TABLES["motivation"]
    before = stand(table, RunStore.read(tmp_path), "paper", seeds=3, data_dir=tmp_path)
    assert (before.cells, before.tried, before.done) == (18, 0, 0)
    assert len(before.to_run) == 18 * (3 + 3), "three rates on held-out examples, then three seeds at the best"
    assert before.missing == ("cifar10",)
    headline(tmp_path, {0.4: 0.7, 0.8: 0.8, 1.6: 0.7})
    ended(tmp_path, replace(HEADLINE.experiment, lr=0.8, seed=1), 0.8)
    after = stand(table, RunStore.read(tmp_path), "paper", seeds=3, data_dir=tmp_path)
    assert (after.tried, after.done, len(after.to_run)) == (1, 0, 17 * 6 + 1)
    ended(tmp_path, replace(HEADLINE.experiment, lr=0.8, seed=2), 0.8)
    assert stand(table, RunStore.read(tmp_path), "paper", seeds=3).done == 1


def test_cost_grows_with_the_runs_and_is_unknown_for_data_of_nobody():
    one = at_scale(HEADLINE.experiment, "smoke")
    cpu = torch.device("cpu")
    assert cost([], cpu, {}) == (0, True)
    (seconds, everything), (three, _) = cost([one], cpu, {}), cost([one] * 3, cpu, {})
    assert everything
    assert seconds > 0
    assert three == pytest.approx(3 * seconds)
    assert cost([one, replace(one, data="agnews")], cpu, {}) == (pytest.approx(seconds), False)


def test_cost_goes_by_the_stores_own_runs_on_such_a_device(tmp_path):
    one, cpu, cuda = at_scale(HEADLINE.experiment, "smoke"), torch.device("cpu"), torch.device("cuda")
    for seed, speed in enumerate((1.0, 2.0, 50.0)):
        run = RunFolder.of(replace(one, seed=seed, lr=0.1), tmp_path)
        run.describe()
        run.rewrite([{"epoch": 2, "accuracy": 0.5, "images_per_second": speed}])
        run.finish("finished", {"device": "cuda"})
    store = RunStore.read(tmp_path)
    assert cost([one], cuda, recorded(store, cuda)) == (one.epochs * 1797 / 2, True)
    assert cost([one], cpu, recorded(store, cpu))[0] < one.epochs * 1797 / 50
    assert cost([replace(one, width=0.25)], cpu, recorded(store, cpu))[0] > 0


def test_missing_data_is_one_sentence_with_the_remedy(tmp_path):
    options = Options(runs=tmp_path, data_dir=tmp_path)
    with pytest.raises(InputError, match=r"cifar10 is not in .*; get it: .*curl") as error:
        run_missing(TABLES["single-worker"], options=options)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match=r"agnews is not in .*; get it: "):
        run_missing(TABLES["adam"], cells=["*AG News*"], options=options)


def test_what_the_store_has_is_shown_where_the_data_is_missing(monkeypatch, capsys, tmp_path):
    headline(tmp_path, {0.8: 0.8})
    words = ("reproduce", "motivation", "--runs", str(tmp_path), "--data-dir", str(tmp_path))
    status, out, _ = qg(monkeypatch, capsys, *words)
    assert status == 0
    (line,) = (line for line in out.splitlines() if "82.20 ± 1.27" in line)
    assert "80.00" in line
    assert "-2.20" in line
    assert "0.8, not tuned" in line
    assert "data missing: cifar10 is not in" in out


def test_a_table_runs_end_to_end_at_smoke_scale_and_never_twice(tmp_path):
    options = Options(runs=tmp_path)
    found = run_missing(TABLES["adam"], "smoke", seeds=2, options=options)
    assert len(found) == len(TABLES["adam"].cells)
    for one in found:
        assert len(one.trials) == 3
        assert [run.experiment.seed for run in one.runs] == [0, 1]
        assert one.experiment.data == "digits"
        assert 0 < one.ours().mean <= 100
    written = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")}
    again = run_missing(TABLES["adam"], "smoke", seeds=2, options=options)
    assert [one.ours() for one in again] == [one.ours() for one in found]
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.json*")} == written


@pytest.fixture(scope="module")
def smoke_store(tmp_path_factory):
    """One store for all targets, because they share experiments."""
    return tmp_path_factory.mktemp("smoke")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:D2 needs every eigenvalue")
@pytest.mark.parametrize("name", [name for name, target in TARGETS.items() if target.table and target.table.cells])
def test_every_target_that_trains_runs_at_smoke_scale(name, smoke_store):
    found = run_missing(TARGETS[name].table, "smoke", options=Options(runs=smoke_store))
    assert all(len(one.runs) == 3 for one in found)
    if name in TRAINED:
        assert draw_from_store(name, RunStore.read(smoke_store), "smoke").rows


def test_more_seeds_run_those_seeds_alone_and_the_named_cells_alone(tmp_path):
    table, cells = TABLES["single-worker"], ["sgdm-n | gn"]
    watched = []

    def watch(runs, records):
        watched.extend((run.experiment.seed, run.experiment.lr) for run in runs)

    (one,) = run_missing(table, "smoke", 1, cells, Options(runs=tmp_path), watch)
    assert {seed for seed, _ in watched} == {0, TRIAL_SEED}
    watched.clear()
    (more,) = run_missing(table, "smoke", 3, cells, Options(runs=tmp_path), watch)
    assert set(watched) == {(1, one.experiment.lr), (2, one.experiment.lr)}
    assert len(more.runs) == 3
    assert more.ours().std > 0


def test_the_default_rate_is_not_trained_again_where_it_was_left_out(tmp_path):
    table, chosen = TABLES["single-worker"], cell_of("single-worker", "SGDm-N | GN")
    default = at_scale(chosen.experiment, "smoke")
    assert default.lr is None
    for one in (trial_of(default), *map(default.with_seed, range(3))):
        ended(tmp_path, one, 1.0)
    trained = []

    def watch(runs, records):
        trained.extend((run.experiment.peak_lr, run.experiment.seed) for run in runs)

    (one,) = run_missing(table, "smoke", 3, ["sgdm-n | gn"], Options(runs=tmp_path), watch)
    assert set(trained) == {(default.peak_lr / 2, TRIAL_SEED), (default.peak_lr * 2, TRIAL_SEED)}
    assert list(one.trials) == [default.peak_lr / 2, default.peak_lr, default.peak_lr * 2]
    assert [run.experiment for run in one.runs] == [default.with_seed(seed) for seed in range(3)]


def test_no_seed_is_run_before_a_rate_is_chosen_unless_the_paper_has_one(tmp_path):
    assert seeds_to_run(outcome(tmp_path), 3) == []
    headline(tmp_path, {0.8: 0.8})
    assert [one.seed for one in seeds_to_run(outcome(tmp_path), 3)] == [1, 2]
    fixed = cell_of("imagenet-topologies", "DSGDm-N | ring 16, α = 1")
    assert len(seeds_to_run(outcome(tmp_path, "imagenet-topologies", fixed), 3)) == 3


@pytest.mark.slow
def test_a_table_that_was_stopped_is_gone_on_with(tmp_path):
    table, cells = TABLES["single-worker"], ["qg-sgdm | bn"]

    def stop(runs, records):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_missing(table, "smoke", 1, cells, Options(runs=tmp_path / "stopped"), stop)
    (resumed,) = run_missing(table, "smoke", 1, cells, Options(runs=tmp_path / "stopped"))
    (whole,) = run_missing(table, "smoke", 1, cells, Options(runs=tmp_path / "whole"))
    assert resumed.ours() == whole.ours()


def test_what_was_not_measured_is_no_number(tmp_path):
    headline(tmp_path, {0.8: 0.8})
    run = RunFolder.of(outcome(tmp_path).experiment, tmp_path)
    run.rewrite([{"epoch": 10, "loss": 0.1, "accuracy": 0.8}])
    run.finish("finished", {})
    assert outcome(tmp_path).ours().mean == pytest.approx(80.0)
    assert outcome(tmp_path).ours("averaged") is None


# ------------------------------------------------------------------------------------------ the command line


def qg(monkeypatch, capsys, *words):
    wide(monkeypatch, 200)
    return inside(monkeypatch, capsys, *words)


def wide(monkeypatch, columns):
    """Set the width of the terminal."""
    monkeypatch.setenv("COLUMNS", str(columns))
    console = Console(highlight=False, markup=False, width=columns)
    for module in (terminal, command):
        monkeypatch.setattr(module, "console", console)
    return console


def test_the_list_has_every_target_with_what_it_takes(monkeypatch, capsys, tmp_path):
    headline(tmp_path, {0.8: 0.8})
    words = ("reproduce", "--list", "--scale", "short", "--runs", str(tmp_path), "--data-dir", str(tmp_path))
    monkeypatch.setattr(command, "cost", lambda experiments, device, speeds: (90.0, False))
    status, out, _ = qg(monkeypatch, capsys, *words)
    assert status == 0
    for name, target in TARGETS.items():
        assert f"{name}  {target.heading}" in out
    assert "agnews, cifar10" in out
    assert "over 2 min" in out
    status, out, _ = qg(monkeypatch, capsys, "reproduce", "motivation", *words[1:2], "--runs", str(tmp_path))
    assert status == 0
    assert f"0 of 18 cells done, 1 tried; {17 * 6 + 5} runs left" in out
    assert "single-worker" not in out, "lists only the named target"


@pytest.mark.parametrize("words", [("--list",), ("figure-2d",)])
def test_cells_are_refused_where_there_are_none(monkeypatch, capsys, words):
    status, _, err = qg(monkeypatch, capsys, "reproduce", *words, "--cells", "*")
    assert status == 2
    assert "leave out --cells" in err


def test_a_table_is_printed_beside_the_papers(monkeypatch, capsys, tmp_path):
    words = ("reproduce", "single-worker", "--scale", "smoke", "--runs", str(tmp_path), "--seeds", "1")
    status, out, _ = qg(monkeypatch, capsys, *words, "--cells", "SGDm | BN")
    assert status == 0
    assert "SMOKE: digits in place of the data" in out
    assert "92.90 ± 0.15" in out
    assert "93.01 ± 0.12" not in out, "omits cells that were not requested"


@pytest.mark.parametrize("name", ["imagenet", "momentum-variants"])
def test_no_number_is_cut_off_in_a_terminal_of_80_columns(monkeypatch, capsys, tmp_path, name):
    leave_table(tmp_path, name, off=-10.5)
    table = TABLES[name]
    wide(monkeypatch, 80)
    found = outcomes(table, RunStore.read(tmp_path))
    command.beside_the_paper(TARGETS[name], table, found, "paper").show()
    out = capsys.readouterr().out
    assert "…" not in out
    for one in found:
        if one.runs:
            best = f"{one.ours('best').mean:.2f}"
            assert re.search(rf" {one.cell.score} +│ {one.ours()} \(\d\) +│ {best} ", out), one.cell.name
            assert f" {one.difference:+.2f} " in out


def test_what_cannot_be_asked_for_is_said_in_a_sentence(monkeypatch, capsys, tmp_path):
    there = ("--runs", str(tmp_path), "--data-dir", str(tmp_path))
    for words, sentence in {
        ("cifar100",): "qg: unknown target 'cifar100'; did you mean 'cifar10'?",
        ("motivation", *there): "qg: cifar10 is not in",
        ("motivation", "--cells", "*DSGX*", *there): "qg: no cell of motivation matches '*DSGX*'; names look like "
        "'DSGD | ring 16, α = 10' or 'cifar10-resnet20-dsgd-ring16-a10-s0-*'",
        ("motivation", "--engine", "distributed"): "qg: qg reproduce trains on the simulator",
    }.items():
        status, _, err = qg(monkeypatch, capsys, "reproduce", *words)
        assert (status, err.startswith(sentence)) == (2, True), err


@pytest.mark.parametrize("words", [
    ("runs",), ("compare",), ("plot", "--out", "curves.png"), ("report", "--out", "page"), ("reproduce", "--list"),
    ("reproduce", "motivation", "--cells", HEADLINE.name, "--data-dir", "."),
    ("reproduce", "figure-ring-scales", "--data-dir", ".", "--out", "out"),
    ("leaderboard", "digits", "--again", "--methods", "dsgd", "edm", "--runs", ".", "--records", "records"),
])  # fmt: skip
def test_a_command_reads_the_store_once(monkeypatch, capsys, tmp_path, words):
    monkeypatch.chdir(tmp_path)
    headline(tmp_path / "runs", {0.4: 0.7, 0.8: 0.8, 1.6: 0.6})
    ended(tmp_path / "runs", replace(TABLES["ring-scales"].cells[0].experiment, lr=0.1), 0.5)
    monkeypatch.setattr(command, "cost", lambda experiments, device, speeds: (90.0, True))
    monkeypatch.setattr("quasiglobal.reproduction.leaderboard.command.contest", lambda *_: iter(()))
    read = []
    monkeypatch.setattr(store, "find_runs", lambda root: read.append(root) or find_runs(root))
    status, _, err = qg(monkeypatch, capsys, *words)
    assert (status, len(read)) == (0, 1), err
