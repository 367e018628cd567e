"""Puts this folder's stand-ins on the path and offers them as fixtures."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_target import FakeSpeech, FakeTarget

from data_prep.ledger import Ledger
from data_prep.sources import Work


@pytest.fixture
def target():
    return FakeTarget()


@pytest.fixture
def said():
    """Lines that would have been printed."""
    return []


@pytest.fixture
def work(target, said, tmp_path):
    return Work(target, FakeSpeech(target), tmp_path / "data", 5, said.append)


@pytest.fixture
def ledger():
    return Ledger()
