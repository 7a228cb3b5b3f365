"""use_xent with DDP and FSDP2 in two real processes. The case, run on every rank, is use_xent_cases.py's."""

import pytest

cases = pytest.importorskip("use_xent_cases", reason="transformers is not installed")


@pytest.mark.parametrize("way", cases.WAYS)
def test_equal_to_one_process(pool, device, way):
    pool(2, device).run(cases.equal_to_one_process, way)


@pytest.mark.parametrize("way", cases.PARALLEL)
@pytest.mark.parametrize("name", cases.KINDS)
def test_a_class_of_each_kind(pool, device, name, way):
    pool(2, device).run(cases.kinds, name, way)


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("order", ["use_xent first", "use_xent last"])
@pytest.mark.parametrize("head", ["own", "root", "tied"])
def test_fsdp1(pool, device, head, order, use_orig_params):
    pool(2, device).run(cases.fsdp1, head, order, use_orig_params)


def test_fsdp1_refusals(pool, device):
    pool(2, device).run(cases.fsdp1_refusals)


def test_mixed_precision(pool, device):
    pool(2, device).run(cases.mixed_precision)


def test_tensor_parallel_heads_are_refused(pool, device):
    pool(2, device).run(cases.tensor_parallel)
