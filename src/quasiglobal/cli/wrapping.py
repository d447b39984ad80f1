"""Text that fits the width of the terminal."""

from __future__ import annotations

import inspect
import re
import shutil
import sys
from textwrap import fill, indent
from typing import Any, TextIO


def wrapped(text: str, to: TextIO | None = None, narrower: int = 0) -> str:
    """Break the lines of a text at the width of the terminal, between words; a text for a file or a pipe stays.

    Lines that are indented, such as equations, stay lines; the others of a paragraph are joined.
    """
    if not (to or sys.stdout).isatty():
        return text
    width = shutil.get_terminal_size().columns - narrower
    return "\n\n".join(_paragraph(one, width) for one in text.split("\n\n"))


def about(command: Any) -> str:
    """The description of a command: its docstring without the arguments, wrapped and indented.

    tyro joins lines that begin with a letter.
    """
    text = wrapped((inspect.getdoc(command) or "").partition("\n\nArgs:")[0], narrower=2)
    return indent(text, "  ") if sys.stdout.isatty() else text


def _paragraph(text: str, width: int) -> str:
    if not re.search(r"^\s", text, re.MULTILINE):
        return fill(text, width)
    lines = []
    for line in text.splitlines():
        indent = line[: len(line) - len(line.lstrip())]
        lines.append(fill(line, width, subsequent_indent=f"{indent}    ") if len(line) > width else line)
    return "\n".join(lines)
