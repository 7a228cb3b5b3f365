"""The C++ kernels against plain torch, on problems that hypothesis makes up.

test_values.py holds the tight budgets; here it is the corners that must agree: strides, dtypes, options, blocks and
vectors that are not full, values that are tied, huge or not finite, targets that are no class, any number of threads.
"""

import itertools
import math
import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import FLOATS, assert_same, check, lse_of, many, problems, rows_like

import xent_ops
from xent_ops.kernels import cpu, reductions, reference, reference_shard, reference_soft, reference_with_grad
from xent_ops.kernels.options import as_record

pytestmark = pytest.mark.skipif(cpu.problem() is not None, reason=f"plain torch serves the CPU here: {cpu.problem()}")

WANTED = list(itertools.product((False, True), repeat=2))


@pytest.mark.parametrize("with_argmax, with_entropy", WANTED)
@many
@given(problem=problems())
def test_statistics(with_argmax, with_entropy, problem):
    logits, target, weight, options, _ = problem
    arguments = logits, target, weight, with_argmax, with_entropy
    for skip_ignored in (False, True):
        check("cross_entropy_forward", (*arguments, False, skip_ignored), options, logits)


@pytest.mark.parametrize("with_entropy", [False, True])
@many
@given(data=st.data())
def test_gradients_of_rows(with_entropy, data):
    logits, target, weight, options, generator = data.draw(problems())
    dtype = data.draw(st.sampled_from(FLOATS))
    grads = [rows_like(target, dtype, generator, expanded=data.draw(st.booleans())) for _ in range(3)]
    if data.draw(st.booleans()):
        grads[1] = None
    _, lse, _, entropy, low = reference.statistics(logits, target, weight, False, True, **as_record(options))
    if data.draw(st.booleans()) and target.numel():
        target = target.clone()
        target.view(-1)[0] = 254 if target.dtype == torch.uint8 else -77  # no class: NaN in its row alone
    of_entropy = (grads[2], entropy) if with_entropy else (None, None)
    arguments = *grads[:2], logits, target, lse, weight, None, *of_entropy
    keywords = {**options, **({"lse_low": low} if data.draw(st.booleans()) else {})}
    grad = check("cross_entropy_backward", arguments, keywords, logits)
    over = logits.contiguous().clone()
    cpu.kernel("cross_entropy_backward_")(*arguments[:2], over, *arguments[3:], **keywords)
    torch.testing.assert_close(over, grad, rtol=0, atol=0, equal_nan=True)


