"""What ``use_xent`` gains in a training step of a Llama of transformers: ms, tokens/s and peak memory of both.

    python tools/use_xent_step.py                          # 1.5 B parameters, bfloat16, compiled, on a GPU
    python tools/use_xent_step.py --eager
    python tools/use_xent_step.py --trl                    # the loss of TRL's SFTTrainer, whose head is fused already
    python tools/use_xent_step.py --device cpu --eager --hidden 64 --layers 1 --heads 4 --vocab 512 --tokens 64

A step is forward and backward; the optimizer takes the same time for both. Each way runs in a process of its own.
"""

import argparse
import contextlib
import multiprocessing
import statistics
import time

import torch


def _measure(arguments, with_xent, pipe):
    from transformers import LlamaConfig, LlamaForCausalLM

    from xent_ops.integrations.transformers import use_xent

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=arguments.vocab, hidden_size=arguments.hidden, intermediate_size=arguments.hidden * 7 // 2,
        num_hidden_layers=arguments.layers, num_attention_heads=arguments.heads,
        num_key_value_heads=max(1, arguments.heads // 4), max_position_embeddings=arguments.tokens, use_cache=False,
    )  # fmt: skip
    on_gpu = arguments.device == "cuda"
    with torch.device(arguments.device):
        model = LlamaForCausalLM(config).to(torch.bfloat16).train()
        ids = torch.randint(0, arguments.vocab, (arguments.batch, arguments.tokens))
    if arguments.trl:
        from trl.trainer.utils import add_fused_lm_head

        from xent_ops.integrations.trl.fused_head import FusedHead

        add_fused_lm_head(model, outputs=("log_probs", "entropy", "is_top1"))
        if with_xent:
            FusedHead(model, {"skip_ignored": True}, True, contextlib.nullcontext)
    elif with_xent:
        use_xent(model)
    call = model if arguments.eager else torch.compile(model)

    def step():
        model.zero_grad(set_to_none=False)  # as with gradients that the optimizer keeps
        if arguments.trl:
            loss = -call(input_ids=ids, labels=ids, fused_lm_head=True).log_probs.sum() / ids[:, 1:].numel()
        else:
            loss = call(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    times = []
    for index in range(arguments.warmup + arguments.steps):
        if index == arguments.warmup and on_gpu:
            torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 2**20 if on_gpu else float("nan")
    parameters = sum(p.numel() for p in model.parameters())
    pipe.send((statistics.median(times[arguments.warmup :]), peak, loss.item(), parameters))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    sizes = {"vocab": 128256, "hidden": 2048, "layers": 16, "heads": 32, "batch": 4, "tokens": 4096}
    for name, value in (sizes | {"warmup": 5, "steps": 20}).items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--trl", action="store_true", help="a model of TRL's SFTTrainer, with its entropy and accuracy")
    ways = ("untouched", "use_xent")
    parser.add_argument("--only", choices=ways, help="one of the two, where a command has little time")
    arguments = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    for way in [arguments.only] if arguments.only else ways:
        mine, theirs = context.Pipe()
        process = context.Process(target=_measure, args=(arguments, way == "use_xent", theirs))
        process.start()
        theirs.close()  # a process that dies is an EOFError here, not a wait
        seconds, peak, loss, parameters = mine.recv()
        process.join()
        tokens = arguments.batch * arguments.tokens / seconds
        print(f"{way:9} {parameters / 1e9:.2f} B parameters: {seconds * 1e3:.1f} ms, {tokens:,.0f} tokens/s, ", end="")
        print(f"peak {peak:.0f} MiB, loss {loss:.5f}")


if __name__ == "__main__":
    main()
