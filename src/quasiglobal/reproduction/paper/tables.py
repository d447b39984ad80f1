"""The paper's tables: published numbers, and the experiment that reproduces each. To add a table, add a spec."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from quasiglobal.errors import unknown
from quasiglobal.models.language import PREFIX
from quasiglobal.runs.comparison import Score
from quasiglobal.training.experiment import RECIPES, Experiment
from quasiglobal.training.schedule import scaled_lr


@dataclass(frozen=True)
class RowLabel:
    """A row of a table: a method, and the model if the table has several.

    >>> RowLabel.parse("ResNet-GN-20: DSGD"), str(RowLabel("DSGD", "ResNet-GN-20"))
    (RowLabel(method='DSGD', model='ResNet-GN-20'), 'ResNet-GN-20: DSGD')
    """

    method: str
    model: str = ""

    @classmethod
    def parse(cls, text: str) -> RowLabel:
        """Parse a row label of published.toml or a table spec."""
        model, _, method = text.rpartition(": ")
        return cls(method, model)

    def __str__(self) -> str:
        return f"{self.model}: {self.method}" if self.model else self.method


@dataclass(frozen=True)
class ColumnLabel:
    """A column of a table: a setting, and the graph or data set if the table has several.

    >>> ColumnLabel.parse("ring 16, α = 0.1"), ColumnLabel.parse("iid").group
    (ColumnLabel(setting='α = 0.1', group='ring 16'), '')
    """

    setting: str
    group: str = ""

    @classmethod
    def parse(cls, text: str) -> ColumnLabel:
        """Parse a column label of published.toml or a table spec."""
        group, _, setting = text.rpartition(", ")
        return cls(setting, group)

    def __str__(self) -> str:
        return f"{self.group}, {self.setting}" if self.group else self.setting


CellLabel = tuple[RowLabel, ColumnLabel]


@dataclass(frozen=True)
class PublishedTable:
    """A table of the paper: one row per method, one column per setting."""

    name: str
    title: str
    rows: tuple[RowLabel, ...]
    columns: tuple[ColumnLabel, ...]
    scores: Mapping[CellLabel, Score | None]
    """Scores of the cells that the paper has; None: did not converge."""
    notes: tuple[str, ...] = ()
    """Remarks on the numbers."""


@cache
def published() -> dict[str, PublishedTable]:
    """All tables of the paper by name.

    >>> row, column = RowLabel("QG-DSGDm-N", "ResNet-GN-20"), ColumnLabel("α = 0.1", "ring 16")
    >>> print(published()["cifar10"].scores[row, column])
    82.78 ± 2.05
    """
    text = resources.files("quasiglobal.reproduction.paper").joinpath("published.toml").read_text(encoding="utf-8")
    found = {}
    for name, table in tomllib.loads(text).items():
        rows = {RowLabel.parse(text): cells for text, cells in table["rows"].items()}
        columns = tuple(map(ColumnLabel.parse, table["columns"]))
        scores = {
            (row, column): Score.parse(cell)
            for row, cells in rows.items()
            for column, cell in zip(columns, cells, strict=True)
            if cell
        }
        notes = tuple(table.get("notes", ()))
        found[name] = PublishedTable(name, table["title"], tuple(rows), columns, scores, notes)
    return found


# ------------------------------------------------------------------------------------------------ cells

Scale = Literal["smoke", "short", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class PaperCell:
    """A published number and the experiment that reproduces it."""

    row: RowLabel
    column: ColumnLabel
    experiment: Experiment
    """The experiment at the paper's scale with seed 0; `lr` is None if it is tuned."""
    score: Score | None
    """The paper's number; None if the run did not converge or the paper reports none."""
    text: bool = False
    """Whether the cell follows the paper's text where the released code, which made the number, differs."""
    rates: tuple[float, ...] = ()
    """Initial grid of learning rates; default: around the learning rate scaled with the global batch size."""
    algorithms: tuple[str, ...] = ()
    """Variants of the algorithm that are tuned together with the learning rate; the best counts."""

    def experiments(self, scale: Scale = "paper") -> tuple[Experiment, ...]:
        """The experiments to tune, one per variant of the algorithm."""
        first = at_scale(self.experiment, scale)
        return (first, *(replace(first, algorithm=other) for other in self.algorithms))

    @property
    def label(self) -> CellLabel:
        """Row and column label."""
        return self.row, self.column

    @property
    def name(self) -> str:
        """Row and column as text, as matched by `--cells`."""
        return f"{self.row} | {self.column}"


