"""Put this folder on `sys.path`, so that the tests can import `test_golden`, and that of version 2's user."""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "version2" / "names")]
