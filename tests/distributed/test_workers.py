"""What all tests of ranks rely on: a rank that hangs says where."""

import time

import pytest
import torch.distributed as dist
from helpers import workers


def one_rank_sleeps(device, seconds):
    if dist.get_rank() == 1:
        time.sleep(seconds)


def test_a_hanging_rank_says_where(monkeypatch):
    ranks = workers.Workers(2, "cpu")
    try:
        ranks.run(one_rank_sleeps, 0)
        monkeypatch.setattr(workers, "CASE_TIMEOUT", 1)
        with pytest.raises(AssertionError) as error:
            ranks.run(one_rank_sleeps, 60)
    finally:
        ranks.close()
    message = str(error.value)
    assert message.startswith("rank 1 did not answer in 1 s:\n") and "in one_rank_sleeps" in message, message
