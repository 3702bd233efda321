"""Fixtures for all tests of this folder."""

import pytest

from tests.support.launch_stand_ins import StandIns


@pytest.fixture
def stand_ins(tmp_path):
    return StandIns(tmp_path)
