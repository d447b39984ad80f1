"""The leaderboard as a document: tables of all tiers and the answers to the questions, made from the records."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from quasiglobal.algorithms import name_of
from quasiglobal.common.files import markdown_table, replacing
from quasiglobal.common.objects import readable
from quasiglobal.errors import InputError, unknown
from quasiglobal.reproduction.leaderboard.protocol import SEEDS, TIERS, VERSION, Condition, Tier
from quasiglobal.reproduction.leaderboard.standings import MEASURES, Placing, Standing
from quasiglobal.reproduction.report.document import Cell, Column, Document, Row, Section
from quasiglobal.reproduction.report.formats import escaped
from quasiglobal.reproduction.report.noise import Gap, Sample, gap

TOP = 5
"""Rows of the table in the README."""

Standings = Mapping[str, Sequence[Standing]]
"""The records of each tier by its name."""


def leaderboard_document(standings: Standings) -> Document:
    """All tables and answers."""
    tiers = [tier for tier in TIERS.values() if standings.get(tier.name)]
    tables: list[Section] = []
    for tier in tiers:                                      # all conditions side by side, then one by one
        of = standings[tier.name]
        tables.append(_overview(tier, of))
        for one in tier.conditions:
            there = [found for found in of if one.name in found.conditions]
            tables.append(_condition_section(tier, one, ranked(there, one.name)))
    counts = ", ".join(f"{len(standings[tier.name])} in tier {tier.name}" for tier in tiers)
    return Document(
        title="Leaderboard of decentralized methods",
        says=(
            f"Methods: {counts}. Every method has the same budget (protocol version {VERSION}): its learning rate is "
            "tuned on a validation split with seed 0, then seeds 1 to 3 train on the same partitions and are tested. "
            "The rates of tier relay are published ones.",
        ),
        sections=(*tables, *_question_sections(standings)),
        legend=LEGEND,
    )


LEGEND = (
    "Scores are test accuracies in per cent at the end of a run, mean ± standard deviation over three seeds. Mean of "
    "nodes: over the 16 models. Worst node: the lowest of them. Averaged model: the accuracy of the average of all "
    "models. Merge gives: the averaged model less the mean of nodes, in points, which is what merge@end changes.",
    "MB a node: what a node sends in a run, on average. Seconds a run: the time of 16 nodes on the device of the "
    "record, with the runs of the same method that train beside it. Those of digits are rough: other programs ran too.",
    "Refused: the library does not run the method under this condition. ⋆: a seed diverged. Not tuned: no rate learnt "
    "anything in its trials. A rate with an asterisk lies at an end of the largest grid.",
    "30 % loss: a message is lost with probability 0.3, each direction of a link on its own; its weight returns to the "
    "receiver. Sorted: examples are sorted by label and cut into 16 parts.",
)


def _overview(tier: Tier, standings: Sequence[Standing]) -> Section:
    """All methods of a tier, with the mean of nodes under each condition; best first under the first one."""
    columns = (
        Column("method"), Column("graph"),
        *(Column(one.name, numeric=True) for one in tier.conditions), Column("MB a node", numeric=True),
    )
    rows = tuple(
        Row(
            (
                Cell(one.name), Cell(one.graph), *(score_cell(one.conditions.get(c.name)) for c in tier.conditions),
                _number(next((placing for placing in one.conditions.values() if placing.score()), None), "bytes", 1e-6),
            ),
            algorithm=readable(name_of(one.algorithm)),
        )
        for one in ranked(standings, tier.conditions[0].name)
    )
    says = "Mean of nodes under all conditions. On the page, a click on a heading sorts."
    return Section(tier.name, tier.title, says, columns, rows)


def _condition_section(tier: Tier, condition: Condition, standings: Sequence[Standing]) -> Section:
    """The four numbers, the time and the rate of all methods under one condition, best first."""
    published = any(one.published for one in standings)
    columns = (
        Column("method"), Column("graph"), *(Column(title, numeric=True) for title in MEASURES.values()),
        Column("merge gives", numeric=True), *([Column("published worst node", numeric=True)] if published else []),
        Column("MB a node", numeric=True), Column("seconds a run", numeric=True), Column("rate", numeric=True),
        Column("note", share=0.3),
    )
    rows = []
    for one in standings:
        placing = one.conditions.get(condition.name)
        paper = one.published.get(condition.name)
        cells = (
            Cell(one.name), Cell(one.graph), *(score_cell(placing, measure) for measure in MEASURES), _merging(placing),
            *([Cell("" if paper is None else f"{paper:.1f}", paper)] if published else []),
            _number(placing, "bytes", 1e-6), _number(placing, "seconds", 1.0), _rate(placing), Cell(_note(placing)),
        )
        rows.append(Row(cells, readable(name_of(one.algorithm)), known=placing is not None and not placing.refused))
    return Section(
        f"{tier.name}-{re.sub(r'[^a-z0-9]+', '-', condition.name.replace('α = ', 'a'))}",
        f"{tier.name}, {condition.name}", "Four numbers and the time of each method, best first.", columns, tuple(rows),
    )


def ranked(standings: Sequence[Standing], condition: str) -> list[Standing]:
    """Methods by their mean of nodes, best first; those without a score last."""
    def worth(one: Standing) -> float:
        score = one.conditions[condition].score() if condition in one.conditions else None
        return score.mean if score else -1.0

    return sorted(standings, key=lambda one: (-worth(one), one.name))


def score_cell(placing: Placing | None, measure: str = "mean") -> Cell:
    """A score as mean ± std; refused, or a star if a seed diverged."""
    if placing is None:
        return Cell("not run", None, "none")
    if placing.refused:
        return Cell("refused" if measure == "mean" else "", None, "none")
    score = placing.score(measure)
    if score is None:
        return Cell(f"⋆ ({placing.diverged} of {len(placing.seeds)})", None, "bad")
    if not placing.learns:
        return Cell(f"{score} (not tuned)", score.mean, "bad")
    return Cell(str(score), score.mean)


def _merging(placing: Placing | None) -> Cell:
    """Gain of the final merge: the averaged model minus the mean of nodes, in points."""
    nodes, averaged = (placing.score(measure) if placing else None for measure in ("mean", "averaged"))
    return _signed(averaged.mean - nodes.mean) if nodes and averaged else Cell("")


def _signed(difference: float) -> Cell:
    return Cell(f"{round(difference, 2) + 0.0:+.2f}".replace("-", "−"), difference)         # + 0.0: −0 is 0


def _number(placing: Placing | None, measure: str, factor: float) -> Cell:
    score = placing.score(measure) if placing else None
    if score is None:
        return Cell("")
    value = factor * score.mean
    return Cell(f"{value:,.0f}" if value >= 1000 else f"{value:.3g}", value)


def _note(placing: Placing | None) -> str:
    if placing is None or placing.refused:
        return placing.refused if placing else ""
    own = [f"{len(placing.seeds)} of {len(SEEDS)} seeds"] if len(placing.seeds) < len(SEEDS) else []
    own += [] if placing.learns else ["no rate learnt anything in its trials"]
    return "; ".join((*own, *placing.notes))


def _rate(placing: Placing | None) -> Cell:
    if placing is None or placing.lr is None:
        return Cell("")
    return Cell(f"{placing.lr:g}{'' if placing.inside else '*'}", placing.lr)


# -------------------------------------------------------------------------------------------------- questions


def _question_sections(standings: Standings) -> list[Section]:
    numbers = (Column(title, numeric=True) for title in ("ours", "other", "difference", "noise"))
    columns = (Column("comparison"), *numbers, Column("verdict"))
    return [
        Section(
            f"question-{k}", question, "Differences on the same seeds, in points; noise: what chance explains at 95 %.",
            columns, tuple(Row(tuple(_answer_cells(one))) for one in found),
        )
        for k, (question, found) in enumerate(answers(standings).items(), start=1)
        if found
    ]


def _answer_cells(one: Answer) -> list[Cell]:
    noise = Cell("") if one.gap.noise is None else Cell(f"±{one.gap.noise:.2f}", one.gap.noise)
    ours = Cell("⋆", None, "bad") if one.ours is None else Cell(f"{one.ours:.2f}", one.ours)
    apart = Cell("") if one.ours is None else _signed(one.gap.value)
    return [Cell(one.says), ours, Cell(f"{one.other:.2f}", one.other), apart, noise, Cell(one.verdict)]


# ---------------------------------------------------------------------------------------------- other documents


def blocks(standings: Standings) -> dict[str, str]:
    """Markdown for other documents by name: `top TIER` and `all TIER` for each tier, and `answers`."""
    found = {}
    for name, of_tier in standings.items():
        if of_tier:
            found[f"top {name}"] = _top(TIERS[name], of_tier)
            found[f"all {name}"] = _whole(_overview(TIERS[name], of_tier))
    paragraphs = []
    for section in _question_sections(standings):
        paragraphs += [f"**{section.title}**", _whole(section)]
    return found | ({"answers": "\n\n".join(paragraphs)} if paragraphs else {})


def _whole(section: Section, left_out: Sequence[str] = ()) -> str:
    """The table of a section, without some columns."""
    shown = [k for k, column in enumerate(section.columns) if column.title not in left_out]
    rows = [[escaped(row.cells[k].text) for k in shown] for row in section.rows]
    return markdown_table([section.columns[k].title for k in shown], rows)


def _top(tier: Tier, standings: Sequence[Standing]) -> str:
    """The best methods under the first condition of a tier, without those that average exactly over all nodes."""
    first, taking_part = tier.conditions[0], [one for one in standings if not one.central]
    section = _condition_section(tier, first, ranked(taking_part, first.name))
    return _whole(replace(section, rows=section.rows[:TOP]), left_out=("merge gives", "rate", "note"))


def refresh(path: Path, made: Mapping[str, str]) -> set[str]:
    """Replace the blocks of a document, between `<!-- leaderboard: NAME -->` and `<!-- end -->`.

    Return the names of the blocks that stay as they are because they have no records.
    """
    text = document_with_blocks(path)

    def replaced(found: re.Match[str]) -> str:
        return f"{found[1]}\n{made[found[2]]}\n{found[3]}" if found[2] in made else found[0]

    with replacing(path) as temporary:
        temporary.write_text(BLOCK.sub(replaced, text), encoding="utf-8")
    return {name for _, name, _ in BLOCK.findall(text)} - set(made)


def document_with_blocks(path: Path) -> str:
    """The text of a document; raise InputError if it has no block to replace, or an unknown one."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {getattr(error, 'strerror', 'not a text')}") from None
    if not BLOCK.search(text):
        raise InputError(f"{path} has no block to update; write <!-- leaderboard: top digits --> and <!-- end -->")
    known = ["answers", *(f"{what} {tier}" for what in ("top", "all") for tier in TIERS)]
    for _, name, _ in BLOCK.findall(text):
        if name not in known:
            raise unknown(f"block of {path}", name, known)
    return text


