"""The leaderboard: its protocol, a method of one's own from the command line, its records and what is made of them."""

import importlib
import json
import subprocess
import sys
import time
from collections import deque
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from terminal import inside

from quasiglobal.algorithms import ALGORITHMS
from quasiglobal.data.dataset import validating
from quasiglobal.data.sources import load
from quasiglobal.errors import InputError
from quasiglobal.reproduction.leaderboard.contenders import contender, contenders, newcomer, objections, select, source
from quasiglobal.reproduction.leaderboard.contest import compete, contest
from quasiglobal.reproduction.leaderboard.protocol import DIGITS, RELAY, SEEDS, TIERS, Condition, Tier, tier_named
from quasiglobal.reproduction.leaderboard.standings import Placing, SeedResult, Standing, read_standing, write_standing
from quasiglobal.reproduction.leaderboard.summary import (
    QUESTIONS,
    Contrast,
    Number,
    blocks,
    leaderboard_document,
    refresh,
)
from quasiglobal.reproduction.report.formats import markdown
from quasiglobal.runs.building import data_for
from quasiglobal.runs.options import Options
from quasiglobal.runs.store import find_runs
from quasiglobal.runs.tuning import FACTOR

RECORDS = Path(__file__).parents[2] / "docs" / "results" / "leaderboard"

TOY = Tier(
    name="toy", title="Toy",
    experiment=replace(DIGITS.experiment, width=0.25, epochs=2, steps=10, eval_every=2),
    conditions=(Condition(name="sorted", partition="shards:1"), Condition(name="lost", partition="shards:1", drop=0.3)),
    validation=0.2,
)

MINE = '''
"""A method of one's own."""
import quasiglobal as qg


class Mine(qg.Algorithm):
    """Gossip of the models after a step."""

    def step(self, x, g, state, node):
        return node.mix(x - node.lr * g), state
'''


def examples(split):
    """The examples of a split as a set of comparable values."""
    return {(x.numpy().tobytes(), int(y)) for x, y in zip(split.x, split.y, strict=True)}


def standing(name="dsgd", seeds=((1, 0.9), (2, 0.8), (3, 0.7)), condition="sorted", **fields):
    results = tuple(
        SeedResult(seed, mean=score, worst=score - 0.1, averaged=score + 0.05, bytes=2e6, seconds=1.5)
        for seed, score in seeds
    )
    placing = Placing(lr=0.1, trials={"0.1": 0.9, "0.2": None}, seeds=results)
    return Standing("digits", name, name, "ring:16", conditions={condition: placing}, **fields)


def test_the_validation_split_shares_nothing_with_training_and_test_data():
    trial = DIGITS.trial(DIGITS.at(DIGITS.conditions[0]))
    tuning, whole = data_for(trial, Options()), load("digits")
    assert examples(tuning.train) | examples(tuning.test) == examples(whole.train)
    assert len(tuning.train) + len(tuning.test) == len(whole.train)
    assert not examples(tuning.test) & examples(tuning.train)
    assert not examples(tuning.test) & examples(whole.test)
    assert len(tuning.test) == pytest.approx(DIGITS.validation * len(whole.train), abs=1)


def test_scores_are_of_the_whole_training_set_and_of_seeds_that_tuned_nothing():
    assert 0 not in SEEDS
    assert all(tier.experiment.validation == 0 for tier in TIERS.values())
    assert DIGITS.trial(DIGITS.experiment.with_seed(3)).seed == 0
    trial = TIERS["cifar"].trial(TIERS["cifar"].experiment)
    assert (trial.epochs, trial.warmup, trial.eval_every) == (40, 2.0, 40)


def test_a_validation_split_of_streamed_data_is_refused():
    data = load("digits")
    with pytest.raises(InputError, match="validation needs one training set in memory"):
        validating(replace(data, parts=(data.train.y.numpy(),)), 0.2)


def test_every_algorithm_that_learns_takes_part_on_a_graph_that_it_accepts():
    names = [one.name for one in contenders(DIGITS)]
    assert set(ALGORITHMS) - set(names) == {"gossip", "qg-gossip"}
    assert len(names) == len(set(names))
    for one in contenders(DIGITS):
        assert objections(one.set_on(DIGITS.at(DIGITS.conditions[0])))[0] == "", one.name


