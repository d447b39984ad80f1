"""Figures of training runs, drawn from a store of made-up runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from quasiglobal import InputError
from quasiglobal.reproduction.paper import figures
from quasiglobal.reproduction.paper.figures import (
    BETAS,
    QUASI_GLOBAL,
    RATES,
    TRAINED,
    draw_from_store,
    local_momentum,
    write_figure,
)
from quasiglobal.reproduction.paper.tables import TABLES, at_scale
from quasiglobal.runs.store import RunFolder, RunStore, find_runs

DRAWN = [name for name, figure in TRAINED.items() if figure.table.cells]


def store(root, cells, accuracy=lambda cell: 0.5, scale="smoke"):
    """Write a two-epoch run for each cell at its learning rate; accuracy None: it diverged in the second epoch."""
    for cell in cells:
        run = RunFolder.of(at_scale(cell.experiment, scale), root)
        run.describe()
        reached = accuracy(cell)
        run.rewrite(
            [
                {"epoch": epoch, "lr": 0.1, "loss": 1 / epoch, "accuracy": (reached or 0) * epoch / 2}
                | {"accuracy_averaged": 0.5, "weight_norm": 10.0 * epoch, "effective_step": 0.1 / (10 * epoch) ** 2}
                for epoch in (1, 2)
            ]
        )
        run.finish("diverged" if reached is None else "finished", {})


def draw(name, root, scale="smoke"):
    return draw_from_store(name, RunStore.read(root), scale)


def drawn(figure):
    """The panels that are not empty."""
    return [panel for panel in figure.axes if panel.lines or panel.collections or panel.images]


@pytest.mark.parametrize("name", DRAWN)
def test_every_figure_names_experiments_that_can_be_run_and_draws_them(name, tmp_path):
    cells = TRAINED[name].table.cells
    assert len({cell.name for cell in cells}) == len(cells)
    store(tmp_path / "runs", cells)
    made = draw(name, tmp_path / "runs")
    assert "SMOKE: digits in place of the data" in made.figure.get_suptitle().replace("\n", " ")
    assert "not run" not in made.says
    assert made.rows
    assert not any(text.get_text() == "not run" for panel in made.figure.axes for text in panel.texts)
    assert len(drawn(made.figure)) >= 2


def test_a_curve_of_a_single_test_is_a_dot(tmp_path):
    cells = TRAINED["figure-curves"].table.cells
    store(tmp_path / "runs", cells)
    for run in find_runs(tmp_path / "runs"):
        folder = RunFolder.of(run.experiment, tmp_path / "runs")
        folder.rewrite([{"epoch": 1, "loss": 1.0}, {"epoch": 2, "loss": 0.5, "accuracy": 0.5}])
    lines = [line for panel in drawn(draw("figure-curves", tmp_path / "runs").figure) for line in panel.lines]
    assert len(lines) == len(cells)
    assert {line.get_marker() for line in lines} == {"o"}


@pytest.mark.parametrize("name", DRAWN)
def test_what_was_not_run_is_said_and_never_made_up(name, tmp_path):
    cells = TRAINED[name].table.cells
    command = f"qg reproduce {name} --scale smoke"
    with pytest.raises(InputError, match=f"has no run of {name} at smoke scale; `{command}` runs them"):
        draw(name, tmp_path / "runs")
    column = cells[-1].column
    chosen = [cell for cell in cells if cell.column == column]
    store(tmp_path / "runs", chosen)
    made = draw(name, tmp_path / "runs")
    assert f"{len(cells) - len(chosen)} of {len(cells)} cells were not run." in made.says
    shown = [panel for panel in made.figure.axes if panel.get_visible()]
    assert any(panel.has_data() for panel in shown)
    for panel in shown:                                     # no empty panels
        assert panel.has_data() or panel.texts or panel.get_legend()


def test_a_figure_of_a_table_has_the_tables_cells():
    for name in ("motivation", "single-worker", "weight-decay", "ring-scales"):
        assert TRAINED[f"figure-{name}"].table.cells == TABLES[name].cells
    assert len({cell.column for cell in TRAINED["figure-curves"].table.cells}) == 8


def test_the_momentum_map_shows_who_is_ahead_what_diverged_and_what_was_not_run(tmp_path):
    cells = TRAINED["figure-momentum-tuning"].table.cells
    assert sum(cell.experiment.algorithm == "dsgdm-n" for cell in cells) == 2 * len(RATES), "β = 0.9 is the default"

    def accuracy(cell):
        if cell.row == QUASI_GLOBAL:
            return 0.8
        if cell.row == local_momentum(0.99, 1.6):
            return None
        return 0.75 if cell.row == local_momentum(0.7, 0.4) else 0.5

    store(tmp_path, [cell for cell in cells if cell.row != local_momentum(0.5, 0.1)], accuracy)
    made = draw("figure-momentum-tuning", tmp_path)
    gaps = np.array([row["gap"] for row in made.rows if row["alpha"] == 0.1]).reshape(len(BETAS), len(RATES))
    assert math.isnan(gaps[0, 0])
    assert math.isinf(gaps[-1, -1])
    assert gaps[BETAS.index(0.7), RATES.index(0.4)] == pytest.approx(5)
    assert gaps[BETAS.index(0.9), RATES.index(0.8)] == pytest.approx(30)
    assert "α = 0.1: the best DSGDm-N, β = 0.7 and lr = 0.4, is 5.00 points behind QG-DSGDm-N" in made.says
    texts = [text.get_text() for text in made.figure.axes[0].texts]
    assert texts.count("×") == 1
    assert len(texts) == len(BETAS) * len(RATES) - 1


@pytest.mark.parametrize(("lost", "says", "panel_says"), [
    ("DSGDm-N, β", "α = 0.1: every DSGDm-N that was run diverged. A cross: it diverged.", "×"),
    ("QG-DSGDm-N", "α = 0.1: QG-DSGDm-N diverged.", "QG-DSGDm-N diverged"),
])  # fmt: skip
def test_the_momentum_map_says_in_words_who_diverged(tmp_path, lost, says, panel_says):
    cells = TRAINED["figure-momentum-tuning"].table.cells
    store(tmp_path, cells, lambda cell: None if str(cell.row).startswith(lost) else 0.5)
    made = draw("figure-momentum-tuning", tmp_path)
    assert made.says.endswith(says)
    assert "inf" not in made.says
    assert {text.get_text() for text in made.figure.axes[1].texts} == {panel_says}


@pytest.mark.parametrize("name", [*DRAWN[:3], *(pytest.param(name, marks=pytest.mark.slow) for name in DRAWN[3:])])
def test_what_diverged_at_once_is_drawn_and_said(name, tmp_path):
    cells = TRAINED[name].table.cells
    nothing = dict.fromkeys(("loss", "train_accuracy", "test_loss", "weight_norm", "effective_step"))
    for cell in cells:
        run = RunFolder.of(at_scale(cell.experiment, "smoke"), tmp_path / "runs")
        run.describe()
        run.rewrite([{"epoch": 1, "lr": 0.1, "accuracy": 0.1, "accuracy_averaged": 0.1} | nothing])
        run.finish("diverged", {})
    made = draw(name, tmp_path / "runs")
    assert {path.suffix for path in write_figure(made, name, tmp_path)} == {".png", ".svg", ".csv"}
    assert "not run" not in made.says
    assert "diverged" in made.says
    assert not any(text.get_text() == "not run" for panel in made.figure.axes for text in panel.texts)
    if name == "figure-effective-step":
        assert "SGDm, BN, none: diverged" in made.says
        assert {text.get_text() for panel in made.figure.axes for text in panel.texts} == {"diverged"}


def test_the_papers_numbers_stand_beside_ours_at_the_papers_scale_alone(tmp_path):
    cells = TRAINED["figure-ring-scales"].table.cells
    for scale, series in (("smoke", 3), ("paper", 6)):
        store(tmp_path, [replace(cell, experiment=replace(cell.experiment, lr=0.8)) for cell in cells], scale=scale)
        panel = draw("figure-ring-scales", tmp_path, scale).figure.axes[0]
        assert len(panel.containers) == series


def test_a_curve_is_what_the_records_say(tmp_path):
    store(tmp_path, TRAINED["figure-effective-step"].table.cells)
    norm, step = (draw("figure-effective-step", tmp_path).figure.axes[k].lines[0] for k in (0, 4))
    assert norm.get_xydata().tolist() == [[1, 10], [2, 20]]
    np.testing.assert_allclose(step.get_ydata(), [1e-3, 2.5e-4])


@pytest.mark.slow
def test_partitions_are_drawn_without_a_run_and_missing_data_is_named(tmp_path, monkeypatch):
    made = draw("figure-partition", tmp_path)
    assert len(drawn(made.figure)) == 7
    counted = [row["examples"] for row in made.rows if (row["n"], row["alpha"]) == (32, 0.1)]
    assert sum(counted) == pytest.approx(1437, abs=32), "all examples but the remainder of equal slices"
    assert {path.suffix for path in write_figure(made, "figure-partition", tmp_path)} == {".png", ".svg", ".csv"}
    monkeypatch.setattr(figures, "PARTITIONS", [("digits", "digits", 16, 1), ("AG News", "agnews", 16, 1)])
    assert "because the data is not installed: AG News" in draw("figure-partition", tmp_path, "paper").says


def test_an_unknown_figure_is_one_sentence(tmp_path):
    with pytest.raises(InputError, match="did you mean 'figure-curves'"):
        draw("figure-curve", tmp_path)
