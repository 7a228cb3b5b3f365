"""The kernels that the tests of operators run on, and what new memory holds."""

import pytest
import torch
from flat_options import FlatOptions
from helpers.interpreter import INTERPRETED

from xent_ops.kernels import reference


@pytest.fixture(params=["operators", "plain torch", "Ascend"])
def kernels(request, device):
    """The operators; the functions of their names in plain torch, which a CPU with C++ does not run; those for NPUs."""
    if request.param == "operators":
        return torch.ops.xent
    if request.param == "plain torch":
        return FlatOptions(reference)
    if not INTERPRETED:
        pytest.skip("needs TRITON_INTERPRET=1: the Ascend kernels run on the CPU in Triton's interpreter alone")
    from xent_ops.kernels.ascend import launch

    return FlatOptions(launch)


@pytest.fixture
def new_memory_is_nan():
    """torch.empty and its kin return NaN, so that a test sees what was read before it was written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