@dataclass(frozen=True)
class PaperTable:
    """A table of the paper, cell by cell."""

    name: str
    title: str
    cells: tuple[PaperCell, ...]
    notes: tuple[str, ...] = ()

    def title_at(self, scale: Scale) -> str:
        """The title, with the changes to the paper's experiments at this scale.

        >>> PaperTable("single-worker", "A single worker", ()).title_at("short")
        'A single worker (SHORT: a tenth of the epochs)'
        """
        return f"{self.title} ({scale.upper()}: {DIFFERENCE[scale]})" if scale in DIFFERENCE else self.title


DIFFERENCE = {
    "short": "a tenth of the epochs",
    "smoke": "digits in place of the data, a small network in place of the model, a quarter of the nodes, two epochs",
}
"""Changes to the paper's experiments at each scale, as text."""


@cache
def at_scale(experiment: Experiment, scale: Scale) -> Experiment:
    """Scale an experiment down: smoke is a quick check on a CPU, short has a tenth of the paper's epochs.

    >>> at_scale(Experiment(epochs=300, topology="ring:16"), "smoke").topology
    'ring:4'
    """
    if scale == "paper":
        return experiment
    if scale == "short":
        return replace(
            experiment, epochs=max(1, experiment.epochs // 10), warmup=experiment.warmup / 10,
            eval_every=max(1, experiment.eval_every // 2),
        )
    if scale != "smoke":
        raise unknown("scale", scale, SCALES)
    model, norm = ("mlp", None) if experiment.reads_texts else ("cnn", experiment.norm or "none")
    kind, _, nodes = experiment.topology.partition(":")
    topology = f"{kind}:{max(1, int(nodes) // 4)}" if nodes else "torus:9"          # in place of the social network
    return replace(
        experiment, data="digits", model=model, norm=norm, width=0.5, precision="fp32",
        epochs=2, eval_every=2, warmup=0.0, batch=32, topology=topology,
    )


NUMBERS = {
    "motivation": "Figure 1", "cifar10": "Table 1", "gradient-tracking": "Table 2", "imagenet": "Table 3",
    "imagenet-topologies": "Table 4", "momentum-variants": "Table 5", "adam": "Table 6", "single-worker": "Figure 12",
    "weight-decay": "Figure 13", "ring-scales": "Table 7", "multi-step": "Table 8",
    "figure-motivation": "Figure 1", "figure-2d": "Figures 2 and 11", "figure-consensus": "Figures 3 and 10",
    "figure-rosenbrock": "Figures 4 and 15", "figure-effective-step": "Figures 5 and 14",
    "figure-ring-scales": "Figure 6", "figure-topology": "Figure 7", "figure-partition": "Figures 8 and 9",
    "figure-single-worker": "Figure 12", "figure-weight-decay": "Figure 13", "figure-nonconvex": "Figure 16",
    "figure-curves": "Figure 17", "figure-momentum-tuning": "Figure 18",
}
"""The paper's numbers of the tables and figures, including those of the appendix."""


# ------------------------------------------------------------------------------------------------ the experiments

Settings = Mapping[str, Any]


@dataclass(frozen=True)
class TableSpec:
    """Settings of a published table's cells: fields of `Experiment`; columns override the base, rows override columns.

    `rates` and `algorithms` are fields of `PaperCell` instead. Rows and columns are named as in published.toml.
    """

    base: Settings
    columns: Mapping[str, Settings]
    rows: Mapping[str, Settings]
    text: Mapping[str, tuple[str, Settings]] = field(default_factory=dict)
    """Rows that follow the paper's text: the published row that each belongs to, and the settings that differ."""

    def table(self, name: str) -> PaperTable:
        """The table with the paper's numbers."""
        paper = published()[name]
        forms = {row: (row, settings) for row, settings in self.rows.items()}
        forms |= {row: (of, {**self.rows[of], **settings}) for row, (of, settings) in self.text.items()}
        cells = []
        for row, (of, settings) in forms.items():
            for text, place in self.columns.items():
                column = ColumnLabel.parse(text)
                if (RowLabel.parse(of), column) in paper.scores:
                    score = paper.scores[RowLabel.parse(of), column]
                    fields = {**self.base, **place, **settings}
                    tuning = {name: fields.pop(name) for name in ("rates", "algorithms") if name in fields}
                    cells.append(PaperCell(
                        RowLabel.parse(row), column, Experiment(**fields), score, text=row in self.text, **tuning
                    ))
        return PaperTable(name, paper.title, tuple(cells), paper.notes)


MEASURED: Settings = {"precision": "bf16", "eval_every": 10, "seed": 0}
CIFAR10: Settings = {**RECIPES["cifar10"], **MEASURED, "norm": "evonorm-released"}
IMAGENET: Settings = {**RECIPES["imagenet"], **MEASURED, "norm": "evonorm-released"}
IMAGENET32: Settings = {"data": "imagenet32", "model": "resnet20", "width": 2.0}
FIXED_LR: Settings = {"lr": scaled_lr(64, 16)}
"""The paper does not tune on full ImageNet; its single learning rate is scaled with the global batch size."""
AG_NEWS: Settings = {
    "data": "agnews", "model": f"{PREFIX}distilbert-base-uncased", "norm": None,
    "epochs": 10, "milestones": (), "warmup": 0.0, "eval_every": 1, "rates": (5e-6, 1e-5, 2e-5),
}
ALONE: Settings = {"topology": "complete:1", "partition": "iid"}


def iid(n: int) -> Settings:
    """Column of the centralized reference: iid data; the mean is exact, so only the topology's n matters."""
    return {"topology": f"complete:{n}", "partition": "iid"}


def by_alpha(topology: str, *alphas: float, prefix: str = "") -> dict[str, Settings]:
    """Columns of a topology, one per α."""
    return {f"{prefix}α = {alpha:g}": {"topology": topology, "alpha": float(alpha)} for alpha in alphas}


SGDM_N: Settings = {"algorithm": "sgdm-n"}
DSGD: Settings = {"algorithm": "dsgd"}
DSGDM_N: Settings = {"algorithm": "dsgdm-n"}
QG_DSGDM_N: Settings = {"algorithm": "qg-dsgdm-n"}
METHODS: dict[str, Settings] = {
    "SGDm-N (centralized)": SGDM_N, "DSGD": DSGD, "DSGDm-N": DSGDM_N, "QG-DSGDm-N": QG_DSGDM_N,
}


def with_methods(prefix: str, settings: Settings, *, without: tuple[str, ...] = ()) -> dict[str, Settings]:
    """Rows of a model, one per method."""
    chosen = {method: algorithm for method, algorithm in METHODS.items() if method not in without}
    return {f"{prefix}: {method}": {**settings, **algorithm} for method, algorithm in chosen.items()}


RING_16 = by_alpha("ring:16", 10, 1, 0.1, prefix="ring 16, ")
SOCIAL_32 = by_alpha("social", 10, 1, 0.1, prefix="social 32, ")
SMALL_ALPHAS: dict[str, Settings] = {"iid": iid(16), **by_alpha("ring:16", 1, 0.1)}
EVONORM_TEXT: Settings = {"norm": "evonorm"}

SPECS: dict[str, TableSpec] = {
    "motivation": TableSpec(
        base=CIFAR10,
        columns={**RING_16, **SOCIAL_32},
        rows={"DSGD": DSGD, "DSGDm-N": DSGDM_N, "QG-DSGDm-N": QG_DSGDM_N},
    ),
    "cifar10": TableSpec(
        base=CIFAR10,
        columns={"ring 16, iid": iid(16), **RING_16, "social 32, iid": iid(32), **SOCIAL_32},
        rows={
            **with_methods("ResNet-BN-20", {"norm": "bn"}),
            **with_methods("ResNet-GN-20", {"norm": "gn"}),
            **with_methods("ResNet-EvoNorm-20", {}),
            **with_methods("VGG-11", {"model": "vgg11", "norm": None, "width": 0.5}, without=("DSGD",)),
        },
        text={
            f"ResNet-EvoNorm-20 as in the text: {method}": (f"ResNet-EvoNorm-20: {method}", EVONORM_TEXT)
            for method in METHODS
        },
    ),
    "gradient-tracking": TableSpec(
        base=CIFAR10,
        columns={
            **by_alpha("ring:16", 1, 0.1, prefix="ring 16, "), **by_alpha("ring:32", 1, 0.1, prefix="ring 32, "),
        },
        rows={
            "DSGD (GT)": {"algorithm": "dsgd-gt"},
            "DSGDm-N": DSGDM_N,
            "DSGDm-N (GT)": {"algorithm": "dsgdm-n-gt"},
            "D²": {"algorithm": "d2"},
            "D²₊": {"algorithm": "d2+"},
            "QG-DSGDm-N": QG_DSGDM_N,
        },
    ),
    "imagenet": TableSpec(
        base=IMAGENET,
        columns=SMALL_ALPHAS,
        rows={
            **with_methods("ImageNet-32, ResNet-20-x2 EvoNorm", IMAGENET32, without=("DSGD",)),
            **with_methods("ImageNet-32, ResNet-20-x2 GN", {**IMAGENET32, "norm": "gn"}, without=("DSGD",)),
            **with_methods("ImageNet, ResNet-18 EvoNorm", FIXED_LR, without=("DSGD",)),
            **with_methods("ImageNet, ResNet-18 GN", {**FIXED_LR, "norm": "gn"}, without=("DSGD",)),
        },
    ),
    "imagenet-topologies": TableSpec(
        base={**IMAGENET, **FIXED_LR},
        columns={
            **by_alpha("ring:16", 1, 0.1, prefix="ring 16, "),
            **by_alpha("one-peer-exponential:16", 1, 0.1, prefix="one-peer exponential 16, "),
        },
        rows={"DSGDm-N": DSGDM_N, "QG-DSGDm-N": QG_DSGDM_N},
    ),
    "momentum-variants": TableSpec(
        base=CIFAR10,
        columns=SMALL_ALPHAS,
        rows={
            "SGDm-N (centralized)": SGDM_N,
            "DSGDm-N, complete graph": {**DSGDM_N, "topology": "complete:16"},
            "DSGDm-N, momentum over all": {"algorithm": "dsgdm-n:sync=momentum,over=all"},
            "SlowMo, models over all": {"algorithm": "slowmo:released=true"},
            "DSGD": DSGD,
            "DSGDm": {"algorithm": "dsgdm"},
            "DSGDm-N": DSGDM_N,
            "DSGDm, momentum over the ring": {"algorithm": "dsgdm:sync=momentum"},
            "DSGDm-N, momentum over the ring": {"algorithm": "dsgdm-n:sync=momentum"},
            "DSGDm-N, gradients over the ring": {"algorithm": "dsgdm-n:sync=gradient"},
            "DMSGD": {"algorithm": "dmsgd", "algorithms": ("dmsgd:mu=0.25", "dmsgd:mu=0.75")},
            "QG-DSGDm": {"algorithm": "qg-dsgdm"},
            "QG-DSGDm-N": QG_DSGDM_N,
        },
        text={"SlowMo as in the text, models over all": ("SlowMo, models over all", {"algorithm": "slowmo"})},
    ),
    "adam": TableSpec(
        base={**CIFAR10, "topology": "ring:16", "alpha": 0.1, "rates": (5e-4, 1e-3, 2e-3)},
        columns={"AG News, α = 0.1": AG_NEWS, "CIFAR-10, α = 0.1": {}},
        rows={"DAdam": {"algorithm": "dadam"}, "QG-DAdam": {"algorithm": "qg-dadam:released=true"}},
        text={"QG-DAdam as in the text": ("QG-DAdam", {"algorithm": "qg-dadam"})},
    ),
    "single-worker": TableSpec(
        base={**CIFAR10, **ALONE},
        columns={"BN": {"norm": "bn"}, "GN": {"norm": "gn"}},
        rows={
            "SGDm-N": SGDM_N,
            "QG-SGDm-N": {"algorithm": "qg-sgdm-n"},
            "SGDm": {"algorithm": "sgdm"},
            "QG-SGDm": {"algorithm": "qg-sgdm"},
        },
    ),
    "weight-decay": TableSpec(
        base={**CIFAR10, **ALONE},
        columns={
            "BN, weight decay": {"norm": "bn"},
            "GN, weight decay": {"norm": "gn"},
            "BN, none": {"norm": "bn", "weight_decay": 0.0},
            "GN, none": {"norm": "gn", "weight_decay": 0.0},
        },
        rows={"SGDm-N": SGDM_N, "QG-SGDm-N": {"algorithm": "qg-sgdm-n"}},
    ),
    "ring-scales": TableSpec(
        base=CIFAR10,
        columns={
            "ring 16, iid": iid(16), **by_alpha("ring:16", 1, 0.1, prefix="ring 16, "),
            "ring 32, iid": iid(32), **by_alpha("ring:32", 1, 0.1, prefix="ring 32, "),
            "ring 48, iid": iid(48), **by_alpha("ring:48", 1, 0.1, prefix="ring 48, "),
        },
        rows={name: METHODS[name] for name in ("SGDm-N (centralized)", "DSGDm-N", "QG-DSGDm-N")},
    ),
    "multi-step": TableSpec(
        base=CIFAR10,
        columns=SMALL_ALPHAS,
        rows={
            "SGDm-N (centralized)": SGDM_N,
            "DSGD": DSGD,
            "DSGDm-N": DSGDM_N,
            "QG-DSGDm-N, τ = 1": QG_DSGDM_N,
            **{f"QG-DSGDm-N, τ = {tau}": {"algorithm": f"qg-dsgdm-n:tau={tau},released=true"} for tau in (2, 3, 4)},
        },
        text={
            f"QG-DSGDm-N as in the text, τ = {tau}": (
                f"QG-DSGDm-N, τ = {tau}", {"algorithm": f"qg-dsgdm-n:tau={tau}"},
            )
            for tau in (2, 3, 4)
        },
    ),
}

TABLES: dict[str, PaperTable] = {name: spec.table(name) for name, spec in SPECS.items()}
"""The tables of the paper by name."""
