"""What the recipes share: text of this repository, a tiny model, and the comparison of two runs."""

from collections.abc import Callable
from pathlib import Path

import torch

VOCABULARY = 256  # bytes


def text(rows: int, length: int) -> torch.Tensor:
    """(rows, length) bytes of this project's README."""
    raw = (Path(__file__).parents[2] / "README.md").read_bytes()
    return torch.tensor(list(raw[: rows * length])).view(rows, length)


def prompts_ignored(ids: torch.Tensor) -> torch.Tensor:
    """Labels of which the first few of each row, another number each time, are a prompt and not learned."""
    prompt = 1 + torch.arange(len(ids)) * 7 % (ids.shape[1] // 2)
    return ids.masked_fill(torch.arange(ids.shape[1]) < prompt[:, None], -100)


def tiny_llama(**sizes):
    """A Llama of random weights, the same at each call with the same sizes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    default = {
        "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config = LlamaConfig(**(default | sizes))
    return LlamaForCausalLM(config)


def compare(run: Callable[[bool], list[float]], rtol: float = 1e-5, atol: float = 0.0) -> None:
    """Print the losses of ``run(False)`` and of ``run(True)``, with xent_ops, and require that each step agrees."""
    without, with_xent = run(False), run(True)
    print("step     without   with xent_ops   difference")
    assert len(without) == len(with_xent) > 0
    for step, (a, b) in enumerate(zip(without, with_xent, strict=True)):
        print(f"{step:4} {a:11.7f} {b:15.7f} {abs(a - b):12.1e}")
        assert abs(a - b) <= rtol * abs(a) + atol, f"step {step}: {a} without and {b} with xent_ops"
    assert without[-1] != without[0], "nothing was learned"
    print(f"{len(without)} values agree to {rtol:g}" + (f" and {atol:g}" if atol else ""))
