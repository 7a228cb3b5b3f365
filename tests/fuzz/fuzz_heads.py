"""What draws of distillation, of a teacher's top k and of a model's top k share: logits or heads, alone or over ranks."""

import torch
from fuzz_program import DTYPES, HALF, Program
from helpers.option_values import drawn

# Of keywords that change no number that a judge wants.
UNJUDGED = {"linear_bias", "teacher_bias", "class_start", "sequence_parallel", "pipelined"}
UNJUDGED |= {"chunk_rows", "skip_ignored", "batch_invariant", "check", "logits_dtype", "accumulate_dtype", "fn", "rows"}
UNJUDGED |= {"fields"}


def refused_with_shard(name):
    no_loss = {"accumulate_dtype"} if name == "linear_top_k" else set()
    return no_loss | ({"skip_ignored"} if "top_k" in name or "distillation" in name or "divergences" in name else set())


class Heads(Program):
    """``student``, ``teacher``: the names of the logits, or of a head's input, weight and bias."""

    def __init__(self, *args, judge, classes=(1, 2, 17, 64, 130, 1003)):
        super().__init__(*args)
        self.dtype, self.classes = self.pick(DTYPES, "dtype"), self.pick(classes, "classes")
        self.teacher, self.sequence = [], None
        self.draft_of = None  # the number of the teacher's classes, of which the student has ``classes``
        self.shape = self.pick([(), (0,), (1,), (7,), (33,), (2, 3), (2, 0), (2, 3, 2)], "shape")
        self.ignored = self.pick((-100, -1, self.classes + 9))
        self.begin(judge)

    def split_rows(self):
        """Of one dimension each rank may have its part of the inputs."""
        if self.ranks > 1 and self.maybe(0.3):
            self.sequence, self.options["sequence_parallel"] = self.pick((0, 1)), True
            self.shape = (2 * self.ranks, 3) if self.sequence == 0 else (3, 2 * self.ranks)

    def numbers(self, schema, **others):
        for name, (_, *choices) in (drawn(schema) | others).items():
            if name in self.parameters:
                self.option(name, 0.4, choices)

    def padded(self):
        """How many columns the student's logits have, and the teacher's."""
        padding = self.ranks == 1 and self.maybe(0.3, "padding")
        padding = self.pick(((3, 1), (5, 0), (0, 8), (5, 8))) if padding else (0, 0)
        if any(padding) or (self.ranks == 1 and self.maybe(0.1)):
            self.options["num_classes"] = self.classes
        return [self.classes + number for number in padding]

    def reduced(self, *kinds):
        self.option("reduction", 0.8, kinds)
        if self.options.get("reduction") == "sum":
            self.option("divisor", 0.5, (3.0, 0.5))
        if "token_weight" in self.parameters and self.maybe(0.3, "token_weight"):
            self.say(f"token_weight = torch.rand({self.shape}).to({self.device!r}) + 0.25")
            self.more.append("token_weight=token_weight")

    def chunked(self):
        """How, which changes no number. In a compiled graph "check" is refused."""
        refused = {"check"} if self.backend is not None else set()
        refused |= set() if self.dtype in HALF else {"logits_dtype", "accumulate_dtype"}
        refused |= refused_with_shard(self.name) if self.ranks > 1 else set()
        for name, share, choices in (
            ("pipelined", 0.2, (None,)),
            ("chunk_rows", 0.5, (1, 3, 16)),
            ("skip_ignored", 0.2, (True,)),
            ("batch_invariant", 0.2, (True,)),
            ("check", 0.3, (True,)),
            ("logits_dtype", 0.3, (torch.float32,)),  # autocast may give the input another dtype of 16 bits
            ("accumulate_dtype", 0.3, (torch.float32,)),
        ):
            if name in self.parameters and name not in refused:
                self.option(name, share, choices)

    def indices(self, name, share=lambda: 0.3, places=()):
        """Classes of each row; ``share``: of a row's places that are ignored."""
        shares = [share() for _ in range(torch.Size(self.shape).numel())]
        each = [one for one in shares for _ in range(torch.Size(places).numel())]
        values = [self.ignored if self.maybe(one) else self.random.randrange(self.classes) for one in each]
        dtype = self.pick(("torch.int64", "torch.int32"))
        self.say(f"{name} = torch.tensor({values}, dtype={dtype}).view({(*self.shape, *places)}).to({self.device!r})")
        if self.ignored != -100:
            self.options["ignore_index"] = self.ignored

    def target(self):
        self.indices("target")
        self.more.append("target=target")

    def logits(self, name, dtype, classes, features=(1, 3, 8, 33)):
        """Names of the tensors that make them; columns after ``self.classes`` are padding."""

        def tensor(name, *sizes, scale=1.0):
            self.say(f"{name} = (torch.randn({sizes}).double() * {scale}).to({dtype}).to({self.device!r})")
            return name

        if not self.linear:
            return [tensor(name, *self.shape, classes, scale=3.0)]
        features, side = self.pick(features, "features"), "teacher_" if name == "teacher" else ""
        names = [tensor(name, *self.shape, features), tensor(f"{side}head", classes, features, scale=features**-0.5)]
        if self.maybe(name="bias"):
            names.append(tensor(f"{side}bias", classes))
            self.more.append(f"{side or 'linear_'}bias={'my_' if self.ranks > 1 else ''}{side}bias")
        return names

    def call(self, *operands, result="loss"):
        """The lines of the call; its ``operands`` stand behind the tensors."""
        self.leaves, teacher, self.whole = self.student, self.teacher, [self.student]
        self.whole += [teacher] if teacher else []
        self.judged = [text for text in self.by_name if text.split("=")[0] not in UNJUDGED]
        if self.ranks > 1:
            self._shards()
            self.leaves, teacher = ([f"my_{name}" for name in names] for names in (self.student, teacher))
            self.more = ["classes=my_classes" if text == "classes=classes" else text for text in self.more]
            self.more += [f"num_classes={self.classes}", "class_start=start"]
            self.judged += ["shard=(start, stop)"]
            self.judged += [] if self.sequence is None else [f"part=({self.sequence}, rank, {self.ranks})"]
        self.say(*[f"{name}.requires_grad_()" for name in self.leaves])
        given = [*self.leaves[:2], *teacher[:2], *operands, *self.texts]
        self.say(f"{result} = {self.compiled(self.path)}({', '.join(given)})")

    def _shards(self):
        """This rank's parts of the tensors; each head has padding of its own."""
        width = self.draft_of or self.classes
        ends = sorted(self.random.randint(0, width) for _ in range(self.ranks - 1))
        places = list(zip([0, *ends], [*ends, width], strict=True))
        self.say("rank = torch.distributed.get_rank()", f"start, stop = teacher_start, teacher_stop = {places}[rank]")
        if self.draft_of is not None:
            self.say("start, stop = [int((classes < end).sum()) for end in (teacher_start, teacher_stop)]")
            self.say("my_classes = classes[start:stop] - teacher_start")
        for side in ("", "teacher_") if self.teacher else ("",):
            padding = self.pick((0, 1, 2)) if self.draft_of is None else 0
            self.say(f"{side}padding = {padding} if start < stop == {self.classes} else 0")
        for name in (*self.student, *self.teacher):
            side = "teacher_" if name.startswith("teacher") else ""
            text = name if self.sequence is None else f"{name}.chunk({self.ranks}, {self.sequence})[rank]"
            if name not in ("student", "teacher"):
                zeros = "0, 0, 0, " if name.endswith("head") else "0, "
                text = f"torch.nn.functional.pad({name}[{side}start:{side}stop], ({zeros}{side}padding), value=7.0)"
            self.say(f"my_{name} = {text}.clone()")

    def expect(self, *more, result="loss", differentiated="loss"):
        """The lines of the gradients, if there are any, and of the judge, with ``more`` that it is given."""
        self.say("upstream = grads = None" if differentiated is None else f"differentiated = [{differentiated}]")
        if differentiated is not None:
            self.say("upstream = [torch.randn(value.shape).to(value) for value in differentiated]")
            self.say(f"grads = torch.autograd.grad(differentiated, [{', '.join(self.leaves)}], upstream)")
        whole = [f"[{', '.join(names)}]" for names in self.whole]
        self.say(f"expect({', '.join([result, 'grads', 'upstream', *whole, *more, *self.judged])})")
        return self.drawn()
