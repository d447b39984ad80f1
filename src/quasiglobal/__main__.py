"""`python -m quasiglobal` is `qg`."""

from quasiglobal.cli import main

main()