def test_a_tier_without_tuning_has_a_rate_for_every_condition():
    for one in contenders(RELAY):
        assert set(one.rates) == {condition.name for condition in RELAY.conditions}
    with pytest.raises(InputError, match="tier relay does not tune; give the learning rate with --lr"):
        contender("dsgd", RELAY)
    assert contender("dsgd", RELAY, lr=0.2).rates == {"α = 0.1": 0.2, "α = 0.01": 0.2}


def test_a_name_of_another_method_is_not_taken(tmp_path):
    assert newcomer("dsgd", DIGITS, "", "", 0.0, tmp_path).name == "dsgd"
    write_standing(standing("dsgd"), tmp_path / "known")
    with pytest.raises(InputError, match="is the record of this method already; to train it anew: qg leaderboard"):
        newcomer("dsgd", DIGITS, "", "", 0.0, tmp_path / "known")
    with pytest.raises(InputError, match="edm is the name of another method of tier digits; give yours another --name"):
        newcomer("dsgd", DIGITS, "edm", "", 0.0, tmp_path)
    with pytest.raises(InputError, match="is the name of another method of tier digits, dsgd, base graph, as a file"):
        newcomer("qhm", DIGITS, "dsgd base graph", "", 0.0, tmp_path)
    with pytest.raises(InputError, match="a name needs a letter or a digit"):
        newcomer("qhm", DIGITS, "***", "", 0.0, tmp_path)
    assert newcomer("qhm", DIGITS, "mine, too", "", 0.0, tmp_path).name == "mine, too"
    write_standing(standing("mine too"), tmp_path)
    with pytest.raises(InputError, match=r"mine-too.json is the record of mine too \(mine too, ring:16\); give yours"):
        newcomer("qhm", DIGITS, "mine, too", "", 0.0, tmp_path)
    with pytest.raises(InputError, match="lr must be a number > 0, got inf"):
        newcomer("qhm", DIGITS, "mine", "", float("inf"), tmp_path)


