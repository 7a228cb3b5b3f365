"""Our losses in the place of torchtitan's, in two real processes. The case, run on every rank, is torchtitan_cases.py's."""

import pytest

for package in ("torchtitan", "spmd_types"):
    pytest.importorskip(package, reason=f"{package} is not installed")

import torch  # noqa: E402
import torchtitan_cases as cases  # noqa: E402


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_logits_split_by_classes(pool, device, backend):
    pool(2, device).run(cases.logits_split_by_classes, backend)


def test_chunks_of_a_split_head(pool, device):
    pool(2, device).run(cases.chunks_of_a_split_head)


@pytest.mark.parametrize(
    "backend, ranks",
    [("partial_dtensor", 2), ("full_dtensor", 2), pytest.param("partial_dtensor", 4, marks=pytest.mark.slow)],
)
def test_heads_that_torchtitan_splits(pool, device, backend, ranks):
    pool(ranks, device).run(cases.heads_that_torchtitan_splits, backend)


def test_split_heads_are_refused(pool, device):
    pool(2, device).run(cases.split_heads_are_refused)


@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torchtitan's own loss crashes in the backward of torch 2.11")
def test_norm_and_head_in_one_group(pool, device):
    pool(2, device).run(cases.norm_and_head_in_one_group)
