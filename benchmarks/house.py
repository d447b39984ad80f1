"""Measure the source tree: sizes, small files, modules with one user, edges between packages, `Any`, functions.

    python benchmarks/house.py                          # this tree
    python benchmarks/house.py ../old/src/quasiglobal   # another one, before this one
    python benchmarks/house.py --picture docs/figures/house.svg     # the floor plan, from the contract of the layers

A module's users are the modules that import it, for types too. An edge is an import of a module of another package.
"""

from __future__ import annotations

import argparse
import ast
import html
import re
import textwrap
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
OURS = ROOT / "src" / "quasiglobal"

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
            **self.walks(),
        }

    def walks(self) -> dict[str, str]:
        """The number of files that each walk of the checkout's docs/architecture.md names."""
        text = (self.root.parents[1] / "docs" / "architecture.md").read_text()
        found = {}
        for section in re.split("^## ", text, flags=re.MULTILINE):
            title, _, body = section.partition("\n")
            if title.startswith("Walk"):
                found[f"files of {title[0].lower()}{title[1:]}"] = str(len(set(re.findall(r"`([\w/]+\.py)`", body))))
        return found

    def sizes(self) -> dict[str, str]:
        """Lines and files of each package."""
        lines: Counter[str] = Counter()
        files: Counter[str] = Counter()
        for name, text in self.texts.items():
            lines[self.package(name)] += len(text.splitlines())
            files[self.package(name)] += 1
        top = {name for name in lines if f"quasiglobal.{name}" in self.texts and files[name] == 1}
        return {name: f"{lines[name]:,} in {files[name]}" for name in sorted(lines) if name not in top}


WIDTH, ROW, LINE, GAP = 960, 40, 17, 6
"""Of the picture, in pixels: the whole, a layer, a further line of text in it, and the space between two."""

STYLE = """text { font: 13px system-ui, sans-serif; fill: #1f2328 } .name { font-weight: 600 }
rect { fill: #f6f8fa; stroke: #d1d9e0 } .room { fill: #ddf4ff; stroke: #54aeff }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } rect { fill: #161b22; stroke: #3d444d }
  .room { fill: #0c2d6b; stroke: #388bfd }
}"""

ROOMS = {"stacked", "peers", "reproduction"}
"""Packages with a door of their own."""


def picture(tree: Tree) -> str:
    """Draw the layers as an SVG, with the first sentence of each package's docstring."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    layers = [layer.split(" | ") for layer in contracts[0]["layers"] if layer != "__main__"]
    drawn, y = [], GAP
    for layer in layers:
        width = (WIDTH - GAP) / len(layer)
        words = [purpose(tree, name) for name in layer]
        wrapped = [textwrap.wrap(text, int((width - 24) / 7.4)) for text in words] if len(layer) > 1 else []
        height = ROW + LINE * max(map(len, wrapped), default=0)
        for at, name in enumerate(layer):
            x = GAP + at * width
            room = ' class="room"' if name in ROOMS else ""
            drawn.append(f'<rect{room} x="{x:g}" y="{y}" width="{width - GAP:g}" height="{height}" rx="6"/>')
            drawn.append(f'<text class="name" x="{x + 12:g}" y="{y + 25}">{name}</text>')
            below = [(12, LINE * k, line) for k, line in enumerate(wrapped[at], 1)] if wrapped else []
            drawn += [f'<text x="{x + across:g}" y="{y + 25 + down}">{html.escape(text)}</text>'
                      for across, down, text in below or [(130, 0, words[at])]]
        y += height + GAP
    first = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" role="img">',
             "<title>The packages of quasiglobal; each imports those below it</title>", f"<style>{STYLE}</style>"]
    return "\n".join([*first, *drawn, "</svg>", ""])


def purpose(tree: Tree, name: str) -> str:
    """The first sentence of a package's docstring."""
    first = (ast.get_docstring(tree.parsed[f"quasiglobal.{name}"]) or "").partition("\n\n")[0]
    return " ".join(first.replace("`", "").split()).partition(". ")[0].removesuffix(".")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", nargs="?", type=Path, help="another tree, src/quasiglobal of a checkout")
    parser.add_argument("--tiny", action="store_true", help="the same: it takes seconds")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the floor plan of this tree instead")
    given = parser.parse_args()
    if given.picture:
        given.picture.write_text(picture(Tree(OURS)))
        return
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