BLOCK = re.compile(r"(<!-- leaderboard: ([^>]+?) -->).*?(<!-- end -->)", re.DOTALL)
"""A block of a document that is made from the records."""


SEVERE = {"digits": "sorted", "cifar": "α = 0.01", "relay": "α = 0.01"}
"""The condition of each tier in which the nodes' data differ most."""


@dataclass(frozen=True)
class Number:
    """A number of the leaderboard."""

    tier: str
    method: str
    condition: str
    measure: str = "mean"

    def placing(self, standings: Standings) -> Placing:
        """The results of this method under this condition; empty if there is no record of it."""
        found = (one.conditions.get(self.condition) for one in standings.get(self.tier, ()) if one.name == self.method)
        return next(found, None) or Placing()

    def sample(self, standings: Standings) -> Sample | None:
        """The number; None if there is no record of it, or if it has no score."""
        data = self.condition.removesuffix(", 30 % loss")                  # a seed draws one partition, lossy or not
        return self.placing(standings).sample(self.measure, f"{self.tier}, {data}")


@dataclass(frozen=True)
class Contrast:
    """A question about the difference of two numbers."""

    says: str
    ours: Number
    other: Number

    def answer(self, standings: Standings) -> Answer | None:
        """The difference and its noise, seed by seed; None if a number is missing."""
        ours, other = self.ours.sample(standings), self.other.sample(standings)
        if other is not None and ours is None and self.ours.placing(standings).diverged:
            return Answer(self.says, None, other.mean, Gap(math.nan, None))
        if ours is None or other is None:
            return None
        learns = all(one.placing(standings).learns for one in (self.ours, self.other))
        return Answer(self.says, ours.mean, other.mean, gap([(1.0, ours), (-1.0, other)]), learns)