@many
@given(data=st.data())
def test_reduced(data):
    """The reduced loss, what it is divided by, and the gradient from both; of no row and of none counted, too."""
    logits, target, weight, options, generator = data.draw(problems())
    if data.draw(st.integers(0, 9)) == 0 and target.dtype != torch.uint8:
        target = torch.full_like(target, options["ignore_index"])
    square = {"lse_square_scale": data.draw(st.sampled_from([0.0, 1e-4, 0.1]))}
    reduction = {"reduction": data.draw(st.sampled_from(["mean", "sum"]))}
    rows = logits, target, weight
    results = check("cross_entropy_reduced", rows, {**options, **square, **reduction}, logits, reductions)
    memory = [result.untyped_storage().data_ptr() for result in results if result.numel()]
    assert len(set(memory)) == len(memory)  # they do not alias
    _, divisor, lse, _ = results

    grad = torch.randn(target.shape if data.draw(st.booleans()) else (), generator=generator)
    grad = grad.to(data.draw(st.sampled_from(FLOATS)))
    if data.draw(st.booleans()):
        divisor = torch.randint(0, 5, (2,), generator=generator).to(data.draw(st.sampled_from([*FLOATS, torch.int64])))
    grad_lse = rows_like(target, lse.dtype, generator) if data.draw(st.booleans()) else None
    divisor = divisor if data.draw(st.booleans()) else None
    arguments = grad, grad_lse, logits, target, lse, weight, divisor
    got = check("cross_entropy_backward", arguments, {**options, **square}, logits)
    if grad_lse is None:
        assert not got[target.to(torch.int64) == options["ignore_index"]].any()
    over = logits.contiguous().clone()
    assert cpu.kernel("cross_entropy_backward_")(*arguments[:2], over, *arguments[3:], **options, **square) is None
    torch.testing.assert_close(over, got, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
def test_reduced_of_no_row(dtype):
    """A mean over nothing is NaN, a sum 0; rows that are ignored get zeros although the divisor is 0."""
    logits = torch.full((3, 5), float("nan"), dtype=dtype)
    reduced = cpu.kernel("cross_entropy_reduced")
    for rows in (0, 3):
        x, target, none = logits[:rows], torch.full((rows,), -100), torch.zeros(2, dtype=reference.accumulator(logits))
        for square in (0.0, 0.1):
            value, divided_by, lse, _ = reduced(x, target, lse_square_scale=square)
            assert value.isnan() and torch.equal(divided_by, none)
            assert reduced(x, target, lse_square_scale=square, reduction="sum")[0] == 0
            arguments = torch.ones((), dtype=dtype), None, x, target, lse, None, divided_by
            assert not cpu.kernel("cross_entropy_backward")(*arguments, lse_square_scale=square).any()
        assert cpu.kernel("row_divisors")(target)[1].isinf()
    with pytest.raises(IndexError, match="target 5 is out of bounds"):
        reduced(logits, torch.tensor([0, 5, 1]))


@many
@given(problem=problems())
def test_in_place(problem):
    logits, target, weight, options, generator = problem
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        logits = logits.clone()
    lse = lse_of(logits, target, weight, options)
    arguments = (rows_like(target, lse.dtype, generator), None, logits, target, lse, weight)
    expected = cpu.kernel("cross_entropy_backward")(*arguments, **options)
    version = logits._version
    assert torch.ops.xent.cross_entropy_backward_(*arguments, **options) is None
    torch.testing.assert_close(logits, expected, rtol=0, atol=0, equal_nan=True)  # the same bits
    assert logits._version > version


@many
@given(data=st.data())
def test_with_grad(data):
    """The bits of forward, then backward; in place too. Of an ignored row, which is not read, lse is infinite."""
    logits, target, weight, options, generator = data.draw(problems())
    if any(stride == 0 and size > 1 for size, stride in zip(logits.shape, logits.stride(), strict=True)):
        logits = logits.clone()
    statistics = data.draw(st.sampled_from([(False, False), (True, False), (False, True), (True, True)]))
    rows = cpu.kernel("cross_entropy_forward")(logits, target, weight, *statistics, **options)
    *rows, lse_low = rows
    lse = rows[1]
    scale = rows_like(target, lse.dtype, generator, expanded=data.draw(st.booleans()))
    square = rows_like(target, lse.dtype, generator) if data.draw(st.booleans()) else None
    grad_lse = square
    if square is not None:
        grad_lse = torch.where(target.to(torch.int64) == options["ignore_index"], 0.0, 2 * square * lse)
    row_args = (scale, grad_lse, logits, target, lse, weight)
    grad = cpu.kernel("cross_entropy_backward")(*row_args, lse_low=lse_low, **options)
    ignored = target.to(torch.int64) == options["ignore_index"]
    unread = zip(rows, (True, True, *statistics), (0.0, math.inf, -1, 0.0), strict=True)
    wanted = *(row.masked_fill(ignored, value) if made else row for row, made, value in unread), grad
    arguments = target, scale, square, weight, *statistics
    actual = cpu.kernel("cross_entropy_with_grad")(logits, *arguments, **options)
    over = logits.detach()
    in_place = cpu.kernel("cross_entropy_with_grad_")(over, *arguments, **options)
    for results in (actual, (*in_place, over)):
        torch.testing.assert_close(results, wanted, rtol=0, atol=0, equal_nan=True)

    factor = rows_like(target, lse.dtype, generator)
    expected = grad.clone()
    reference_with_grad.scale_grad_(expected, factor)
    cpu.kernel("scale_grad_")(grad, factor)
    torch.testing.assert_close(grad, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("ignore_index", [0, -100])
def test_an_infinite_weight_leaves_rows_that_pass_nothing_back(ignore_index, smoothing):
    x, target, weight = torch.randn(3, 8), torch.tensor([3, ignore_index, 5]), torch.ones(8)
    weight[[0, 5]] = float("inf")
    options = {"ignore_index": ignore_index, "label_smoothing": smoothing}
    loss, lse, *_ = cpu.kernel("cross_entropy_forward")(x, target, weight, **options)
    a = torch.tensor([1.0, 1.0, 0.0])
    grad = cpu.kernel("cross_entropy_backward")(a, None, x, target, lse, weight, **options)
    assert loss[1] == 0 and not grad[1:].any() and (smoothing or grad[0].isfinite().all())
    assert not cpu.kernel("cross_entropy_with_grad")(x, target, a, None, weight, **options)[-1][1:].any()
    part = cpu.kernel("cross_entropy_shard")(x, target, 0, 8, weight, **options)
    loss, lse, _, lse_coefficient, _ = cpu.kernel("cross_entropy_shard_join")(x, target, part, 0, 8, weight, **options)
    assert loss[1] == 0 and lse_coefficient[1] == 0
    for saved in (lse_coefficient, torch.full((3,), float("inf"))):
        of_slice = weight, None, None, None, saved, 0, 8
        grad = cpu.kernel("cross_entropy_backward")(a, None, x, target, lse, *of_slice, **options)
        assert not grad[1:].any()


def test_blocks_of_one_value_without_vector_instructions():
    """What is added up again and again loses most to rounding; the fewer the lanes, the more."""
    program = """if True:
        import torch, xent_ops
        from xent_ops import testing
        from xent_ops.kernels import cpu
        assert cpu.instruction_set() == "default"
        x = torch.linspace(-1.2, -0.01, 60).unsqueeze(-1).repeat(1, 4096)
        x[:, 0] = 0
        target = torch.zeros(60, dtype=torch.int64)
        for smoothing in (0.0, 1.0):
            expected = testing.oracle(x, target, label_smoothing=smoothing)
            rows = x, target, None, False, True
            loss, lse, _, entropy, _ = torch.ops.xent.cross_entropy_forward(*rows, label_smoothing=smoothing)
            testing.assert_lse(lse, expected)
            testing.assert_loss(loss, expected)
        exact = torch.distributions.Categorical(logits=x.double()).entropy()
        torch.testing.assert_close(entropy.double(), exact, rtol=1e-6, atol=0)
        weight = torch.full((4096,), 0.7)
        total = torch.ops.xent.cross_entropy_shard(x, target, 0, 4096, weight)[0, -1]
        torch.testing.assert_close(total.double(), weight.double().sum(), rtol=5e-6, atol=0)
    """
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["cross_entropy_backward_", "cross_entropy_with_grad_", "scale_grad_", "slice"])
def test_in_place_copies_once(name):
    """Where two strides do not describe the rows."""
    x = torch.randn(4, 6, 6, 9)[:, ::4, ::2]
    rows = torch.ones(x.shape[:-1])
    target = torch.zeros_like(rows).long()
    arguments = {
        "cross_entropy_backward_": (rows, None, x, target, rows),
        "cross_entropy_with_grad_": (x, target, rows),
        "scale_grad_": (x, rows * 2),
        "slice": (rows, None, x, target, rows, *(None,) * 5, 0, 9),
    }[name]
    function = cpu.kernel("cross_entropy_backward_" if name == "slice" else name)
    before = x.clone()
    with torch.profiler.profile() as profile:
        function(*arguments)
    assert sum(event.name == "aten::clone" for event in profile.events()) == 1
    assert not torch.equal(x, before)


def test_in_place_into_shared_memory():
    logits = torch.randn(1, 5).expand(3, 5)
    with pytest.raises(RuntimeError, match="share memory"):
        torch.ops.xent.cross_entropy_backward_(torch.ones(3), None, logits, torch.zeros(3).long(), torch.ones(3))
    none = torch.zeros(0)
    torch.ops.xent.cross_entropy_backward_(none, None, torch.zeros(5).as_strided((0, 5), (0, 0)), none.long(), none)


@pytest.mark.parametrize("name", ["logits", "target", "weight"])
def test_storage_that_was_freed(name):
    tensors = {"logits": torch.zeros(3, 5), "target": torch.zeros(3).long(), "weight": torch.ones(5)}
    tensors[name].untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="its storage has been freed"):
        torch.ops.xent.cross_entropy_forward(**tensors)
    if name == "logits":  # which are not read
        assert cpu.kernel("row_divisors")(tensors["target"], tensors["weight"])[0].tolist() == [3, 3]


