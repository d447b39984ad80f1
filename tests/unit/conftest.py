"""Lets tests import modules beside them, such as `terminal`, which pytest's importlib mode does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
