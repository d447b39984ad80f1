"""Lets the tests of this folder import its helpers, here and in the processes they start."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
