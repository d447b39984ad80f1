"""Cells of the training figures that do not show exactly one table of the paper."""

from __future__ import annotations

from collections.abc import Mapping

from quasiglobal.algorithms import with_option
from quasiglobal.reproduction.paper.cells import PaperCell
from quasiglobal.reproduction.paper.figures.curves import NO_WEIGHT_DECAY, WEIGHT_DECAY
from quasiglobal.reproduction.paper.figures.scores import BETAS, QUASI_GLOBAL, RATES, local_momentum
from quasiglobal.reproduction.paper.published import ColumnLabel, RowLabel
from quasiglobal.reproduction.paper.tables import ALONE, CIFAR10, DSGDM_N, QG_DSGDM_N, TABLES, Settings, by_alpha
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
