"""Lets tests import modules beside them, such as `terminal`, which pytest's importlib mode does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from data_files import hide_data


@pytest.fixture
def no_data_here(monkeypatch, tmp_path):
    """Neither this machine's data sets nor the hub's are found."""
    hide_data(monkeypatch, tmp_path)
