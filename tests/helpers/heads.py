"""Random rows of hidden states, a head and targets: where tests of linear losses begin."""

import torch


def random_head(
    device="cpu", dtype=torch.float32, rows=(4, 5), classes=37, features=8, *, seed=0, scale=1.0,
    ignored=slice(1, None, 4), requires_grad=True,
):  # fmt: skip
    """(input, linear_weight, linear_bias, target): of a seed the same numbers on every device and in every dtype.

    Args:
        rows: the shape of the target.
        scale: the standard deviation of linear_weight.
        ignored: an index of the flat target; [] ignores no row.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*rows, features), (classes, features), (classes,))
    input, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    target = torch.randint(classes, rows, generator=generator)
    target.view(-1)[ignored] = -100
    leaves = [tensor.to(device, dtype).requires_grad_(requires_grad) for tensor in (input, scale * weight, bias)]
    return *leaves, target.to(device)
