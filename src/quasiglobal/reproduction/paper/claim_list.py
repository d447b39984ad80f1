"""The paper's claims, each as comparisons between cells of its tables."""

from __future__ import annotations

from dataclasses import replace

from quasiglobal.algorithms import algorithm
from quasiglobal.algorithms.sgd import DSGDm
from quasiglobal.reproduction.paper.cells import PaperCell, PaperTable, Scale, at_scale
from quasiglobal.reproduction.paper.claims import (
    Claim,
    Comparison,
    above,
    between,
    columns_above,
    gain_above,
    label,
    methods_of,
    models_above,
    not_clearly_above,
    settings_of,
)
from quasiglobal.reproduction.paper.published import ColumnLabel, RowLabel, published
from quasiglobal.reproduction.paper.tables import TABLES
from quasiglobal.runs.store import RunStore
from quasiglobal.training.experiment import Experiment, setting

QG, LOCAL, PLAIN, CENTRAL = "QG-DSGDm-N", "DSGDm-N", "DSGD", "SGDm-N (centralized)"
RING, SOCIAL = "ring 16", "social 32"
EVERY_OTHER = tuple(
    row.method for row in published()["momentum-variants"].rows if row.method not in ("QG-DSGDm", QG, CENTRAL)
)
SYNCHRONIZED = ("DSGDm-N, momentum over the ring", "DSGDm-N, gradients over the ring")

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "Quasi-global momentum gains over all other methods at every degree of heterogeneity.",
        "Section 5.2, CIFAR-10",
        tuple(above("cifar10", QG, PLAIN, LOCAL)),
    ),
    Claim(
        "It gains more, the more heterogeneous the data are.",
        "Section 5.2, CIFAR-10",
        tuple(
            comparison
            for graph in (RING, SOCIAL)
            for more, less in (("α = 0.1", "α = 1"), ("α = 1", "α = 10"))
            for comparison in gain_above("cifar10", QG, LOCAL, ColumnLabel(more, graph), ColumnLabel(less, graph))
        ),
    ),
    Claim(
        "The improvement in test accuracy is 1 to 20 points.",
        "Abstract",
        tuple(between(above("cifar10", QG, LOCAL), 1, 20)),
    ),
    Claim(
        "It gains over DSGDm-N on ImageNet-32 and ImageNet too.",
        "Section 5.2, ImageNet",
        tuple(above("imagenet", QG, LOCAL)),
    ),
    Claim(
        "ResNets with EvoNorm are above those with GN for all methods, degrees of heterogeneity and topologies.",
        "Section 5.2, CIFAR-10 and ImageNet",
        (
            *models_above("cifar10", "ResNet-EvoNorm-20", "ResNet-GN-20"),
            *models_above("imagenet", "ImageNet-32, ResNet-20-x2 EvoNorm", "ImageNet-32, ResNet-20-x2 GN"),
            *models_above("imagenet", "ImageNet, ResNet-18 EvoNorm", "ImageNet, ResNet-18 GN"),
        ),
    ),
    Claim(
        "Batch normalization loses severely on heterogeneous data: at α = 0.1 it is below GN and EvoNorm.",
        "Sections 1 and 5.1, CIFAR-10",
        tuple(
            comparison
            for other in ("ResNet-GN-20", "ResNet-EvoNorm-20")
            for comparison in models_above("cifar10", other, "ResNet-BN-20", setting="α = 0.1")
        ),
    ),
    Claim(
        "Local momentum accelerates: DSGDm and DSGDm-N are above DSGD.",
        "Section 5.2, ablation (2)",
        (
            *above("momentum-variants", "DSGDm", PLAIN),
            *above("momentum-variants", LOCAL, PLAIN),
            *above("cifar10", LOCAL, PLAIN),
        ),
    ),
    Claim(
        "Heterogeneous data hinders local momentum: DSGDm-N gains less over DSGD at α = 0.1 than at α = 10.",
        "Section 1, first contribution; how to measure it is our reading",
        tuple(
            comparison
            for graph in (RING, SOCIAL)
            for comparison in gain_above(
                "cifar10", LOCAL, PLAIN, ColumnLabel("α = 10", graph), ColumnLabel("α = 0.1", graph)
            )
        ),
    ),
    Claim(
        "A momentum buffer synchronized with all improves DSGDm-N.",
        "Section 1, momentum-variants",
        tuple(above("momentum-variants", "DSGDm-N, momentum over all", LOCAL)),
    ),
    Claim(
        "Synchronizing momentum or gradients over the ring improves DSGDm-N only marginally: not beyond the noise.",
        "Section 5.2, ablation (3)",
        tuple(
            comparison
            for method in SYNCHRONIZED
            for comparison in not_clearly_above(above("momentum-variants", method, LOCAL))
        ),
    ),
    Claim(
        "Methods with quasi-global momentum surpass all others but the centralized one, without more communication.",
        "Section 5.2, ablation (1)",
        tuple(
            comparison
            for method in ("QG-DSGDm", QG)
            for comparison in above("momentum-variants", method, *EVERY_OTHER)
        ),
    ),
    Claim(
        "DMSGD improves on DSGDm-N, and less than quasi-global momentum does.",
        "Section 5.2, ablation (4)",
        (*above("momentum-variants", "DMSGD", LOCAL), *above("momentum-variants", QG, "DMSGD")),
    ),
    Claim(
        "Quasi-global momentum is above D² and gradient tracking.",
        "Section 5.2, gradient-tracking",
        tuple(above("gradient-tracking", QG, "DSGD (GT)", "DSGDm-N (GT)", "D²", "D²₊")),
    ),
    Claim(
        "Dividing by the learning rate of each step improves D² (D²₊).",
        "Section 5.2, gradient-tracking",
        tuple(above("gradient-tracking", "D²₊", "D²")),
    ),
    Claim(
        "QG-DAdam is preferable to DAdam.",
        "Section 5.2, adam",
        tuple(above("adam", "QG-DAdam", "DAdam")),
    ),
    Claim(
        "Quasi-global momentum gains on a time-varying directed topology too.",
        "Section 5.2, imagenet-topologies",
        tuple(above("imagenet-topologies", QG, LOCAL, group="one-peer exponential 16")),
    ),
    Claim(
        "It gains on rings of any size.",
        "Section 5.2, ring-scales",
        tuple(above("ring-scales", QG, LOCAL)),
    ),
    Claim(
        "Updating the buffer every τ > 1 steps brings no significant gain.",
        "Appendix, multi-step",
        tuple(
            comparison
            for tau in (2, 3, 4)
            for comparison in not_clearly_above(above("multi-step", f"{QG}, τ = {tau}", f"{QG}, τ = 1"))
        ),
    ),
    Claim(
        "On a single worker, too, quasi-global momentum is above ordinary momentum.",
        "Appendix, single-worker",
        (*above("single-worker", "QG-SGDm-N", "SGDm-N"), *above("single-worker", "QG-SGDm", "SGDm")),
    ),
    Claim(
        "Its gain on a single worker is larger where optimization is challenging: with GN than with BN.",
        "Appendix, single-worker",
        (
            *gain_above("single-worker", "QG-SGDm-N", "SGDm-N", ColumnLabel("GN"), ColumnLabel("BN")),
            *gain_above("single-worker", "QG-SGDm", "SGDm", ColumnLabel("GN"), ColumnLabel("BN")),
        ),
    ),
    Claim(
        "Nesterov momentum is in general above heavy-ball momentum on a single worker.",
        "Appendix, single-worker",
        (*above("single-worker", "SGDm-N", "SGDm"), *above("single-worker", "QG-SGDm-N", "QG-SGDm")),
    ),
    Claim(
        "Training without weight decay is detrimental.",
        "Appendix, weight-decay",
        tuple(
            comparison
            for norm in ("BN", "GN")
            for comparison in columns_above(
                "weight-decay", ColumnLabel("weight decay", norm), ColumnLabel("none", norm)
            )
        ),
    ),
    Claim(
        "A gap to centralized training remains.",
        "Conclusion, CIFAR-10",
        tuple(
            Comparison(
                label(f"{CENTRAL} − {QG}", model, column),
                (
                    (1.0, ("cifar10", RowLabel(CENTRAL, model), ColumnLabel("iid", column.group))),
                    (-1.0, ("cifar10", RowLabel(QG, model), column)),
                ),
            )
            for model, column in settings_of("cifar10")
            if QG in methods_of("cifar10", model, column)
        ),
    ),
)
"""The claims, roughly in the paper's order."""


