"""Trains a small byte-level language model, exports it with the loss and packs it with AOTInductor for main.cpp:

    python examples/aoti_eval/export.py OUT [--text FILE] [--device cuda]

writes OUT/score.pt2 (summed loss of a batch of windows), OUT/step.pt2 (loss and
gradients of a training step) and OUT/parameters.pt (what the step starts from), and prints the perplexity of the text
and the losses of some steps of SGD as Python computes them. The C++ program must print the same.
"""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.export import Dim
from torch.fx.experimental.proxy_tensor import make_fx

import xent_ops

LENGTH = 64  # bytes that the model sees at once; main.cpp has the same numbers
BATCH = 16
STEPS = 5
RATE = 0.01
IGNORED = -100


class ByteModel(nn.Module):
    """Causal convolutions over bytes, which see 15 bytes back; logits over the 256 values of the next one."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        # Not nn.Embedding: Inductor of torch 2.13 got its gradient in this model wrong on a CPU (relative error 1.4).
        self.bytes = nn.Linear(256, width, bias=False)
        self.layers = nn.ModuleList(nn.Conv1d(width, width, kernel_size=2, dilation=2**i) for i in range(4))
        self.head = nn.Linear(width, 256)

    def hidden(self, ids: Tensor) -> Tensor:
        one_hot = (ids.unsqueeze(-1) == torch.arange(256, device=ids.device)).float()
        x = self.bytes(one_hot).transpose(1, 2)  # (batch, width, length)
        for layer in self.layers:
            x = x + F.gelu(layer(F.pad(x, (layer.dilation[0], 0))))
        return x.transpose(1, 2)  # (batch, length, width)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(ids))  # (batch, length, 256)


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return xent_ops.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


class Score(nn.Module):
    def __init__(self, model: ByteModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        head, hidden = self.model.head, self.model.hidden(ids)
        return xent_ops.linear_cross_entropy(
            hidden, head.weight, targets, linear_bias=head.bias, ignore_index=IGNORED, reduction="sum"
        )


def windows(text: bytes) -> tuple[Tensor, Tensor]:
    """(windows, LENGTH) inputs and targets: each byte is predicted once; the last window is filled up with IGNORED."""
    ids = torch.tensor(list(text))
    padding = -(len(text) - 1) % LENGTH
    inputs = F.pad(ids[:-1], (0, padding))
    targets = F.pad(ids[1:], (0, padding), value=IGNORED)
    return inputs.view(-1, LENGTH), targets.view(-1, LENGTH)


def train_step(model: ByteModel, parameters: Sequence[Tensor], ids: Tensor, targets: Tensor) -> tuple[Tensor, ...]:
    """(loss, gradient of each parameter)."""
    leaves = [parameter.detach().requires_grad_() for parameter in parameters]
    names = [name for name, _ in model.named_parameters()]
    logits = torch.func.functional_call(model, dict(zip(names, leaves, strict=True)), ids)
    loss = loss_of(logits, targets)
    return loss.detach(), *torch.autograd.grad(loss, leaves)


def pack(module: nn.Module, inputs: tuple[Tensor, ...], path: Path, dynamic: bool) -> None:
    shapes = tuple({0: Dim.DYNAMIC} for _ in inputs) if dynamic else None
    program = torch.export.export(module, inputs, dynamic_shapes=shapes)
    if dynamic and inputs[0].device.type == "cpu":  # a head: libxent_ops.so has none
        program = program.run_decompositions(xent_ops.decompositions())
    torch._inductor.aoti_compile_and_package(program, package_path=str(path))


def train(model: ByteModel, ids: Tensor, targets: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        batch = torch.randint(len(ids), (BATCH,)).to(ids.device)
        loss_of(model(ids[batch]), targets[batch]).backward()
        optimizer.step()
        optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--text", type=Path, default=Path(__file__), help="what is learnt and scored")
    parser.add_argument("--device", default="cpu", help="cpu or cuda, on which the packages run")
    parser.add_argument("--steps", type=int, default=100, help="of training, before the export")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)

    ids, targets = (tensor.to(args.device) for tensor in windows(args.text.read_bytes()))
    model = ByteModel().to(args.device)
    train(model, ids, targets, args.steps)
    score = Score(model).eval()
    with torch.no_grad():
        pack(score, (ids[:2], targets[:2]), args.out / "score.pt2", dynamic=True)
        total = sum(score(*batch).double() for batch in zip(ids.split(BATCH), targets.split(BATCH), strict=True))
    print(f"perplexity {math.exp(total / int((targets != IGNORED).sum())):.6f}")

    parameters = [parameter.detach() for parameter in model.parameters()]
    batch = ids[:BATCH], targets[:BATCH]
    step = make_fx(lambda *inputs: train_step(model, inputs[2:], *inputs[:2]))(*batch, *parameters)
    pack(step, (*batch, *parameters), args.out / "step.pt2", dynamic=False)
    torch.save([parameter.cpu() for parameter in parameters], args.out / "parameters.pt")
    for _ in range(STEPS):
        loss, *gradients = train_step(model, parameters, *batch)
        parameters = [p - RATE * gradient for p, gradient in zip(parameters, gradients, strict=True)]
        print(f"loss {loss:.6f}")


if __name__ == "__main__":
    main()
