"""The command line, run in this process: faster than a subprocess."""

import sys

from quasiglobal import cli


def inside(monkeypatch, capsys, *words):
    """Run `qg` with these arguments; return the exit status, stdout and stderr."""
    monkeypatch.setattr(sys, "argv", ["qg", *words])
    status = 0
    try:
        cli.main()
    except SystemExit as exit:
        status = exit.code
    out = capsys.readouterr()
    return status, out.out, out.err
