"""Put this folder on `sys.path`, so that the tests can import `theory_problems`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