def test_a_change_of_any_file_of_ones_own_method_is_seen(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "package_of_tests"
    package.mkdir()
    (package / "__init__.py").write_text("from package_of_tests.rules import Mine\n\nmine = Mine()\n")
    (package / "rules.py").write_text(MINE)
    (tmp_path / "alias_of_tests.py").write_text("import quasiglobal as qg\n\nmine = qg.algorithm('dsgd')\n")
    seen = [source(text) for text in ("package_of_tests:mine", "alias_of_tests:mine", "dsgd")]
    (package / "rules.py").write_text(MINE + "\n")
    (tmp_path / "alias_of_tests.py").write_text("import quasiglobal as qg\n\nmine = qg.algorithm('dsgdm')\n")
    after = [source(text) for text in ("package_of_tests:mine", "alias_of_tests:mine", "dsgd")]
    assert seen[0] != after[0]
    assert seen[1] != after[1]
    assert seen[2] == after[2] == ""


@pytest.mark.parametrize(
    ("step", "sentence"),
    [
        ("return node.mix(y), state", "NameError: name 'y' is not defined"),
        ("return x[:1], state", "has to return x, a tensor of shape"),
        ("return node.mix(x.long()), state", "one floating-point type, got int64"),
        ("return node.mix(x.sub_(node.lr * g)), state", "pure: step changed its input x in place"),
    ],
)
def test_a_fault_of_ones_own_method_is_one_sentence(step, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "faulty_of_tests", raising=False)
    importlib.invalidate_caches()
    Path("faulty_of_tests.py").write_text(MINE.replace("return node.mix(x - node.lr * g), state", step))
    status, out, err = inside(monkeypatch, capsys, "leaderboard", "add", "faulty_of_tests:Mine", "--records", "records")
    assert (status, out) == (2, "")
    assert len(err.splitlines()) < 4
    assert sentence in " ".join(err.split())


def test_all_methods_run_on_16_nodes(tmp_path):
    with pytest.raises(InputError, match="run on 16 nodes, but ring:8 has 8"):
        newcomer("dsgd", DIGITS, "mine", "ring:8", 0.0, tmp_path)


def test_conditions_are_chosen_by_patterns():
    assert [one.name for one in tier_named("cifar", ["*0.01"]).conditions] == ["α = 0.01"]
    assert tier_named("cifar") == TIERS["cifar"]
    with pytest.raises(InputError, match=r"no condition of cifar matches 10; .* it has α = 0.1; α = 0.01"):
        tier_named("cifar", ["10"])


def test_a_record_keeps_the_conditions_that_were_not_run_again(tmp_path):
    write_standing(standing(), tmp_path)
    path = write_standing(standing(seeds=((1, 0.5),), condition="lost"), tmp_path)
    assert set(read_standing(path).conditions) == {"sorted", "lost"}
    write_standing(standing(condition="lost", wire="sign"), tmp_path)
    assert set(read_standing(path).conditions) == {"lost"}


def test_a_record_keeps_the_seeds_that_were_not_run_again_at_the_same_rate(tmp_path):
    write_standing(standing(seeds=((1, 0.9), (2, 0.8))), tmp_path)
    path = write_standing(standing(seeds=((2, 0.85), (3, 0.7))), tmp_path)
    assert read_standing(path).conditions["sorted"].values("mean") == pytest.approx({1: 90, 2: 85, 3: 70})
    other = standing(seeds=((2, 0.6),))
    other.conditions["sorted"] = replace(other.conditions["sorted"], lr=0.2)
    assert read_standing(write_standing(other, tmp_path)).conditions["sorted"].values("mean") == {2: 60}


def test_some_seeds_of_a_tier_are_chosen():
    assert tier_named("relay", seeds=[3, 2]).seeds == (2, 3)
    assert tier_named("relay").seeds == SEEDS
    with pytest.raises(InputError, match="seeds are 1, 2, 3, got 1, 4"):
        tier_named("relay", seeds=[1, 4])


def test_a_record_is_complete_with_all_seeds_at_a_rate_that_learnt_or_after_smaller_rates():
    whole = standing().conditions["sorted"]
    assert whole.complete(SEEDS)
    assert not replace(whole, seeds=whole.seeds[:2]).complete(SEEDS)
    assert replace(whole, seeds=whole.seeds[:2]).complete((1, 2))
    assert Placing(refused="collapses").complete(SEEDS)
    chance = replace(whole, trials=dict.fromkeys("abcde", 0.1))
    assert not chance.complete(SEEDS)
    assert replace(chance, trials=dict.fromkeys("abcdefghij", 0.1)).complete(SEEDS)


def test_the_tables_tell_missing_seeds_and_rates_that_are_a_matter_of_chance():
    lucky = standing("edm")
    lucky.conditions["sorted"] = replace(lucky.conditions["sorted"], trials={"0.1": 0.11, "0.2": None})
    document = leaderboard_document({"digits": [lucky, standing(seeds=((1, 0.5),))]})
    section = next(one for one in document.sections if one.anchor == "digits-sorted")
    assert [row.cells[-1].text for row in section.rows] == ["no rate learnt anything in its trials", "1 of 3 seeds"]
    contrast = Contrast("", Number("digits", "edm", "sorted"), Number("digits", "dsgd", "sorted"))
    assert contrast.answer({"digits": [lucky, standing()]}).verdict == "not tuned: no rate learnt anything"


def test_methods_are_chosen_by_patterns():
    assert [one.name for one in select(DIGITS, ["edm", "dsgd*merge"])] == ["edm", "dsgd + merge", "dsgdm-n + merge"]
    with pytest.raises(InputError, match="no method of tier digits matches 'nothing'"):
        select(DIGITS, ["nothing"])


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setitem(TIERS, "toy", TOY)
    return TOY


@pytest.mark.filterwarnings("ignore:.*loses its exactness")
def test_two_methods_get_the_same_partitions_and_a_refusal_is_a_result(toy, tmp_path):
    chosen = [contender("dsgd", toy), contender("decentlam", toy)]
    first, second = compete(chosen, toy, Options(runs=tmp_path, device="cpu"))
    drawn = [[one.partition for one in found.conditions["sorted"].seeds] for found in (first, second)]
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) == len(SEEDS)
    assert first.conditions["lost"].refused == ""
    assert "DecentLaM collapses when messages are lost" in second.conditions["lost"].refused
    assert second.conditions["lost"].seeds == ()


