"""Put this folder, the code of version 2's user and the helpers of the distributed tests on `sys.path`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent

sys.path[:0] = [str(HERE), str(HERE / "version2" / "names"), str(HERE.parent / "distributed")]
