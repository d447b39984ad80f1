"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Sequence


def table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table.

    >>> print(table(["algorithm", "%"], [["dsgd", "74.5"]]))
    | algorithm | % |
    | --- | --- |
    | dsgd | 74.5 |
    """
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
