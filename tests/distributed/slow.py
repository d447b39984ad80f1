"""`qg` in a process of a given speed: `python slow.py SECONDS WORDS` sleeps this long in each step."""

import sys
import time

from quasiglobal import cli
from quasiglobal.training.program import Program

if __name__ == "__main__":
    seconds, step = float(sys.argv.pop(1)), Program._step

    def slow(self, *arguments, **options):
        time.sleep(seconds)
        step(self, *arguments, **options)

    Program._step = slow
    cli.main()
