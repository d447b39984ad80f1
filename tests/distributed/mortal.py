"""`qg` in a process that is killed once it is admitted, before its first step: `python mortal.py WORDS`."""

import os
import signal

from quasiglobal import cli
from quasiglobal.runs import distributed

if __name__ == "__main__":
    distributed._agreed_epoch = lambda *arguments: os.kill(os.getpid(), signal.SIGKILL)
    cli.main()
