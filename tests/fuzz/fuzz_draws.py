"""Random calls of the public functions, as programs: what a test runs is the text that it prints when it fails.

A draw is a function of its seed. It never draws arguments that are refused. Numbers of tensors come from the
program's own torch.manual_seed; all that decides about a program (shapes, targets, options) is written out in it.
"""

import random
from types import MappingProxyType

import fuzz_distillation
import fuzz_divergences
import fuzz_largest
import fuzz_top_k
import torch
from fuzz_program import DTYPES, HALF, Program, parameters_of
from helpers.option_values import drawn

OF_HEADS = (fuzz_distillation, fuzz_divergences, fuzz_top_k, fuzz_largest)
ALONE = (
    "cross_entropy",
    "CrossEntropyLoss",
    "cross_entropy_outputs",
    "token_log_probs",
    "token_loss",
    "linear_cross_entropy",
    "LinearCrossEntropyLoss",
    "linear_cross_entropy_outputs",
    "linear_token_log_probs",
    "linear_token_loss",
    *(name for module in OF_HEADS for name in module.NAMES),
)
OVER_RANKS = ("vocab_parallel_cross_entropy", *(name for name in ALONE if "class_start" in parameters_of(name, 2)))
OUTPUTS = {
    "outputs": ("loss", "z_loss", "lse", "predictions", "accuracy", "token_losses", "entropy"),
    "log_probs": ("log_probs", "entropy", "lse"),
}
STATISTICS = OUTPUTS["log_probs"]  # of which a function of tokens is a sum, with a row of factors for each
DIFFERENTIABLE = {"loss", "z_loss", "lse", "log_probs", "entropy"}
# Of a tensor with one dimension or more: what is as it, in other memory. "one": all rows are the first.
LAYOUTS = {
    "dense": "{0}",
    "transposed": "{0}.mT.contiguous().mT",
    "gap": "torch.nn.functional.pad({0}, (0, 3))[..., :-3]",
    "offset": "torch.nn.functional.pad({0}, (1, 0))[..., 1:]",
    "every other": "{0}.repeat_interleave(2, -1)[..., ::2]",
    "every other row": "{0}.repeat_interleave(2, 0)[::2]",
    "one row": "{0}[:1].expand({0}.shape)",
    "stride 0": "{0}.as_strided({0}.shape, (*{0}.stride()[:-1], 0))",  # of one class
}


def draw(seed, *, device="cpu", names=ALONE, backend=None, ranks=1, fixed=MappingProxyType({})):
    """``fixed``: arguments by name, as a draw would choose them; all others are drawn."""
    pick = random.Random(seed)
    name = pick.choice(names)
    own = (module.draw for module in OF_HEADS if name in module.NAMES)
    return next(own, _draw)(pick, seed, device, name, backend, ranks, fixed)


def _draw(*args):
    return _Program(*args).draw()


