"""Every public entry point of the loss (an ``entry`` is its name) with all of its options, for the tests of compilation."""

import inspect
import itertools

import torch
from helpers.option_values import another

import xent_ops

V = 33
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]

FUNCTIONS = {
    "cross_entropy": xent_ops.cross_entropy,
    "class probabilities": xent_ops.cross_entropy,  # another operator
    "cross_entropy_outputs": xent_ops.cross_entropy_outputs,
    "token_log_probs": xent_ops.token_log_probs,
    "CrossEntropyLoss": xent_ops.CrossEntropyLoss,
    "torch.ops.xent.cross_entropy": torch.ops.xent.cross_entropy.default,
}


def parameters(entry):
    """The default of each parameter, by name."""
    if isinstance(FUNCTIONS[entry], torch._ops.OpOverload):
        return {one.name: one.default_value for one in FUNCTIONS[entry]._schema.arguments}
    return {one.name: one.default for one in inspect.signature(FUNCTIONS[entry]).parameters.values()}


def options_of(entry):
    """Each option of an entry with a value that is not its default; of a tensor True."""
    no_options, own = ("input", "logits", "target", "reduction"), {"weight": True, "token_weight": True, "dim": -1}
    found = {name: default for name, default in parameters(entry).items() if name not in no_options}
    found = {name: own[name] if name in own else another(name, default) for name, default in found.items()}
    if entry == "class probabilities":
        for name in ("ignore_index", "token_weight", "inplace_backward", "grad_in_forward"):  # for class indices
            del found[name]
    if entry == "token_log_probs":
        found["dim"] = 1  # -1 is its default
    return found


def together_of(entry):
    """All options that one call may have."""
    options = options_of(entry)
    apart = {"token_weight": "inplace_backward", "batch_invariant": "grad_in_forward"}
    return {name: value for name, value in options.items() if apart.get(name) not in options}


def cases_of(entry, each=True):
    """Keywords: none and all options with every reduction; with ``each``, every option alone with some reduction."""
    reductions = ["mean", "sum", "none"] if "reduction" in parameters(entry) else [None]
    options = options_of(entry)
    together = [({}, r) for r in reductions] + [(together_of(entry), r) for r in reductions]
    alone = [({name: value}, r) for (name, value), r in zip(options.items(), itertools.cycle(reductions), strict=False)]
    cases = together + alone if each else [together[0], together[-1]]
    return [case if reduction is None else {**case, "reduction": reduction} for case, reduction in cases]


def inputs(entry, rows=8, dtype=torch.float32, device="cpu", seed=0, classes=V):
    """(logits, target, weight). Of class indices, those of rows 1, 5, 9, ... are ignored."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, classes, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.rand(classes, generator=torch.Generator().manual_seed(9)).to(device)
    if entry == "class probabilities":
        target = torch.randn(rows, classes, generator=generator).softmax(-1).to(device, dtype)
        return x, target.requires_grad_(), weight.requires_grad_()
    target = torch.randint(0, classes, (rows,), generator=generator).to(device)
    target[1::4] = -100
    return x, target, weight


def bind(entry, case, weight):
    """The entry point with the keywords of a case as (logits, target, weight) -> its floating-point results, a tuple."""
    options = dict(case)
    of_tokens = options.pop("token_weight", False)
    weighted, dim, ignored = options.pop("weight", False), options.get("dim"), options.get("ignore_index")
    call = FUNCTIONS[entry]
    module = call(weight if weighted else None, **options) if entry == "CrossEntropyLoss" else None

    def function(x, target, weight):
        if ignored is not None:
            target = torch.where(target == -100, ignored, target)
        if dim is not None:
            x, target = x.unflatten(0, (2, -1)), target.unflatten(0, (2, -1))
            x = x if dim == -1 else x.transpose(1, 2)
        given = {"weight": weight} if weighted else {}
        if of_tokens:
            given["token_weight"] = (target % 3 + 1).to(torch.float32)
        result = call(x, target, **given, **options) if module is None else module(x, target)
        results = result if isinstance(result, tuple) else (result,)
        return tuple(value for value in results if value.is_floating_point())

    return function


def gradients(function, *tensors):
    """The outputs of ``function`` (a flat sequence), and the gradients of the leaves for random upstream ones."""
    outputs = function(*tensors)
    leaves = [tensor for tensor in tensors if tensor.requires_grad]
    differentiable = [output for output in outputs if output.requires_grad]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(output.shape, generator=generator).to(output) for output in differentiable]
    grads = torch.autograd.grad(differentiable, leaves, upstream, allow_unused=True)
    return [output.detach() for output in outputs], grads
