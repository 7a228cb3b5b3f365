"""The kernels that the tests of operators run on."""

from types import SimpleNamespace

import pytest
import torch
from flat_options import FlatOptions
from helpers.interpreter import INTERPRETED

from xent_ops.kernels import reference, reference_with_grad


# Plain torch is the same in the interpreter, where the kernels for NPUs run on the CPU; nowhere else they do.
@pytest.fixture(params=["operators", "Ascend" if INTERPRETED else "plain torch"])
def kernels(request, device):
    """The operators; the functions of their names in plain torch, which a CPU with C++ does not run; those for NPUs."""
    if request.param == "operators":
        return torch.ops.xent
    if request.param == "plain torch":
        return FlatOptions(
            reference,
            cross_entropy_forward=reference.statistics,
            cross_entropy_with_grad=reference_with_grad.cross_entropy_with_grad,
        )
    from xent_ops.kernels.ascend.launch import LAUNCHERS

    return FlatOptions(SimpleNamespace(**LAUNCHERS))
