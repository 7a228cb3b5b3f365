"""How many kernels and operators a step takes: eager, forward and backward. ``python -m tools.bench launches`` prints it."""

import pytest

from tools.bench.launches import STEPS, Inputs, count
from xent_ops.kernels import cpu

# At most: kernels and operator calls on a GPU, operator calls on a CPU with the C++ kernels. Calls inside others count.
LIMITS = {
    "cross_entropy": (4, 7, 31),
    "cross_entropy, grad_in_forward=True": (5, 10, 52),
    "cross_entropy, token_weight": (5, 10, 50),
    "token_log_probs": (6, 13, 36),
    "cross_entropy_outputs": (4, 8, 48),
    "linear_cross_entropy": (9, 23, 76),
    "linear_cross_entropy, z-loss and token_weight": (9, 25, 81),
    "linear_cross_entropy, a sum with a divisor": (10, 26, 85),
    'linear_cross_entropy, reduction="none"': (8, 39, 77),
    "linear_cross_entropy_outputs": (10, 23, 78),
    "linear_token_log_probs": (10, 41, 79),
    "linear_token_loss, reinforce": (22, 103, 162),
    "linear_distillation_loss": (11, 41, 120),  # a CPU multiplies copies of the operands in float32
    "linear_top_k_distillation_loss": (19, 86, 426),  # exp(-lse_low), times a gradient, is three kernels
    "linear_top_k_distillation_loss, tail=True": (20, 90, 626),
}


def test_each_step_has_a_limit():
    assert {name for name in STEPS if not name.startswith("F.")} == LIMITS.keys()


@pytest.mark.gpu
@pytest.mark.parametrize("name", LIMITS)
def test_on_a_gpu(name):
    found, (kernels, calls, _) = count(name, Inputs.on("cuda")), LIMITS[name]
    assert 0 < found.kernels <= kernels and found.calls <= calls, found


@pytest.mark.skipif(cpu.problem() is not None, reason=f"plain torch serves the CPU here: {cpu.problem()}")
@pytest.mark.parametrize("name", LIMITS)
def test_on_a_cpu(name):
    found = count(name, Inputs.on("cpu"))
    assert 0 < found.calls <= LIMITS[name][2], found
