"""The paper's figures of training runs: the cells and the drawing function of each."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap

from quasiglobal.algorithms import with_option
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.paper.figures.drawing import (
    BETAS,
    NO_WEIGHT_DECAY,
    QUASI_GLOBAL,
    RATES,
    WEIGHT_DECAY,
    Canvas,
    Reproduced,
    draw_effective_step,
    draw_learning_curves,
    draw_momentum_tuning,
    draw_motivation,
    draw_partition,
    draw_ring_scales,
    draw_single_worker,
    draw_weight_decay,
    local_momentum,
)
from quasiglobal.reproduction.paper.outcomes import Outcome, outcomes
from quasiglobal.reproduction.paper.tables import (
    ALONE,
    CIFAR10,
    DSGDM_N,
    QG_DSGDM_N,
    TABLES,
    ColumnLabel,
    PaperCell,
    PaperTable,
    RowLabel,
    Scale,
    Settings,
    by_alpha,
)
from quasiglobal.runs.plots import style
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment


def _cells(
    base: Settings, rows: Mapping[RowLabel, Settings], columns: Mapping[ColumnLabel, Settings]
) -> tuple[PaperCell, ...]:
    """Cells without a published number."""
    return tuple(
        PaperCell(row, column, Experiment(**{**base, **place, **settings}), None)
        for row, settings in rows.items()
        for column, place in columns.items()
    )


EFFECTIVE_STEP = _cells(
    {**CIFAR10, **ALONE},
    {RowLabel("SGDm"): {"algorithm": "sgdm"}, RowLabel("QG-SGDm"): {"algorithm": "qg-sgdm"}},
    {
        ColumnLabel(WEIGHT_DECAY, "BN"): {"norm": "bn"},
        ColumnLabel(WEIGHT_DECAY, "GN"): {"norm": "gn"},
        ColumnLabel(NO_WEIGHT_DECAY, "BN"): {"norm": "bn", "weight_decay": 0.0},
        ColumnLabel(NO_WEIGHT_DECAY, "GN"): {"norm": "gn", "weight_decay": 0.0},
    },
)

LEARNING_CURVES = (
    *sorted(TABLES["motivation"].cells, key=lambda cell: cell.column.group == "ring 16"),
    *(
        PaperCell(cell.row, ColumnLabel(cell.column.setting, "ImageNet, ring 16"), cell.experiment, cell.score)
        for cell in TABLES["imagenet"].cells
        if cell.row.model == "ImageNet, ResNet-18 EvoNorm" and cell.column.setting != "iid" and not cell.text
    ),
)

MOMENTUM_TUNING = _cells(
    {**CIFAR10, "topology": "ring:16"},
    {QUASI_GLOBAL: QG_DSGDM_N}
    | {
        local_momentum(beta, rate): {"algorithm": with_option(DSGDM_N["algorithm"], "beta", beta), "lr": rate}
        for beta in BETAS
        for rate in RATES
    },
    {ColumnLabel.parse(text): settings for text, settings in by_alpha("ring:16", 1, 0.1, prefix="ring 16, ").items()},
)


Draw = Callable[[Sequence[Outcome], Canvas], Reproduced]


@dataclass(frozen=True)
class TrainingFigure:
    """A figure: its cells, as a table, and its drawing function."""

    table: PaperTable
    draw: Draw


def draw_from_store(name: str, store: RunStore, scale: Scale = "paper", data_dir: Path | None = None) -> Reproduced:
    """Draw a figure from the runs in a store; cells without runs are left out and counted."""
    if name not in TRAINED:
        raise unknown("figure", name, TRAINED)
    found = outcomes(TRAINED[name].table, store, scale)
    if found and not any(one.runs for one in found):
        command = f"qg reproduce {name}" + ("" if scale == "paper" else f" --scale {scale}")
        raise InputError(f"{store.root} has no run of {name} at {scale} scale; `{command}` runs them")
    return draw_outcomes(name, found, Canvas(scale, data_dir))


def draw_outcomes(name: str, found: Sequence[Outcome], canvas: Canvas) -> Reproduced:
    """Draw a figure from the outcomes of its cells."""
    title = title_of(name, canvas.scale)
    with style():
        made = TRAINED[name].draw(found, canvas)
        made.figure.suptitle("\n".join(wrap(title, int(12 * made.figure.get_figwidth()))), fontsize=10)
    lacking = sum(not one.runs for one in found)
    missing = f" {lacking} of {len(found)} cells were not run." if lacking else ""
    return Reproduced(made.figure, made.rows, f"{made.says}{missing}")


def title_of(name: str, scale: Scale) -> str:
    """A figure's title, with the changes to the paper's experiments at this scale."""
    table = TRAINED[name].table
    if table.cells:
        return table.title_at(scale)
    return table.title + (" (SMOKE: digits in place of the data)" if scale == "smoke" else "")


def _of_table(name: str, table: str, draw: Draw) -> TrainingFigure:
    """A figure of a table's cells, without the rows "as in the text"."""
    cells = tuple(cell for cell in TABLES[table].cells if not cell.text)
    return TrainingFigure(PaperTable(name, TABLES[table].title, cells), draw)


def _of_cells(name: str, title: str, cells: Sequence[PaperCell], draw: Draw) -> TrainingFigure:
    return TrainingFigure(PaperTable(name, title, tuple(cells)), draw)


TRAINED: dict[str, TrainingFigure] = {
    figure.table.name: figure
    for figure in (
        _of_table("figure-motivation", "motivation", draw_motivation),
        _of_cells("figure-partition", "Examples per class and node, by dot size", (), draw_partition),
        _of_cells(
            "figure-effective-step", "A single worker's weight norm and effective step: ResNet-20 on CIFAR-10",
            EFFECTIVE_STEP, draw_effective_step,
        ),
        _of_table("figure-single-worker", "single-worker", draw_single_worker),
        _of_table("figure-weight-decay", "weight-decay", draw_weight_decay),
        _of_cells("figure-curves", "Learning curves: CIFAR-10 and ImageNet", LEARNING_CURVES, draw_learning_curves),
        _of_cells(
            "figure-momentum-tuning",
            "Tuning DSGDm-N's momentum factor, against QG-DSGDm-N with β = 0.9: ResNet-EvoNorm-20 on CIFAR-10",
            MOMENTUM_TUNING, draw_momentum_tuning,
        ),
        _of_table("figure-ring-scales", "ring-scales", draw_ring_scales),
    )
}
"""The figures of training runs by name."""
