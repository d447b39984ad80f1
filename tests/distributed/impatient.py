"""`qg` whose sites look after their federation file, certificates and records of traffic more often.

OTHER_VERSION is another library version to greet with; PAUSE are seconds of sleep after each epoch; the clock is
SLOW_CLOCK seconds slow.
"""

import os
import time
from datetime import timedelta

from quasiglobal.cli import main, train
from quasiglobal.peers import certificates, federation_file, folders, greeting, sites

sites.WATCH = sites.TRAFFIC = 0.3
if "OTHER_VERSION" in os.environ:
    sites._version = lambda: os.environ["OTHER_VERSION"]

right, behind = certificates.now, timedelta(seconds=float(os.environ.get("SLOW_CLOCK", "0")))
for module in (certificates, federation_file, folders, greeting):
    module.now = lambda: right() - behind

train_node, pause = train.train_node, float(os.environ.get("PAUSE", "0"))


def paused(experiment, place, data, options, patience, watch, *further):
    """Train with a pause after each epoch, so that a run outlasts the restart of a process."""
    def watch_and_sleep(runs, records):
        watch(runs, records)
        time.sleep(pause)

    return train_node(experiment, place, data, options, patience, watch_and_sleep, *further)


if __name__ == "__main__":
    train.train_node = paused
    main()
