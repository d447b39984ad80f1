"""Verdicts on the paper's claims, from its own numbers and from hand-made run stores."""

import math
from dataclasses import replace

import pytest
from hand_made_stores import cell, leave

from quasiglobal.reproduction.paper.claims import (
    CLAIMS,
    Claim,
    above,
    gain_above,
    momentum_tuning,
    our_scores,
    paper_scores,
    verdict,
)
from quasiglobal.reproduction.paper.outcomes import outcomes
from quasiglobal.reproduction.paper.summary import summary
from quasiglobal.reproduction.paper.tables import TABLES, ColumnLabel, RowLabel, published
from quasiglobal.reproduction.report.noise import Sample
from quasiglobal.runs.store import RunStore

GAINS, MORE, RANGE, EVONORM = CLAIMS[0].says, CLAIMS[1].says, CLAIMS[2].says, CLAIMS[4].says
SYNCHRONIZED, MULTISTEP, CENTRAL = CLAIMS[9].says, CLAIMS[17].says, CLAIMS[22].says
TUNING = "Tuning the momentum factor of DSGDm-N does not bring it up to quasi-global momentum."


def judged(root, says):
    """The cell with the verdict of our runs on a claim."""
    return next(row.cells[3] for row in summary(RunStore.read(root)).sections[0].rows if row.cells[0].text == says)


def test_every_claim_has_comparisons_and_all_of_them_have_numbers_in_the_paper():
    papers = paper_scores()
    for claim in CLAIMS:
        assert claim.comparisons, claim.says
        for comparison in claim.comparisons:
            assert all(place in papers for _, place in comparison.terms), claim.says
            assert sum(factor for factor, _ in comparison.terms) == 0
    assert len({claim.says for claim in CLAIMS}) == len(CLAIMS)


def test_what_the_papers_own_numbers_say_of_its_claims():
    papers = paper_scores()
    by_verdict = {}
    for claim in CLAIMS:
        by_verdict.setdefault(verdict(claim.judge(papers)), []).append(claim.says)
    assert by_verdict["does not hold"] == [RANGE, EVONORM]
    assert MORE in by_verdict["within noise"]
    assert CENTRAL in by_verdict["within noise"]
    assert GAINS in by_verdict["holds"]
    assert len(by_verdict["holds"]) == 15


def test_evonorm_is_below_gn_in_the_papers_own_numbers_on_imagenet_32():
    wrong = [one for one in CLAIMS[4].judge(paper_scores()) if one.verdict == "does not hold"]
    assert [one.gap.value for one in wrong] == [pytest.approx(30.35 - 34.16), pytest.approx(31.24 - 38.57)]


def test_what_did_not_converge_is_below_what_did():
    (found,) = [one for one in CLAIMS[3].judge(paper_scores()) if math.isinf(one.gap.value)]
    assert found.verdict == "holds"
    assert str(found).endswith(": +∞, as not all converged")


@pytest.mark.parametrize(("ours", "other", "expected"), [
    (Sample(9.38, 0.5, 3), Sample(9.38, 0.5, 3), "within noise"),
    (Sample(9.38, None, 1), Sample(9.38, None, 1), "within noise"),
    (Sample((0.1 + 0.2) * 100, 0.5, 3), Sample(30.0, 0.5, 3), "within noise"),
    (Sample(-math.inf, None, 1), Sample(9.38, None, 1), "does not hold"),
    (Sample(9.38, None, 1), Sample(-math.inf, None, 1), "holds"),
])  # fmt: skip
def test_a_tie_is_not_above_and_what_diverged_is_below_with_one_seed_too(ours, other, expected):
    comparison = next(above("motivation", "QG-DSGDm-N", "DSGD"))
    (_, high), (_, low) = comparison.terms
    assert comparison.judge({high: ours, low: other}).verdict == expected


def test_equal_gains_are_not_one_above_the_other():
    more, less = (ColumnLabel(setting, "ring 16") for setting in ("α = 0.1", "α = 1"))
    comparison = next(gain_above("cifar10", "QG-DSGDm-N", "DSGDm-N", more, less))
    assert comparison.judge({place: Sample(80.0, 0.5, 3) for _, place in comparison.terms}).verdict == "within noise"


def ring(row):
    return cell("cifar10", f"ResNet-EvoNorm-20: {row}", "ring 16, α = 0.1")


def test_a_claim_without_runs_is_not_run(tmp_path):
    assert judged(tmp_path, GAINS).text == "not run"
    assert judged(tmp_path, TUNING).text == "not run"


@pytest.mark.parametrize(("local", "text", "mark"), [
    ([75, 76, 77], "holds so far", "fair"),
    ([83.5, 82.5, 81.5], "undecided", "fair"),
    ([86, 87, 88], "does not hold", "bad"),
])  # fmt: skip
def test_a_claim_is_judged_by_the_worst_of_its_comparisons(tmp_path, local, text, mark):
    leave(tmp_path, ring("QG-DSGDm-N"), [81, 82, 83])
    leave(tmp_path, ring("DSGD"), [71, 72, 73])
    leave(tmp_path, ring("DSGDm-N"), local)
    found = judged(tmp_path, GAINS)
    assert (found.text, found.mark) == (text, mark)
    assert found.why[0].startswith("2 comparisons")
    assert len(found.why) == 3


def test_a_claim_that_something_makes_no_difference_stands_within_the_noise(tmp_path):
    column = "α = 0.1"
    leave(tmp_path, cell("multi-step", "QG-DSGDm-N, τ = 1", column), [81, 82, 83])
    leave(tmp_path, cell("multi-step", "QG-DSGDm-N, τ = 2", column), [84, 83, 82])
    assert judged(tmp_path, MULTISTEP).text == "holds so far"
    leave(tmp_path, cell("multi-step", "QG-DSGDm-N, τ = 3", column), [88, 89, 90])
    assert judged(tmp_path, MULTISTEP).text == "does not hold"