class _Program(Program):
    def __init__(self, *args):
        super().__init__(*args)
        self.module = self.name[0].isupper()
        self.kind = next((kind for kind in OUTPUTS if self.name.endswith(kind)), "loss")
        self.autocast = False

    def draw(self):
        self.dtype = self.pick(DTYPES, "dtype")
        self.classes = self.pick((1, 2, 3, 17, 37, 64, 130, 1003), "classes")
        self._rows()
        self._options()
        self.begin("fuzz_compare")
        if self.ranks > 1:
            self._shard()
        sizes = (*self.shape, *self.places)
        self.say(f"target = torch.tensor({self.targets}, dtype={self.index}).view({sizes}).to({self.device!r})")
        if len(self.targets) > 0 and sizes:
            layout = self.pick(("dense", "gap", "every other", *(["transposed"] if len(sizes) > 1 else [])))
            self.say(f"target = {LAYOUTS[layout].format('target')}")
        if self.weights is not None:
            self.say(f"weight = {self.weights}.to({self.device!r})")
        if self.of_tokens:
            self.say(f"token_weight = torch.rand({self.shape}).to({self.device!r}) + 0.25")
            if self.options.get("reduction", "mean") != "mean":
                self.say("token_weight = (token_weight - 0.7).round(decimals=1)")
        for name in self.function:
            sizes = self.sizes_of(name)
            self.say(f"{name} = torch.randn({sizes}).double().to({self.wide}).to({self.device!r})")
        (self._linear_call if self.linear else self._call)()
        self._results()
        return self.drawn()

    def sizes_of(self, name):
        return (*self.shape, *self.places) if name == "log_probs" else self.shape

    @property
    def wide(self):
        return "torch.float64" if self.dtype == "torch.float64" else "torch.float32"

    def _of_tokens(self):
        """Keywords for weights, or a function, of tokens."""
        if self.of_tokens:
            self.more.append("token_weight=token_weight")
        if self.function:
            terms = [f"rows[{i}] * stats.{name}" for i, name in enumerate(self.function)]
            if self.places:
                terms = [f"({term}).sum(-1)" if term.endswith("log_probs") else term for term in terms]
            self.more.append(f"fn=lambda stats, *rows: {' + '.join(terms)}")
            self.more.append(f"rows=({', '.join(self.function)},)")

    def _rows(self):
        """Shape and targets, and which class or number is ignored."""
        pick = self.pick
        self.shape = pick([(), (0,), (1,), (2,), (7,), (33,), (2, 3), (3, 4), (2, 0), (2, 3, 2), (150,)], "shape")
        self.sequence = None
        if self.ranks > 1 and self.linear and self.maybe(0.3):
            self.sequence = pick((0, 1))
            self.shape = pick([(2 * self.ranks, 3), (4 * self.ranks, 1)])[:: 1 if self.sequence == 0 else -1]
        several = "token_log" in self.name or "token_loss" in self.name
        self.places = (pick((1, 2, 5, 16), "K"),) if several and self.maybe(name="several") else ()
        self.index = pick(("torch.int64", "torch.int64", "torch.int32", "torch.uint8"), "index")
        highest = min(self.classes, 256) if self.index == "torch.uint8" else self.classes
        self.ignored = pick([-100, -1, self.classes + 7, *(self.random.randrange(highest) for _ in range(3))])
        writable = 0 <= self.ignored < 256 if self.index == "torch.uint8" else True
        share = pick((0.0, 0.3, 0.3, 0.9, 1.0), "ignored") if writable else 0.0
        number = torch.Size((*self.shape, *self.places)).numel()
        self.targets = [self.ignored if self.maybe(share) else self.random.randrange(highest) for _ in range(number)]
        self.counted = [target for target in self.targets if target != self.ignored]

    def _options(self):
        """Those of a loss; ``weights`` is the text of the class weights."""
        pick, options, names = self.pick, self.options, self.parameters
        self.weights = None
        if self.ignored != -100 or self.maybe(0.2):
            options["ignore_index"] = self.ignored
        if "fn" in names:
            options["reduction"] = pick(("mean", "sum"), "reduction") if self.counted else "sum"
        elif "reduction" in names:
            self.option("reduction", 0.8, ("mean", "mean", "sum", "none"))
        for name, (_, *choices) in drawn("cross_entropy").items():
            if name in names:
                self.option(name, 0.35, choices)
        if "weight" in names or "class_weight" in names:
            self._weights()
        both = self.weights is not None and "lse_square_scale" in options  # a mean divides them by other numbers
        self.of_tokens = "token_weight" in names and not both and self.maybe(0.3, "token_weight")
        if "grad_in_forward" in names and not self.of_tokens:
            for name in ("inplace_backward", "grad_in_forward"):
                if self.maybe(0.25, name) and name in names:
                    options[name] = True
        of_statistics = self.random.sample(STATISTICS, self.random.randint(1, 3)) if "fn" in names else []
        self.function = self.pick([of_statistics], "function") if "fn" in names else []
        sums = options.get("reduction") == "sum"
        if "divisor" in names and not self.module and sums:
            self.option("divisor", 0.5, (3.0, 1000.0, 0.5))
        # In a compiled graph "check" is refused.
        if "check" in names and self.backend is None and self.maybe(0.2):
            options["check"] = True
        refused = self.dtype in DTYPES[2:] if self.linear else "grad_in_forward" in options
        if "batch_invariant" in names and not refused:
            self.option("batch_invariant", 0.2, (True,))
        if not self.linear:
            return
        if self.dtype in HALF:
            self.option("accumulate_dtype", 0.3, (torch.float32,))
        if "logits_dtype" in names and self.dtype in HALF:
            self.option("logits_dtype", 0.3, (torch.float32,))
        self.option("chunk_rows", 0.5, (1, 3, 16, 100))
        by_chunks = self.ranks > 1 and self.places and "fn" in names  # with a shard it has one way
        if (
            self.maybe(0.2, "skip_ignored") and "batch_invariant" not in options and not by_chunks
        ):  # in the first no effect
            options["skip_ignored"] = True
        with_grad = options.get("reduction", "mean") != "none" and "skip_ignored" not in options
        with_grad = with_grad and "reduction" in names
        if "pipelined" in names and self.maybe(0.6):
            options["pipelined"] = pick((*([True] if with_grad else []), *([] if by_chunks else [False]), None))

    def _weights(self):
        kind = self.pick(("none", "none", "some", "some", "zeros", "small", "large"), "weight")
        if kind == "none":
            return
        self.weights = f"(torch.rand({self.classes}) + 0.5)"
        dtype = self.pick(("torch.float32", "torch.float64", self.dtype))
        mean = self.options.get("reduction", "mean") == "mean"
        if kind == "zeros" and (not mean or any(target % 2 for target in self.counted)):
            self.weights = f"({self.weights} * (torch.arange({self.classes}) % 2))"
        if kind in ("small", "large") and (mean and self.kind == "loss") and dtype != "torch.float16":
            self.weights = f"({self.weights} * {'2.0**-30' if kind == 'small' else '2.0**30'})"
        self.weights = f"{self.weights}.to({dtype})"

    def _shard(self):
        """Where each rank's classes lie, and how many columns of padding follow."""
        ends = sorted(self.random.randint(0, self.classes) for _ in range(self.ranks - 1))
        starts, stops = [0, *ends], [*ends, self.classes]
        places = [
            (start, stop, self.pick((0, 2)) if stop == self.classes and start < stop else 0)
            for start, stop in zip(starts, stops, strict=True)
        ]
        self.say("rank = torch.distributed.get_rank()")
        self.say(f"start, stop, padding = {places}[rank]")

    def values(self, shape, scale, layouts=LAYOUTS, dtype=None):
        """The text of a tensor of random numbers, and of a layout that its shape allows."""
        text = f"(torch.randn({shape}, dtype=torch.float64) * {scale}).to({dtype or self.dtype}).to({self.device!r})"
        if len(shape) == 0 or 0 in shape:
            return text, "{0}"
        allowed = [name for name in layouts if name not in ("stride 0", "transposed", "one row")]
        allowed += ["transposed", "one row"] if len(shape) > 1 else []
        if shape[-1] == 1:
            allowed = ["stride 0"]
        return text, LAYOUTS[self.pick(["dense", *allowed], "layout" if len(shape) > 1 else None)]

    def leaf(self, name, text, layout):
        self.say(f"{name} = {text}", f"{name} = {layout.format(name)}.detach().requires_grad_()")

    def _call(self):
        text, layout = self.values((*self.shape, self.classes), 3.0)
        self._of_tokens()
        if self.ranks > 1:
            self.say(
                f"logits = {text}", "part = torch.nn.functional.pad(logits[..., start:stop], (0, padding), value=7.0)"
            )
            layout = layout if layout != LAYOUTS["stride 0"] else "{0}"
            self.say(f"part = {layout.format('part')}.detach().requires_grad_()")
            if "expand" in layout:
                self.say("logits = logits[:1].expand(logits.shape)")
            self.more += [f"num_classes={self.classes}", "class_start=start"]
            if self.weights is not None:
                self.more.append("weight=torch.nn.functional.pad(weight[start:stop], (0, padding))")
            self.finish(f"{self.path}({', '.join(['part', 'target', *self.texts])})", ["part"], "logits=logits")
            return
        self.leaf("logits", text, layout)
        argument = "logits.clone()" if self.options.get("inplace_backward") else "logits"
        dim = self.pick(range(len(self.shape) + 1), "dim")
        default = 1 if "cross" in self.name.lower() else -1
        if not (dim == default or (dim == len(self.shape) and default == -1) or not self.shape):
            self.more.append(f"dim={dim}")
        if dim != len(self.shape):
            argument = f"{argument}.movedim(-1, {dim})"
        if self.weights is not None:
            self.more.append("weight=weight")
        if self.module:
            call = f"{self.compiled(self.path + '(' + ', '.join(self.texts) + ')')}({argument}, target)"
        else:
            call = f"{self.compiled(self.path)}({', '.join([argument, 'target', *self.texts])})"
        self.finish(call, ["logits"], "logits=logits")

    def _linear_call(self):
        features = self.pick((0, 1, 3, 8, 16, 33), "features")
        self.autocast = self.dtype == "torch.float32" and self.maybe(0.2) and "accumulate_dtype" not in self.options
        scale = f"{max(features, 1)}**-0.5"
        whole = (*self.shape, features)
        tensors = {"input": self.values(whole, 1.0), "head": self.values((self.classes, features), scale)}
        if self.maybe(name="bias"):
            tensors["bias"] = self.values((self.classes,), 1.0)
        for name, (text, layout) in tensors.items():
            if self.ranks > 1:
                self.say(f"{name} = {text}")
            else:
                self.leaf(name, text, layout)
        leaves = list(tensors)
        self._of_tokens()
        if self.ranks > 1:
            leaves = self._parts(tensors)
            self.more += [f"num_classes={self.classes}", "class_start=start"]
            self.more += [] if self.sequence is None else ["sequence_parallel=True"]
        if len(leaves) == 3 and not self.module:
            self.more.append(f"linear_bias={leaves[2]}")
        if self.weights is not None:
            weight = "weight" if self.ranks == 1 else "torch.nn.functional.pad(weight[start:stop], (0, padding))"
            self.more.append(f"{'class_weight' if self.module else 'weight'}={weight}")
        if self.module:
            self.more += ["tied_weight=torch.nn.Parameter(head.detach())", f"bias={len(leaves) == 3}"]
            self.say(f"module = {self.path}({', '.join(self.texts)})")
            self.say("leaves = [input, *module.parameters()]")
            if len(leaves) == 3:
                self.say("module.bias.data.copy_(bias)")
            divisor = ", divisor=3.0" if self.options.get("reduction") == "sum" and self.maybe() else ""
            if divisor:
                self.options["divisor"] = 3.0
            call = f"{self.compiled('module')}(input, target{divisor})"
            leaves = "leaves"
        else:
            call = f"{self.compiled(self.path)}({', '.join([leaves[0], leaves[1], 'target', *self.texts])})"
        parts = [f"{name}.bfloat16()" if self.autocast else name for name in tensors]
        self.finish(call, leaves, f"head=({', '.join([*parts, 'None'][:3])})")

    def _parts(self, tensors):
        """This rank's parts of the tensors, in their layouts, as leaves."""
        part = "input" if self.sequence is None else f"input.chunk({self.ranks}, {self.sequence})[rank]"
        texts = {
            "input": part,
            "head": "torch.nn.functional.pad(head[start:stop], (0, 0, 0, padding), value=7.0)",
            "bias": "torch.nn.functional.pad(bias[start:stop], (0, padding), value=7.0)",
        }
        for name, (_, layout) in tensors.items():
            layout = "{0}" if layout in (LAYOUTS["one row"], LAYOUTS["stride 0"]) else layout
            self.say(f"my_{name} = {texts[name]}")
            self.say(f"my_{name} = {layout.format(f'my_{name}')}.detach().clone(memory_format=torch.preserve_format)")
            self.say(f"my_{name}.requires_grad_()")
        return [f"my_{name}" for name in tensors]

    def finish(self, call, leaves, problem):
        if self.autocast:
            self.say(f"with torch.autocast({self.device!r}, torch.bfloat16):", f"    results = {call}")
        else:
            self.say(f"results = {call}")
        self.leaves, self.problem = leaves, problem

    def _results(self):
        names = OUTPUTS.get(self.kind, ("loss",))
        results = "results" if self.kind in OUTPUTS else "[results]"
        self.say(f"outputs = dict(zip({list(names)}, {results}, strict=True))")
        possible = [name for name in names if name in DIFFERENTIABLE]
        if self.kind == "outputs":  # what is a constant there
            ahead = self.options.get("grad_in_forward", False)
            of_rows = self.options.get("reduction") == "none" and "lse_square_scale" in self.options
            constants = {"entropy", *(["lse"] if ahead else []), *([] if of_rows and not ahead else ["z_loss"])}
            possible = [name for name in possible if name not in constants]
        chosen = [possible[0]] if self.maybe() else [name for name in possible if self.maybe()] or [possible[0]]
        chosen = self.pick([chosen], "differentiated")
        self.say("upstream = {}")
        limit = not self.options.get("grad_in_forward") and self.dtype != "torch.float16"
        # float16 has rounded the gradient, below 2^-14 to steps of 2^-24, before it is multiplied by this: one at most.
        least = self.options.get("grad_in_forward") and self.dtype == "torch.float16"
        for name in chosen:
            factor = self.pick((1.0, 1.0, -1.0, -0.25, 0.0, *((1e4, -1e-4) if limit else ())))
            of_rows = "rand" if least else "randn"
            value = self.pick(
                (f"torch.{of_rows}(outputs[{name!r}].shape, dtype=torch.float64) * {factor}",
                 f"torch.tensor({factor}, dtype=torch.float64).expand(outputs[{name!r}].shape)")
            )  # fmt: skip
            self.say(f"upstream[{name!r}] = ({value}).to(outputs[{name!r}])")
        leaves = self.leaves if isinstance(self.leaves, str) else f"[{', '.join(self.leaves)}]"
        self.say(f"given = [outputs[name] for name in upstream], {leaves}, list(upstream.values())")
        self.say("grads = torch.autograd.grad(*given, materialize_grads=True)")
        self.say(
            "for grad, leaf in zip(grads, given[1], strict=True):",
            "    assert grad.dtype == leaf.dtype and grad.shape == leaf.shape",
        )
        unknown = ("inplace_backward", "grad_in_forward", "pipelined", "check", "batch_invariant")
        more = [f"{name}={value!r}" for name, value in self.options.items() if name not in unknown]
        if self.kind == "outputs" and "skip_ignored" not in self.options:
            more.append("skip_ignored=True")  # an ignored row's lse is infinite in any case
        if self.weights is not None:
            more.insert(0, "weight=weight")
        if self.of_tokens:
            more.append("token_weight=token_weight")
        if self.function:
            more.append(f"function={{{', '.join(f'{name!r}: {name}' for name in self.function)}}}")
        if self.ranks > 1:
            more.append("shard=(start, stop)")
        if self.places:
            more.append("several=True")
        if self.sequence is not None:
            more.append(f"part=({self.sequence}, rank, {self.ranks})")
        self.say(f"expect(outputs, grads, upstream, target=target, {', '.join([self.problem, *more])})")
