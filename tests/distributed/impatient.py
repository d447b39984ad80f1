"""`qg` whose sites look after their federation file, certificates and records of traffic more often.

OTHER_VERSION is another library version to greet with; PAUSE are seconds of sleep after each epoch.
"""

import os
import time

from quasiglobal.cli import main, train
from quasiglobal.peers import sites

sites.WATCH = sites.TRAFFIC = 0.3
if "OTHER_VERSION" in os.environ:
    sites._version = lambda: os.environ["OTHER_VERSION"]

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
