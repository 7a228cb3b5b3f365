"""What tests of capture and replay, of synchronisation and of memory on a GPU share."""

import contextlib
import gc

import pytest
import torch


@pytest.fixture(autouse=True)
def collected():
    """Of the files that import it: an earlier test's memory would count, and its CUDA graph, freed during a capture
    without ``captured``, would invalidate that."""
    gc.collect()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@contextlib.contextmanager
def no_synchronisation():
    """An operator that waits for the GPU is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def captured(step, before=lambda: None):
    """(a CUDA graph of the step, what it returned), after two calls on a stream of their own and then ``before``."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    before()
    gc.collect()  # an earlier CUDA graph that is freed during the capture would invalidate it
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def measured(function):
    """(what the function returns, its peak beyond what was allocated before, what it left allocated), in bytes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    return result, torch.cuda.max_memory_allocated() - before, torch.cuda.memory_allocated() - before