def test_smaller_rates_follow_if_no_rate_learns_anything(tmp_path):
    """Rates around 1,000 make all networks constant, or diverge."""
    tier = replace(TOY, conditions=TOY.conditions[:1])
    wild = replace(contender("dsgdm-n", tier), lr=1e3)
    (found,) = compete([wild], tier, Options(runs=tmp_path, device="cpu"))
    rates = sorted(float(rate) for rate in found.conditions["sorted"].trials)
    assert rates[0] <= 1e3 / 2**7
    assert len(rates) >= 10
    (plain,) = compete([contender("dsgdm-n", tier)], tier, Options(runs=tmp_path, device="cpu"))
    assert min(float(rate) for rate in plain.conditions["sorted"].trials) > 0.1 / 2**7


def test_without_tuning_the_given_rate_is_run_and_a_nodes_score_is_the_mean_of_its_last_tests(tmp_path):
    tier = replace(TOY, validation=0.0, tests=2, conditions=TOY.conditions[:1])
    tier = replace(tier, experiment=replace(tier.experiment, eval_every=1))
    dsgd = contender("dsgd", tier, lr=0.2)
    (second,) = compete([dsgd], replace(tier, seeds=(2,)), Options(runs=tmp_path, device="cpu"))
    assert [one.seed for one in second.conditions["sorted"].seeds] == [2]
    (found,) = compete([dsgd], tier, Options(runs=tmp_path, device="cpu"))
    placing = found.conditions["sorted"]
    assert (placing.lr, placing.trials) == (0.2, {})
    runs = {run.experiment.seed: run for run in find_runs(tmp_path)}
    assert set(runs) == set(SEEDS)
    for result in placing.seeds:
        before, last = (record["accuracy_nodes"] for record in runs[result.seed].records())
        assert result.worst == pytest.approx(min((a + b) / 2 for a, b in zip(before, last, strict=True)))
        assert result.mean == pytest.approx((sum(before) + sum(last)) / 32)


