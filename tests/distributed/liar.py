"""`qg` in a process that lies to its neighbours: `python liar.py LIE WORDS`.

LIE is a step, which it claims to be at, or a kind of `lies.LIES`, which it sends in place of its model.
"""

import sys

from quasiglobal import cli
from quasiglobal.peers.edge import Edge
from quasiglobal.runs import distributed

if __name__ == "__main__":
    lie, honest = sys.argv.pop(1), Edge.admit
    if lie.isdigit():
        Edge.admit = lambda self, experiment, secret, _, deadline: honest(self, experiment, secret, int(lie), deadline)
    else:
        from lies import Liar

        Liar.kind, distributed.Distributed = lie, Liar
    cli.main()