def test_a_claim_all_of_whose_comparisons_were_run_holds_without_reserve(tmp_path):
    for column in ("α = 1", "α = 0.1"):
        leave(tmp_path, cell("momentum-variants", "DSGDm-N, momentum over all", column), [81, 82, 83])
        leave(tmp_path, cell("momentum-variants", "DSGDm-N", column), [76, 77, 78])
    found = judged(tmp_path, CLAIMS[8].says)
    assert (found.text, found.mark) == ("holds", "good")


def compared(root, claim, quasi, local, diverged=((), ())):
    """A claim's comparison of QG-DSGDm-N and DSGDm-N, from their scores by seed and the seeds that diverged."""
    for row, scores, gone in zip(("QG-DSGDm-N", "DSGDm-N"), (quasi, local), diverged, strict=True):
        leave(root, ring(row), scores, diverged=gone)
    (found,) = claim.judge(our_scores({"cifar10": outcomes(TABLES["cifar10"], RunStore.read(root))}))
    return found


def test_methods_are_compared_seed_by_seed(tmp_path):
    found = compared(tmp_path, CLAIMS[0], [82, 75, 67.1], [80, 73, 65])
    assert found.gap.value == pytest.approx(6.1 / 3)
    assert found.gap.noise == pytest.approx(4.303 * 0.0577 / 3**0.5, rel=0.01)     # of 2, 2 and 2.1
    assert found.gap.within is False, "though each method's seeds are 15 points apart"


def test_only_the_seeds_that_both_have_are_compared(tmp_path):
    found = compared(tmp_path, CLAIMS[0], [82, 60, 60], [80])
    assert (found.gap.value, found.gap.noise, found.verdict) == (pytest.approx(2), None, "holds")


@pytest.mark.parametrize(("diverged", "expected"), [
    (((1,), ()), "does not hold"), (((), (2,)), "holds"), (((1,), (2,)), "within noise"),
])
@pytest.mark.parametrize("claim", [CLAIMS[0], CLAIMS[2]], ids=["above", "1 to 20 points"])
def test_a_side_that_diverged_on_a_seed_has_lost(tmp_path, claim, diverged, expected):
    assert compared(tmp_path, claim, [80, 80, 80], [79, 81, 79], diverged).verdict == expected


def betas(root, scale="paper"):
    """Names of the DSGDm-N rows with other momentum factors in a store."""
    return list(dict.fromkeys(str(cell.row) for cell in momentum_tuning(RunStore.read(root), scale).cells))


def test_the_tuning_of_momentum_is_read_from_whatever_the_store_has(tmp_path):
    local = cell("momentum-variants", "DSGDm-N", "α = 0.1")
    leave(tmp_path, cell("momentum-variants", "QG-DSGDm-N", "α = 0.1"), [81, 82, 83])
    for beta, accuracy in ((0.8, 78), (0.95, 76)):
        other = replace(local, experiment=replace(local.experiment, algorithm=f"dsgdm-n:beta={beta}"))
        leave(tmp_path, other, [accuracy])
    assert betas(tmp_path) == ["DSGDm-N, β = 0.8", "DSGDm-N, β = 0.95"]
    found = judged(tmp_path, TUNING)
    assert (found.text, found.mark) == ("holds so far", "fair")
    assert found.why[0] == "2 comparisons, +3.00 to +5.00, none beyond the noise", "seed 0 is compared with seed 0"


def test_a_momentum_factor_of_another_setting_or_with_another_option_is_none_of_the_papers(tmp_path):
    local = cell("momentum-variants", "DSGDm-N", "α = 0.1")
    for changes in (
        {"algorithm": "dsgdm-n:beta=0.5", "data": "digits"},
        {"algorithm": "dsgdm-n:beta=0.5,sync=momentum"},
        {"algorithm": "dsgdm-n:beta=0.8", "epochs": 30},
    ):
        leave(tmp_path, replace(local, experiment=replace(local.experiment, **changes)), [70])
    assert betas(tmp_path) == []
    other = replace(local, experiment=replace(local.experiment, algorithm="dsgdm-n:beta=0.8"))
    leave(tmp_path, other, [70], scale="short")
    assert betas(tmp_path) == []
    assert betas(tmp_path, "short") == ["DSGDm-N, β = 0.8"]


def test_a_gain_is_a_difference_of_differences():
    first = CLAIMS[1].comparisons[0]
    scores = {place: Sample(0.0, 0.1, 3) for _, place in first.terms}
    table = first.terms[0][1][0]
    for row, column, value in (
        ("ResNet-BN-20: QG-DSGDm-N", "ring 16, α = 0.1", 9), ("ResNet-BN-20: DSGDm-N", "ring 16, α = 0.1", 5),
        ("ResNet-BN-20: QG-DSGDm-N", "ring 16, α = 1", 3), ("ResNet-BN-20: DSGDm-N", "ring 16, α = 1", 2),
    ):  # fmt: skip
        place = table, RowLabel.parse(row), ColumnLabel.parse(column)
        assert place in scores
        scores[place] = Sample(value, 0.1, 3)
    assert first.judge(scores).gap.value == (9 - 5) - (3 - 2)


def test_a_claim_of_your_own_is_a_line():
    on_rings = tuple(above("motivation", "QG-DSGDm-N", "DSGD", group="ring 16"))
    claim = Claim("QG-DSGDm-N is above DSGD on rings.", "here", on_rings)
    rings = [column for column in published()["motivation"].columns if column.group == "ring 16"]
    assert [one.terms[0][1][2] for one in claim.comparisons] == rings
    assert verdict(claim.judge(paper_scores())) == "holds"