@pytest.mark.slow
def test_somebodys_own_class_is_added_from_the_command_line(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("mine_of_tests.py").write_text(MINE)
    words = ("leaderboard", "add", "mine_of_tests:Mine", "--tier", "toy", "--records", "records", "--device", "cpu")
    status, out, err = inside(monkeypatch, capsys, *words, "--workers", "1")
    assert (status, err) == (0, "")
    assert "1 of 1 after" in out
    found = read_standing(tmp_path / "records/toy/mine_of_tests-Mine.json")
    assert found.algorithm == "mine_of_tests:Mine"
    for placing in found.conditions.values():
        rates = sorted(float(rate) for rate in placing.trials)
        assert all(after / before == pytest.approx(FACTOR, rel=1e-4) for before, after in pairwise(rates))
        assert rates[0] < placing.lr < rates[-1] or not placing.inside
        assert [one.seed for one in placing.seeds] == list(SEEDS)
        assert all(0 <= one.worst <= one.mean <= 1 and one.bytes > 0 and one.seconds > 0 for one in placing.seeds)
    assert "mine_of_tests:Mine" in Path("out/leaderboard/index.html").read_text()
    (folder,) = Path("runs/leaderboard/toy").iterdir()
    runs = list(find_runs(folder))
    assert {run.experiment.seed for run in runs if run.experiment.validation} == {0}
    assert {run.experiment.seed for run in runs if not run.experiment.validation} == set(SEEDS)
    assert not list(Path("runs").rglob("checkpoint"))
    inside(monkeypatch, capsys, *words, "--workers", "1")                  # the same command repeats no run
    assert {run.folder for run in find_runs(folder)} == {run.folder for run in runs}
    assert read_standing(tmp_path / "records/toy/mine_of_tests-Mine.json") == found
    Path("mine_of_tests.py").write_text(MINE.replace("node.lr * g", "node.lr * g.sign()"))
    monkeypatch.delitem(sys.modules, "mine_of_tests")
    importlib.invalidate_caches()
    assert inside(monkeypatch, capsys, *words, "--workers", "1")[0] == 0   # after a change, it does
    assert len(list(Path("runs/leaderboard/toy").iterdir())) == 2
    assert read_standing(tmp_path / "records/toy/mine_of_tests-Mine.json") != found


@pytest.mark.slow
def test_again_trains_anew_what_has_a_record(toy, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("leaderboard", "toy", "--methods", "dsgd", "--records", "records", "--device", "cpu", "--workers", "1")
    assert inside(monkeypatch, capsys, *words)[0] == 0
    summaries = [run.folder / "summary.json" for run in find_runs(Path("runs/leaderboard/toy"))]
    first = {path: path.stat().st_mtime_ns for path in summaries}
    assert inside(monkeypatch, capsys, *words)[0] == 0
    assert all(path.stat().st_mtime_ns == made for path, made in first.items())
    assert inside(monkeypatch, capsys, *words, "--again")[0] == 0
    assert all(path.stat().st_mtime_ns > made for path, made in first.items())


PARENT = '''
import multiprocessing, os, time
from concurrent.futures import ProcessPoolExecutor
from quasiglobal.reproduction.leaderboard.contest import _prepare_process

if __name__ == "__main__":
    pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare_process)
    print(pool.submit(os.getpid).result(), flush=True)
    pool.submit(time.sleep, 600)
    time.sleep(600)
'''


def test_a_worker_ends_with_the_process_that_started_it(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    with subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, text=True) as parent:
        worker = int(parent.stdout.readline())
        parent.kill()
    until = time.monotonic() + 20
    while Path(f"/proc/{worker}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{worker}").exists()


@pytest.mark.slow
def test_processes_find_what_one_process_finds_and_a_failure_stops_nobody(tmp_path):
    chosen = [contender("dsgd", TOY), contender("qg-dsgdm-n", TOY)]
    broken = replace(chosen[0], name="broken", communication="complete@0.5-1.0", algorithm="edm")

    def numbers(found):
        return {
            one.name: [
                (placing.lr, [(seed.seed, seed.partition, seed.bytes, seed.mean) for seed in placing.seeds])
                for placing in one.conditions.values()
            ]
            for one in found
        }

    here = numbers(contest(chosen, TOY, Options(runs=tmp_path / "here", device="cpu")))
    contested = contest([broken, *chosen], TOY, Options(runs=tmp_path / "there", device="cpu"), workers=2)
    there = []
    with pytest.raises(InputError, match="broken failed: ExactDiffusion needs a fixed W"):
        deque(map(there.append, contested), maxlen=0)
    assert numbers(there) == here


def test_a_record_is_read_as_it_was_written(tmp_path):
    one = standing()
    assert read_standing(write_standing(one, tmp_path)) == one
    assert read_standing(write_standing(replace(one, version=0), tmp_path)) is None
    text = write_standing(one, tmp_path).read_text()
    changes = {
        '"mean": 0.9': '"mean": "0.9"', '"lr": 0.1': '"lr": "x"', '"wire": "full"': '"wire": null',
        '"name": "dsgd"': '"name": 5', '"published": {}': '"published": null', '"diverged": false': '"diverged": 1',
    }
    assert all(old in text for old in changes)
    for damaged in ("{", '{"conditions": []}', *(text.replace(*change) for change in changes.items())):
        (tmp_path / "digits/dsgd.json").write_text(damaged)
        with pytest.warns(UserWarning, match="is damaged and ignored"):
            assert read_standing(tmp_path / "digits/dsgd.json") is None


def test_a_difference_is_compared_with_the_noise_seed_by_seed():
    better = standing("edm", ((1, 0.92), (2, 0.82), (3, 0.72)))
    found = Contrast("", Number("digits", "edm", "sorted"), Number("digits", "dsgd", "sorted")).answer(
        {"digits": [standing(), better]}
    )
    assert found.gap.value == pytest.approx(2.0)
    assert found.gap.noise == pytest.approx(0.0, abs=1e-9)
    assert found.verdict == "higher"
    assert Contrast("", Number("digits", "edm", "lost"), Number("digits", "dsgd", "sorted")).answer({}) is None
    gone = standing("ab")
    gone.conditions["sorted"] = replace(gone.conditions["sorted"], seeds=(SeedResult(1, diverged=True),))
    found = Contrast("", Number("digits", "ab", "sorted"), Number("digits", "dsgd", "sorted")).answer(
        {"digits": [standing(), gone]}
    )
    assert (found.ours, found.other, found.verdict) == (None, pytest.approx(80.0), "diverges")


def test_questions_are_about_methods_that_take_part():
    known = {tier.name: {one.name for one in contenders(tier)} for tier in TIERS.values()}
    conditions = {tier.name: {one.name for one in tier.conditions} for tier in TIERS.values()}
    for one in (one for contrasts in QUESTIONS.values() for one in contrasts):
        for number in (one.ours, one.other):
            assert number.method in known[number.tier]
            assert number.condition in conditions[number.tier]


def test_the_tables_rank_methods_and_tell_refusals_and_divergence():
    diverged = standing("ab", ((1, 0.9),))
    diverged.conditions["sorted"] = replace(diverged.conditions["sorted"], seeds=(SeedResult(1, diverged=True),))
    refused = standing("decentlam")
    refused.conditions["sorted"] = Placing(refused="collapses")
    better, central = standing("edm", ((1, 0.95),)), standing("sgd", ((1, 0.99),), central=True)
    document = leaderboard_document({"digits": [standing(), diverged, refused, better, central]})
    section = next(one for one in document.sections if one.anchor == "digits-sorted")
    assert [row.cells[0].text for row in section.rows] == ["sgd", "edm", "dsgd", "ab", "decentlam"]
    assert [row.cells[2].text for row in section.rows] == ["99.00", "95.00", "80.00 ± 10.00", "⋆ (1 of 1)", "refused"]
    assert "| decentlam | ring:16 | refused |" in markdown(document)
    assert section.rows[-1].cells[-1].text == "collapses"
    top = blocks({"digits": [standing(), better, central]})["top digits"]
    assert [line.split(" | ")[0] for line in top.splitlines()[2:]] == ["| edm", "| dsgd"]


def test_a_documents_blocks_are_made_from_the_records(tmp_path):
    page = tmp_path / "page.md"
    other = "<!-- leaderboard: top cifar -->kept<!-- end -->"
    page.write_text(f"before\n<!-- leaderboard: top digits -->\nold\n<!-- end -->\n{other}")
    made = blocks({"digits": [standing()]})
    assert refresh(page, made) == {"top cifar"}
    assert page.read_text() == f"before\n<!-- leaderboard: top digits -->\n{made['top digits']}\n<!-- end -->\n{other}"


def test_bad_words_are_one_sentence(tmp_path, monkeypatch, capsys):
    plain = tmp_path / "plain.md"
    plain.write_text("no blocks")
    wrong = tmp_path / "wrong.md"
    wrong.write_text("<!-- leaderboard: top digit --><!-- end -->")
    for words, sentence in (
        (("digit",), "unknown tier 'digit'; did you mean 'digits'?"),
        (("--show", "--records", str(tmp_path)), f"no records of tier digits in {tmp_path}; run"),
        (("--show", "--methods", "dsgdd", "--records", str(RECORDS)), "unknown method in the records of tier digits"),
        (("--methods", "dsgd", "--workers", "-3", "--records", str(tmp_path)), "workers must be >= 0, got -3"),
        (("--show", "--update", str(plain)), f"{plain} has no block to update"),
        (("--show", "--update", str(wrong)), f"unknown block of {wrong} 'top digit'; did you mean 'top digits'?"),
    ):
        status, _, err = inside(monkeypatch, capsys, "leaderboard", *words, "--out", str(tmp_path / "out"))
        assert status == 2
        assert f"qg: {sentence}" in err


def test_the_tables_are_printed_as_json_too(tmp_path, monkeypatch, capsys):
    write_standing(standing(), tmp_path)
    words = ("leaderboard", "--show", "--records", str(tmp_path), "--out", str(tmp_path / "out"), "--json")
    status, out, _ = inside(monkeypatch, capsys, *words)
    assert status == 0
    (found,) = json.loads(out)
    assert found["conditions"]["sorted"]["seeds"][0]["mean"] == 0.9
