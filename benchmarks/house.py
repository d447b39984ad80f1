"""Measure the source tree: sizes, small files, modules with one user, edges between packages, `Any`, functions.

    python benchmarks/house.py                          # this tree
    python benchmarks/house.py ../old/src/quasiglobal   # another one, before this one

A module's users are the modules that import it, for types too. An edge is an import of a module of another package.
"""

from __future__ import annotations

import argparse
import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

OURS = Path(__file__).parents[1] / "src" / "quasiglobal"

SMALL = 80
"""Lines below which a file counts as small."""


class Tree:
    """The modules of a package, and which of them import which."""

    def __init__(self, root: Path) -> None:
        self.root = root
        paths = sorted(root.rglob("*.py"))
        self.texts = {self.module(path): path.read_text() for path in paths}
        self.parsed = {name: ast.parse(text) for name, text in self.texts.items()}
        self.edges = {name: set(self.imports(name)) - {name} for name in self.texts}

    def module(self, path: Path) -> str:
        """The dotted name of a file."""
        parts = path.relative_to(self.root.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def imports(self, name: str) -> Iterator[str]:
        """The modules of the tree that a module imports."""
        for node in ast.walk(self.parsed[name]):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name in self.texts)
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    whole = f"{node.module}.{alias.name}"
                    if whole in self.texts or node.module in self.texts:
                        yield whole if whole in self.texts else str(node.module)

    def package(self, name: str) -> str:
        """The part of the tree that a module belongs to."""
        return name.split(".")[1] if "." in name else "(top)"

    def functions(self) -> list[tuple[int, str]]:
        """Lines and name of every function."""
        return [
            ((node.end_lineno or node.lineno) - node.lineno + 1, f"{name}.{node.name}")
            for name, tree in self.parsed.items() for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        ]

    def figures(self) -> dict[str, str]:
        """The figures of the tree as text."""
        lines = {name: len(text.splitlines()) for name, text in self.texts.items()}
        users = Counter(target for targets in self.edges.values() for target in targets)
        plain = [name for name in self.texts if not any(other.startswith(f"{name}.") for other in self.texts)]
        crossing = sum(
            self.package(name) != self.package(target) for name, targets in self.edges.items() for target in targets
        )
        functions = sorted(self.functions())
        return {
            "lines": f"{sum(lines.values()):,}",
            "files": str(len(lines)),
            "median and largest file": f"{median(lines.values()):g}, {max(lines.values())}",
            f"files below {SMALL} lines": str(sum(count < SMALL for count in lines.values())),
            "modules with one user": str(sum(users[name] == 1 for name in plain)),
            "edges across packages": str(crossing),
            "`Any`": str(sum(len(re.findall(r"\bAny\b", text)) for text in self.texts.values())),
            "median and largest function": f"{median(size for size, _ in functions):g}, {functions[-1][0]}",
            "largest function": functions[-1][1].removeprefix("quasiglobal."),
        }

    def sizes(self) -> dict[str, str]:
        """Lines and files of each package."""
        lines: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for name, text in self.texts.items():
            lines[self.package(name)] += len(text.splitlines())
            files[self.package(name)] += 1
        top = {name for name in lines if f"quasiglobal.{name}" in self.texts and files[name] == 1}
        return {name: f"{lines[name]:,} in {files[name]}" for name in sorted(lines) if name not in top}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="another tree, src/quasiglobal of a checkout")
    parser.add_argument("--tiny", action="store_true", help="the same: it takes seconds")
    given = parser.parse_args()
    trees = [Tree(root) for root in (given.before, OURS) if root]
    for title, of in (("figure", Tree.figures), ("lines in files", Tree.sizes)):
        columns = [of(tree) for tree in trees]
        print(f"| {title} |{' before | after' if given.before else ' tree'} |")
        print("|---" * (1 + len(trees)) + "|")
        for name in dict.fromkeys(name for column in columns for name in column):
            print(f"| {name} | {' | '.join(column.get(name, '') for column in columns)} |")
        print()


if __name__ == "__main__":
    main()
