"""Put this folder on `sys.path`, so that the tests can import `test_golden`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
