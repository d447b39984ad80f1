"""Reports, leaderboards and listings that version 2 made from the runs and records in `version2/store`, byte for byte.

    python tests/golden/test_version2_pages.py          writes the fixtures
"""

import contextlib
import gzip
import io
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quasiglobal.cli import main

HERE = Path(__file__).parent / "version2" / "store"

BLOCKS = ("answers", "top digits", "top cifar", "top relay", "all digits", "all cifar", "all relay")

COMMANDS = {
    "report": "report --runs runs --out OUT",
    "report short": "report --runs runs --scale short --format markdown --out OUT",
    "leaderboard digits": "leaderboard digits --show --records leaderboard --out OUT --update OUT/blocks.md",
    "leaderboard cifar": "leaderboard cifar --show --records leaderboard --out OUT",
    "leaderboard cifar json": "leaderboard cifar --show --records leaderboard --out OUT --json",
    "leaderboard relay": "leaderboard relay --show --records leaderboard --out OUT",
    "leaderboard some": "leaderboard digits --show --methods qg-* d2* --records leaderboard --out OUT",
    "runs": "runs runs",
    "runs json": "runs runs --json",
    "compare": "compare runs/*",
    "compare some": "compare runs/digits-* runs/*-social-*",
    "compare markdown": "compare runs/* --markdown",
    "compare json": "compare runs/* --json",
}
"""Commands in the folder of the store; they write into OUT."""

WRITE = ("report", "report short", "leaderboard digits")
"""Commands whose files are compared; the others print only, or write the same files."""


def outcome(which: str, out: Path) -> dict[str, bytes]:
    """The standard output of a command, and the files that it writes, at 80 columns."""
    words: list[str] = []
    if "--update" in COMMANDS[which]:
        (out / "blocks.md").write_text("\n".join(f"<!-- leaderboard: {name} -->\n<!-- end -->" for name in BLOCKS))
    for word in COMMANDS[which].split():
        found = sorted(map(str, Path().glob(word))) if word.startswith("runs/") else []
        words += found or [word.replace("OUT", str(out))]
    said = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(said):
        patch.setenv("COLUMNS", "80")
        patch.setattr(sys, "argv", ["qg", *words, "--allow-code", "version2_user"])     # of a stored run
        main()
    written = {path.name: path.read_bytes() for path in out.iterdir()} if which in WRITE else {}
    return {"said.txt": said.getvalue().replace(str(out), "OUT").encode(), **written}


@contextlib.contextmanager
def in_store() -> Iterator[None]:
    """Work in the folder of the store, so that no output has a path of this machine."""
    before = Path.cwd()
    os.chdir(HERE)
    try:
        yield
    finally:
        os.chdir(before)


def recorded(which: str) -> dict[str, bytes]:
    """The recorded outcome; pages are compressed."""
    return {
        path.name.removesuffix(".gz"): gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        for path in (HERE / "made" / which.replace(" ", "-")).iterdir()
    }


@pytest.mark.parametrize("which", COMMANDS)
def test_a_command_makes_the_same_of_stored_runs_and_records(tmp_path, which):
    with in_store():
        made = outcome(which, tmp_path)
    expected = recorded(which)
    assert made.keys() == expected.keys()
    for name, content in expected.items():
        assert made[name].decode().splitlines() == content.decode().splitlines(), name
        assert made[name] == content, name


def write() -> None:
    for which in COMMANDS:
        folder = HERE / "made" / which.replace(" ", "-")
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as out, in_store():
            made = outcome(which, Path(out))
        for name, content in made.items():
            if name == "index.html":
                (folder / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
            else:
                (folder / name).write_bytes(content)


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