@dataclass(frozen=True)
class Answer:
    """Two numbers in per cent, their difference, and the difference that chance explains; ours may have diverged."""

    says: str
    ours: float | None
    other: float
    gap: Gap
    learns: bool = True

    @property
    def verdict(self) -> str:
        """Whether the difference is beyond the noise."""
        if self.ours is None:
            return "diverges"
        if not self.learns:
            return "not tuned: no rate learnt anything"
        if self.gap.within is None:
            return "noise unknown"
        return "no difference beyond the noise" if self.gap.within else "higher" if self.gap.value > 0 else "lower"


def _averaged(tier: str, method: str, condition: str) -> Contrast:
    says = f"{tier}, {condition}: {method}, averaged model against nodes"
    return Contrast(says, Number(tier, method, condition, "averaged"), Number(tier, method, condition))


MERGED = ("dsgd", "dsgdm-n", "qg-dsgdm-n", "edm")
"""Methods with their own row for the final merge, in tier digits."""

ON_CIFAR = (*MERGED, "momentum-tracking", "decentlam", "gut", "lt-admm, momentum", "relaysgd, momentum")
"""Methods that may end a run on CIFAR-10 with different models at the nodes."""

BASE_OR_METHOD = (
    ("dsgd, base graph", "dsgd"), ("dsgdm-n, base graph", "dsgdm-n"), ("qg-dsgdm-n, base graph", "qg-dsgdm-n"),
    ("dsgd, base graph", "edm"), ("dsgdm-n, base graph", "edm"), ("qg-dsgdm-n, base graph", "edm"),
    ("dsgdm-n, base graph", "qg-dsgdm-n"), ("qg-dsgdm-n, base graph", "relaysgd, momentum"),
)
"""Methods on a Base-2 graph, each with the same or a better method on a ring or a chain."""


