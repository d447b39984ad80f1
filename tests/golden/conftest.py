"""Put this folder and the helpers of the distributed tests on `sys.path`, also in the processes they start."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "distributed")]
