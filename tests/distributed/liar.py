"""`qg` in a process that lies to its neighbours: `python liar.py STEP WORDS` claims to be at this step."""

import sys

from quasiglobal import cli
from quasiglobal.engines.distributed.edge import Edge

if __name__ == "__main__":
    step, honest = int(sys.argv.pop(1)), Edge.admit
    Edge.admit = lambda self, experiment, secret, _, deadline: honest(self, experiment, secret, step, deadline)
    cli.main()