QUESTIONS: dict[str, tuple[Contrast, ...]] = {
    "Does EDM on a lazy ring hold where the data differ most?": tuple(
        Contrast(
            f"{tier}, {condition}: edm against {other}, {words}",
            Number(tier, "edm", condition, measure), Number(tier, other, condition, measure),
        )
        for tier, condition in SEVERE.items()
        for measure, words in (("mean", "mean of nodes"), ("worst", "worst node"))
        for other in ("qg-dsgdm-n", "relaysgd, momentum")
    ),
    "Do running sums and LT-ADMM keep their accuracy under 30 % one-sided loss?": tuple(
        Contrast(
            f"{method}, {data}: 30 % loss against none",
            Number("digits", method, f"{data}, 30 % loss"), Number("digits", method, data),
        )
        for method in (
            "push-diging, sums", "push-diging, sums, momentum", "lt-admm", "lt-admm, momentum", "qg-dsgdm-n",
            "push-diging", "edm", "dsgd-gt",
        )
        for data in ("sorted", "α = 0.1")
    ),
    "What does the final merge give?": (
        *(
            one for name in MERGED for one in (
                _averaged("digits", name, "sorted"),
                Contrast(
                    f"digits, sorted: {name}, tuned with the merge against without",
                    Number("digits", f"{name} + merge", "sorted"), Number("digits", name, "sorted"),
                ),
            )
        ),
        *(_averaged("cifar", name, condition) for condition in ("α = 0.1", "α = 0.01") for name in ON_CIFAR),
    ),
    "What does a Base-2 graph give, compared with a better method on a ring?": tuple(
        Contrast(
            f"{tier}, {condition}: {one} against {other}", Number(tier, one, condition), Number(tier, other, condition)
        )
        for tier, conditions in (("digits", ("sorted", "α = 0.1")), ("cifar", ("α = 0.1", "α = 0.01")))
        for condition in conditions
        for one, other in BASE_OR_METHOD
    ),
}
"""The questions, and the differences that answer them."""


def answers(standings: Standings) -> dict[str, list[Answer]]:
    """The answers that the records give to each question."""
    return {
        question: [found for one in comparisons if (found := one.answer(standings))]
        for question, comparisons in QUESTIONS.items()
    }
