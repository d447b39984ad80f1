"""Entry point: `python -m quasiglobal` runs `qg`."""

from quasiglobal.cli import main

main()