# ------------------------------------------------------------------------------------------------ tuning the momentum

TUNING = "momentum-tuning"
"""Name for the cells of the paper's heat map, which is not one of its tables: DSGDm-N with other β."""


def momentum_tuning(store: RunStore, scale: Scale = "paper") -> PaperTable:
    """Cells of DSGDm-N with every other β in the store, on the ring of momentum-variants."""
    local = [cell for cell in TABLES["momentum-variants"].cells if cell.row == RowLabel(LOCAL)]
    settings = {setting(at_scale(cell.experiment, scale)) for cell in local}
    tried = {
        run.experiment.algorithm: beta
        for run in store.runs
        if (beta := _other_beta(run.experiment)) and setting(replace(run.experiment, algorithm="dsgdm-n")) in settings
    }
    cells = tuple(
        PaperCell(
            RowLabel(f"{LOCAL}, β = {beta:g}"), cell.column, replace(cell.experiment, algorithm=name), None
        )
        for name, beta in sorted(tried.items())
        for cell in local
    )
    return PaperTable(TUNING, "DSGDm-N with other momentum factors", cells)


def _other_beta(experiment: Experiment) -> float | None:
    """β of an experiment whose algorithm differs from the paper's dsgdm-n in β alone; otherwise None."""
    chosen, papers = algorithm(experiment.algorithm), algorithm("dsgdm-n")
    if not isinstance(chosen, DSGDm) or not isinstance(papers, DSGDm) or chosen.beta == papers.beta:
        return None
    return chosen.beta if replace(chosen, beta=papers.beta) == papers else None


def tuning_claim(table: PaperTable) -> Claim:
    """Claim that quasi-global momentum with β = 0.9 is above DSGDm-N with any other β."""
    comparisons = tuple(
        Comparison(
            label(f"{QG} − {cell.row}", cell.column),
            ((1.0, ("momentum-variants", RowLabel(QG), cell.column)), (-1.0, (TUNING, cell.row, cell.column))),
        )
        for cell in table.cells
    )
    return Claim("Tuning the momentum factor of DSGDm-N does not bring it up to quasi-global momentum.",
                 "Appendix, figure of learning rate and β", comparisons)
