"""A training loop with accelerate: gradient accumulation over micro-batches that count different numbers of tokens.

    python examples/integrations/accelerate_loop.py

``num_items_in_batch`` of all micro-batches of a step makes their gradients add up to those of one mean. Over several
processes it is the number on all of them, ``accelerator.gather(count).sum()``, and the loss is multiplied by
``accelerator.num_processes``, since DDP averages gradients.
"""

import torch
from accelerate import Accelerator
from common import compare, prompts_ignored, text, tiny_llama

from xent_ops.integrations.transformers import use_xent

STEPS, MICRO_BATCHES, ROWS = 4, 2, 2


def run(with_xent: bool) -> list[float]:
    accelerator = Accelerator(gradient_accumulation_steps=MICRO_BATCHES, cpu=True)
    model = tiny_llama().train()
    if with_xent:
        print(use_xent(model))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    ids = text(STEPS * MICRO_BATCHES * ROWS, 64)
    losses = []
    for of_step in zip(ids.split(MICRO_BATCHES * ROWS), prompts_ignored(ids).split(MICRO_BATCHES * ROWS), strict=True):
        count = accelerator.gather((of_step[1][:, 1:] != -100).sum()).sum()
        for tokens, labels in zip(*(t.split(ROWS) for t in of_step), strict=True):
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=labels, num_items_in_batch=count).loss
                # accelerate divides by the number of micro-batches, which the count has done already.
                accelerator.backward(loss * accelerator.num_processes * MICRO_BATCHES)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
    return losses


if __name__ == "__main__":
    compare(run)
