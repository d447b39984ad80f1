"""The paper's numbers: complete, and consistent wherever the paper is consistent."""

from collections import defaultdict

import pytest

from quasiglobal.reproduction.paper.tables import TABLES, ColumnLabel, RowLabel, published
from quasiglobal.runs.comparison import Score

COUNTS = {
    "motivation": (18, 0, 0),
    "cifar10": (74, 0, 0),
    "gradient-tracking": (16, 2, 0),
    "imagenet": (19, 0, 1),
    "imagenet-topologies": (8, 0, 0),
    "momentum-variants": (25, 0, 0),
    "adam": (4, 0, 0),
    "single-worker": (8, 0, 0),
    "weight-decay": (8, 0, 0),
    "ring-scales": (15, 0, 0),
    "multi-step": (13, 0, 0),
}
"""Means with a std, means without, and runs that did not converge, as counted in the paper's source."""


@pytest.mark.parametrize("name", COUNTS)
def test_a_table_has_as_many_numbers_as_the_papers(name):
    scores = list(published()[name].scores.values())
    alone = sum(score is not None and score.std is None for score in scores)
    assert (len(scores) - alone - scores.count(None), alone, scores.count(None)) == COUNTS[name]


def test_there_are_eleven_tables_with_208_means_and_deviations():
    assert set(published()) == set(COUNTS)
    assert [sum(column) for column in zip(*COUNTS.values(), strict=True)] == [208, 2, 1]


def test_rows_are_as_many_as_the_paper_says():
    assert len(published()["cifar10"].rows) == 15
    assert len(published()["momentum-variants"].rows) == 13


def test_an_experiment_has_one_number_in_all_tables_but_for_the_papers_slip():
    numbers = defaultdict(set)
    for table in TABLES.values():
        for cell in table.cells:
            if not cell.text:
                numbers[cell.experiment].add(cell.score)
    assert sum(len(table.cells) for table in TABLES.values()) > len(numbers) + 30, "tables share experiments"
    slips = {experiment: scores for experiment, scores in numbers.items() if len(scores) > 1}
    ((experiment, scores),) = slips.items()
    assert (experiment.algorithm, experiment.topology, experiment.alpha) == ("qg-dsgdm-n", "ring:32", 1.0)
    assert scores == {Score(90.27, 0.27), Score(90.27, 0.07)}


def test_the_papers_contradictions_are_noted():
    tables = published()
    for name in ("gradient-tracking", "ring-scales"):
        assert any("90.27 ± 0.27" in note and "90.27 ± 0.07" in note for note in tables[name].notes)
    (note,) = tables["motivation"].notes
    for group in ("ring 16", "social 32"):
        for model in ("BN", "EvoNorm"):
            row, column = RowLabel("SGDm-N (centralized)", f"ResNet-{model}-20"), ColumnLabel("iid", group)
            assert str(tables["cifar10"].scores[row, column]) in note
