"""Make the helpers of this folder importable, in the tests and in the processes they start."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "unit")]


@pytest.fixture
def owners(tmp_path):
    """Factory of four owners with an experiment of `epochs` epochs; their nodes are killed after the test."""
    from owners import Owners

    made = []

    def make(epochs):
        made.append(Owners(tmp_path, epochs))
        return made[0]

    yield make
    for four in made:
        four.close()
