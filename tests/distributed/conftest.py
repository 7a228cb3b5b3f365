"""Processes that the distributed tests share."""

import pytest
from helpers.workers import Workers


@pytest.fixture(scope="session")
def pool():
    """Processes of a process group, by (world, device), started when first asked for: ``pool(2, device).run(case)``."""
    started = {}

    def get(world, device):
        if device == "cpu" and world > 4:
            pytest.skip(f"{world} processes are for {world} GPUs: no case takes another way from 4 on")
        if (world, device) in started and started[world, device].broken:
            started.pop((world, device)).close()
        if (world, device) not in started:
            started[world, device] = Workers(world, device)
        return started[world, device]

    yield get
    for workers in started.values():
        workers.close()
