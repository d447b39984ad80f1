"""Put this folder on `sys.path`, so that tests can import `terminal` etc.; pytest's importlib mode does not."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
from data_files import hide_data


@pytest.fixture
def no_data_here(monkeypatch, tmp_path):
    """Hide local data sets and the hub."""
    hide_data(monkeypatch, tmp_path)