@many
@given(data=st.data())
def test_class_probabilities(data):
    logits, index, weight, options, generator = data.draw(problems())
    options.pop("ignore_index")
    plain = reference_soft
    probabilities = torch.rand(logits.shape, generator=generator).softmax(-1).to(data.draw(st.sampled_from(FLOATS)))
    if data.draw(st.booleans()):
        probabilities = probabilities.t().contiguous().t() if probabilities.dim() == 2 else probabilities
    _, lse = check("soft_cross_entropy_forward", (logits, probabilities, weight), options, logits, plain)
    upstream = rows_like(index, lse.dtype, generator), rows_like(index, torch.float32, generator)
    check("soft_cross_entropy_backward", (*upstream, logits, probabilities, lse, weight), options, logits, plain)


@many
@given(data=st.data())
def test_shards(data):
    logits, target, weight, options, generator = data.draw(problems())
    columns = logits.shape[-1]
    start, behind = data.draw(st.sampled_from([(0, 0), (0, 7), (3, 0), (5, 90), (2, -1)]))
    classes = max(start + columns + behind, start + 1)
    target = target.to(torch.int64)
    target = torch.where(target == options["ignore_index"], target, target.clamp(0, columns - 1) + start)
    target = torch.where((target == options["ignore_index"]) | (target < classes), target, 0)
    place = start, classes
    record = as_record(options)
    x = reference.activation(logits, record["options"])
    if not x.isnan().any():  # the maximum of such a row may be any number: the sum beside it is NaN
        check("cross_entropy_shard", (logits, target, *place, weight), options, logits, reference_shard)
    part = reference_shard.cross_entropy_shard(logits, target, *place, weight, **record)
    join = logits, target, part, *place, weight
    check("cross_entropy_shard_join", join, options, logits, reference_shard)
    square = {"lse_square_scale": data.draw(st.sampled_from([0.0, 0.1]))}
    reduction = {"reduction": data.draw(st.sampled_from(["mean", "sum"]))}
    check("cross_entropy_shard_reduced", join, {**options, **square, **reduction}, logits, reference_shard)
    own_part = cpu.kernel("cross_entropy_shard")(logits, target, *place, weight, **options)
    joined = cpu.kernel("cross_entropy_shard_join")(logits, target, own_part, *place, weight, **options)
    plain = reference_shard.cross_entropy_shard_join(logits, target, part, *place, weight, **record)
    exact = reference_shard.cross_entropy_shard_join(logits.double(), target, part.double(), *place, weight, **record)
    assert_same(joined[:2], plain[:2], exact[:2], logits)
    lse = torch.logsumexp(x, -1)
    lse_coefficient = None if weight is None else rows_like(target, part.dtype, generator)
    grad = rows_like(target, part.dtype, generator) if data.draw(st.booleans()) else torch.tensor(0.5)
    divisor = torch.tensor([2, 3]) if data.draw(st.booleans()) else None
    entropy = (None, None)
    if data.draw(st.booleans()):
        entropy = rows_like(target, part.dtype, generator), torch.rand(target.shape, generator=generator).to(part.dtype)
    arguments = grad, None, logits, target, lse, weight, divisor, *entropy, lse_coefficient, *place
    options = {**options, **square}
    wanted = check("cross_entropy_backward", arguments, options, logits)
    grad = logits.clone()
    cpu.kernel("cross_entropy_backward_")(*arguments[:2], grad, *arguments[3:], **options)
    torch.testing.assert_close(grad, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("rows, classes", [(1, 70_001), (3, 20_000), (257, 1000)])
def test_the_same_bits_for_any_number_of_threads(dtype, rows, classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(rows, classes, generator=generator).mul(4).to(dtype)
    target = torch.randint(classes, (rows,), generator=generator)
    weight = torch.rand(classes, generator=generator)
    options = {"label_smoothing": 0.1, "softcap": 20.0}

    def everything():
        rows = logits, target, weight, True, True
        loss, lse, argmax, entropy, lse_low = cpu.kernel("cross_entropy_forward")(*rows, **options)
        row_args = (loss, lse, logits, target, lse, weight)
        grad = cpu.kernel("cross_entropy_backward")(*row_args, lse_low=lse_low, **options)
        soft = cpu.kernel("soft_cross_entropy_forward")(logits, logits.abs(), weight, **options)
        soft_grad = cpu.kernel("soft_cross_entropy_backward")(loss, None, logits, logits.abs(), lse, weight, **options)
        at_once = cpu.kernel("cross_entropy_with_grad")(logits, target, loss, lse, weight, True, True, **options)
        part = cpu.kernel("cross_entropy_shard")(logits, target, 0, classes, weight, **options)
        reduced = cpu.kernel("cross_entropy_reduced")(logits, target, weight, lse_square_scale=0.1, **options)
        pair, options_of_pair = (logits, logits.abs(), target), {"beta": 0.3, "temperature": 2.0}
        fields = {"fields": "kl,reverse_kl,mixture,overlap,log_prob"}
        values, statistics = cpu.kernel("divergences_forward")(*pair, **options_of_pair, **fields)
        both = cpu.kernel("divergences_backward")(values, *pair, statistics, **options_of_pair, **fields)
        options_of_pair |= {"fields": "mixture,log_prob", "hard_weight": 0.5}
        distilled = values, both, *cpu.kernel("divergences_with_grad")(*pair, loss, **options_of_pair)
        return loss, lse, entropy, argmax, grad, *soft, soft_grad, *at_once, part, *reduced, *distilled

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = everything()
        for number in (2, 3):
            torch.set_num_threads(number)
            for one, other in zip(alone, everything(), strict=True):
                assert torch.equal(one, other)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_is_subnormal_on_a_cpu(dtype):
    """Products crawl on such numbers, of which a sure model's gradient, divided by the rows, is full."""
    logits, target = (16 * torch.randn(64, 1000)).to(dtype), torch.arange(64)
    logits[:, 5] = 90.0 - torch.arange(64)  # probabilities around the smallest normal number
    tiny = torch.finfo(dtype).tiny
    plain = reference_with_grad.cross_entropy_with_grad(logits, target, torch.tensor(1 / 64))[-1]
    assert ((plain != 0) & (plain.abs() < tiny)).any()
    x = logits.clone().requires_grad_()
    grads = [torch.autograd.grad(xent_ops.cross_entropy(x, target), x)[0]]
    grads.append(torch.ops.xent.cross_entropy_with_grad(logits, target, torch.tensor(1 / 64))[-1])
    for grad in grads:
        assert not ((grad != 0) & (grad.abs() < tiny)).any()
        torch.testing.assert_close(grad, plain, rtol=2e-2 if dtype == torch.bfloat16 else 1e-5, atol=2 * tiny)
