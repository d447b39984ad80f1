"""The paper's claims as a section of the report, each with a verdict by the paper's numbers and by ours."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from quasiglobal.reproduction.paper.cells import DIFFERENCE, Scale
from quasiglobal.reproduction.paper.claims import Claim, Judged, our_scores, paper_scores, signed, verdict
from quasiglobal.reproduction.paper.comparison import Verdict
from quasiglobal.reproduction.paper.outcomes import Outcome
from quasiglobal.reproduction.report.document import Cell, Column, Mark, Row, Section

VERDICTS: Mapping[Verdict, tuple[str, Mark]] = {
    "holds": ("holds", "good"),
    "within noise": ("undecided", "fair"),
    "does not hold": ("does not hold", "bad"),
}
OTHER_SCALE = Cell("other scale", mark="none")
"""Shown in place of a verdict at any scale but the paper's."""

CLAIM_COLUMNS = (
    Column("claim", share=0.31), Column("where", share=0.13), Column("in the paper's numbers", share=0.2),
    Column("in our runs", share=0.2), Column("run", numeric=True),
)


def claims_section(claims: Sequence[Claim], found: Mapping[str, Sequence[Outcome]], scale: Scale) -> Section:
    """The section of claims, with a verdict on each claim that has scores in the outcomes of the tables."""
    papers, ours = paper_scores(), our_scores(found)
    rows, counts = [], Counter[str]()
    for k, claim in enumerate(claims):
        judged, all_of_them = claim.judge(ours), len(claim.comparisons)
        result = _verdict(judged, all_of_them, "not run") if scale not in DIFFERENCE or not judged else OTHER_SCALE
        counts[result.text] += 1
        rows.append(Row((
            Cell(claim.says),
            Cell(claim.where),
            _verdict(claim.judge(papers), all_of_them, "no numbers"),
            result,
            Cell(f"{len(judged)} of {all_of_them}", len(judged) / max(all_of_them, 1)),
        ), known=bool(judged), anchor=f"claim-{k}"))
    says = ", ".join(f"{text}: {counts[text]}" for text in sorted(counts))
    return Section("claims", "What the paper claims", says, CLAIM_COLUMNS, tuple(rows))


def _verdict(judged: Sequence[Judged], all_of_them: int, otherwise: str) -> Cell:
    result = verdict(judged)
    if result is None:
        return Cell(otherwise, mark="none")
    text, mark = VERDICTS[result]
    if result == "holds" and len(judged) < all_of_them:
        text, mark = "holds so far", "fair"
    if len(judged) == 1:
        return Cell(text, mark=mark, why=(str(judged[0]),))
    values = [one.gap.value for one in judged if math.isfinite(one.gap.value)]
    span = f", {signed(min(values))} to {signed(max(values))}" if values else ""
    wrong = [one for kind in ("does not hold", "within noise") for one in judged if one.verdict == kind]
    right = [one for one in judged if one.verdict == "holds"]
    exceptions = f", not so in {len(wrong)}" if wrong else ""
    clear = sum(one.gap.within is False for one in right)
    beyond = f", {clear or 'none'} beyond the noise" if text == "holds so far" else ""
    return Cell(text, mark=mark, why=(f"{len(judged)} comparisons{span}{exceptions}{beyond}", *map(str, wrong + right)))
