"""The bench looks for garbage beside each line that it measures."""

import gc

import pytest


@pytest.fixture(autouse=True)
def frozen():
    """What earlier tests of the process have imported and compiled is not looked at: that took seconds each time."""
    gc.freeze()
