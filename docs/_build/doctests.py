"""Griffe extension: doctests in docstrings become code blocks of the reference."""

import re
from typing import Any

from griffe import Extension, Object

DOCTEST = re.compile(r"^( *)>>> .*(?:\n\1\S.*|\n\1 +\S.*)*", re.MULTILINE)
"""A line with a prompt, and all lines up to the next empty line."""


class Doctests(Extension):
    """Wraps each doctest in a fence."""

    def on_object(self, *, obj: Object, **kwargs: Any) -> None:
        """Change the docstring of an object once it is loaded."""
        if obj.docstring is not None:
            obj.docstring.value = DOCTEST.sub(
                lambda found: f"{found[1]}```pycon\n{found[0]}\n{found[1]}```", obj.docstring.value
            )
