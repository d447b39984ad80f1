"""Lets the tests of this folder import its helpers, here and in the processes they start."""

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "unit")]


@pytest.fixture
def owners(tmp_path):
    """Makes four owners with an experiment of so many epochs; none of their nodes outlives the test."""
    from owners import Owners

    made = []

    def make(epochs):
        made.append(Owners(tmp_path, epochs))
        return made[0]

    yield make
    for four in made:
        four.close()
