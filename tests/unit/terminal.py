"""The command line in this process: quicker than one of its own."""

import sys

from quasiglobal import cli


def inside(monkeypatch, capsys, *words):
    """The status of `qg` with these words, and what it said on both streams."""
    monkeypatch.setattr(sys, "argv", ["qg", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as exit:
        status = exit.code
    out = capsys.readouterr()
    return status, out.out, out.err
