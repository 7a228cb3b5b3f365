"""Float64 logits and targets of six rows, one of them ignored."""

import pytest
import torch


@pytest.fixture
def h(device):
    return torch.randn(6, 30, device=device, dtype=torch.float64, requires_grad=True)


@pytest.fixture
def target(device):
    return torch.tensor([3, 29, -100, 0, 7, 7], device=device)
