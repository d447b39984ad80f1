"""The paper's tables as experiments."""

import json
from dataclasses import asdict

import pytest

from quasiglobal import InputError, algorithm
from quasiglobal.algorithms.centralized import Centralized
from quasiglobal.data.sources import SOURCES, TEXT_SOURCES
from quasiglobal.reproduction.paper.tables import SCALES, TABLES, at_scale, published
from quasiglobal.runs.building import model_of
from quasiglobal.topology import parse
from quasiglobal.training.experiment import from_mapping

CELLS = [(table, cell) for table in TABLES.values() for cell in table.cells]


@pytest.mark.parametrize("name", published())
def test_every_number_of_the_paper_has_an_experiment(name):
    papers = {(cell.row, cell.column): cell.score for cell in TABLES[name].cells if not cell.text}
    assert papers == published()[name].scores
    assert {cell.column for cell in TABLES[name].cells} == set(published()[name].columns)


@pytest.mark.parametrize("scale", SCALES)
def test_every_experiment_can_be_written_down_and_read_again_under_its_name(scale):
    for _, cell in CELLS:
        for experiment in cell.experiments(scale):
            read = from_mapping(json.loads(json.dumps(asdict(experiment))), "a run")
            assert (read, read.name) == (experiment, experiment.name)


def test_every_experiment_names_what_there_is():
    for _, cell in CELLS:
        algorithm(cell.experiment.algorithm)
        assert parse(cell.experiment.topology).n in (1, 16, 32, 48)
        assert cell.experiment.data in SOURCES | TEXT_SOURCES
        model_of(at_scale(cell.experiment, "smoke"), 10, (1, 8, 8))


def test_cells_without_a_learning_rate_are_those_that_the_paper_tunes():
    for _, cell in CELLS:
        assert (cell.experiment.lr is None) == (cell.experiment.data != "imagenet")
        assert cell.experiment.seed == 0


def test_a_centralized_reference_is_one_experiment_for_all_alphas_and_graphs_of_its_size():
    references = {
        cell.experiment
        for table, cell in CELLS
        if isinstance(algorithm(cell.experiment.algorithm), Centralized) and table.name != "weight-decay"
        and cell.experiment.data == "cifar10" and cell.experiment.norm == "evonorm-released"
    }
    assert {one.partition for one in references} == {"iid"}
    assert sorted(parse(one.topology).n for one in references) == [16, 32, 48]


def test_the_papers_rows_are_what_made_its_numbers_and_the_text_stands_beside_them():
    for _, cell in CELLS:
        assert cell.experiment.norm != "evonorm" or cell.text
        assert cell.text == ("as in the text" in str(cell.row))
    texts = {cell.experiment.algorithm for _, cell in CELLS if cell.text and cell.experiment.norm != "evonorm"}
    assert texts == {"slowmo", "qg-dadam", *(f"qg-dsgdm-n:tau={tau}" for tau in (2, 3, 4))}
    made = {cell.experiment.algorithm for _, cell in CELLS if not cell.text}
    assert {"slowmo:released=true", "qg-dadam:released=true", "qg-dsgdm-n:tau=2,released=true"} <= made


def test_the_headline_is_the_papers_setting():
    (cell,) = (one for one in TABLES["motivation"].cells if one.name == "QG-DSGDm-N | ring 16, α = 0.1")
    expected = {
        "data": "cifar10", "model": "resnet20", "norm": "evonorm-released", "algorithm": "qg-dsgdm-n",
        "topology": "ring:16", "partition": "dirichlet", "alpha": 0.1, "epochs": 300, "batch": 32, "warmup": 5.0,
        "milestones": (0.5, 0.75), "weight_decay": 1e-4, "precision": "bf16", "eval_every": 10,
    }
    assert {name: getattr(cell.experiment, name) for name in expected} == expected
    assert cell.experiment.peak_lr == pytest.approx(0.8)


def test_a_scale_says_what_it_changes():
    table = TABLES["cifar10"]
    assert table.title_at("paper") == table.title
    assert table.title_at("short").endswith("(SHORT: a tenth of the epochs)")
    assert "SMOKE: digits in place of the data" in table.title_at("smoke")
    first = table.cells[0].experiment
    assert at_scale(first, "paper") == first
    assert (at_scale(first, "short").data, at_scale(first, "short").epochs) == ("cifar10", 30)
    with pytest.raises(InputError, match="unknown scale 'shot'; did you mean 'short'"):
        at_scale(first, "shot")


def test_smoke_keeps_apart_what_the_paper_keeps_apart_but_for_data_and_depth():
    for table in TABLES.values():
        by_smoke = {}
        for cell in table.cells:
            kept = (cell.experiment.algorithm, cell.experiment.norm, cell.experiment.alpha, cell.experiment.partition)
            assert by_smoke.setdefault(at_scale(cell.experiment, "smoke"), kept) == kept
