"""Frequent slips, and how the error says what was meant: arguments in another order, a module for its weight, ..."""

import inspect
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import xent_ops
from xent_ops.kernels import cpu
from xent_ops.ops import checks

V, H = 9, 5
SWAPPED = "input and linear_weight seem to be swapped, the order is input, linear_weight, target"
LINEAR = {
    "loss": xent_ops.linear_cross_entropy,
    "outputs": xent_ops.linear_cross_entropy_outputs,
    "log_probs": xent_ops.linear_token_log_probs,
}


def problem():
    return torch.randn(6, H), torch.randn(V, H), torch.arange(6)


def compiled(function, **options):
    torch.compiler.reset()
    return torch.compile(function, backend="eager", fullgraph=True, **options)


# Arguments of the head and the loss as one


@pytest.mark.parametrize("call", LINEAR.values(), ids=LINEAR)
def test_tensors(call):
    """With a hint where arguments seem to be swapped."""
    x, w, t = problem()
    for arguments, error, text in (
        ((w, x, t), ValueError, rf"target has shape \(6,\); expected \(9,\), .*: {SWAPPED}"),
        ((w, x.view(2, 3, H), t.view(2, 3)), ValueError, rf"linear_weight has shape \(2, 3, 5\); .*: {SWAPPED}"),
        ((t, w, x), TypeError, "input has dtype torch.int64; .*: input and target seem to be swapped"),
        ((x, t, w), TypeError, "linear_weight has dtype torch.int64; .*: linear_weight and target seem to be swapped"),
        ((x, w.t(), t), ValueError, r"linear_weight has shape \(5, 9\); expected \(9, 5\), .*: .* pass linear_weight.t\(\)"),
        ((x, w.t(), t), ValueError, r".*LinearCrossEntropyLoss takes \(H, V\), here in_features=5, num_classes=9$"),
        ((x, nn.Linear(H, V), t), TypeError, "linear_weight must be .*, got torch.nn.*Linear; pass linear_weight.weight$"),
        ((x, "head", t), TypeError, "linear_weight must be a torch.Tensor, got str$"),
        ((x, w.double(), t), TypeError, "linear_weight has dtype torch.float64 but input torch.float32; both must be the same, as for nn.Linear"),
        ((x, w[0], t), ValueError, r"linear_weight has shape \(5,\); expected \(V, H\)"),
        ((x, w[:, :3], t), ValueError, r"linear_weight has shape \(9, 3\); expected \(9, 5\), one row of the input's features for each class$"),
        ((x, w[:0], t), ValueError, r"linear_weight of shape \(0, 5\) has 0 classes; expected at least 1"),
        ((x, w, t[:3]), ValueError, ".*each row of the input$"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{text}"):
            call(*arguments)


@pytest.mark.parametrize("dynamic", [False, True])
def test_swapped_while_compiling(dynamic):
    x, w, t = problem()
    with pytest.raises(Exception, match=SWAPPED):
        compiled(xent_ops.linear_cross_entropy, dynamic=dynamic)(w, x, t)


# Logits


@pytest.mark.parametrize("call", [xent_ops.cross_entropy, xent_ops.cross_entropy_outputs, xent_ops.token_log_probs])
def test_input_and_target(call):
    """The input is called what the user calls it."""
    x, t = torch.randn(2, 3, V), torch.ones(2, 3, dtype=torch.int64)
    hint = "input has dtype torch.int64; expected one of float32, .*: input and target seem to be swapped"
    with pytest.raises(TypeError, match=f"^{hint}$"):
        call(t, x, dim=-1)
    with pytest.raises(Exception, match=hint):
        compiled(lambda t, x: call(t, x, dim=-1))(t, x)
    with pytest.raises(TypeError, match=r"^input has dtype torch.int64; expected one of float32, .*float64$"):
        call(x.long(), t, dim=-1)


@pytest.mark.parametrize("dynamic", [False, True])
def test_classes_last_without_dim_while_compiling(dynamic):
    """As eager says it."""
    for shape in ((2, 2, 10), (3, 4, 10), (2, 3, 4, 10)):
        x, t = torch.randn(shape), torch.ones(shape[:-1], dtype=torch.int64)
        for call in (xent_ops.cross_entropy, xent_ops.cross_entropy_outputs):
            rows, logits = re.escape(str((shape[0], *shape[2:]))), re.escape(str(shape))
            with pytest.raises(ValueError, match=f"expected {rows}.*Logits {logits} with the classes last want dim=-1"):
                call(x, t)
            with pytest.raises(Exception, match="want dim=-1"):
                compiled(call, dynamic=dynamic)(x, t)
        torch.testing.assert_close(
            compiled(lambda x, t: xent_ops.cross_entropy(x, t, dim=-1), dynamic=dynamic)(x, t),
            F.cross_entropy(x.flatten(0, -2), t.flatten()),
        )
        y = x.movedim(-1, 1)
        torch.testing.assert_close(compiled(xent_ops.cross_entropy, dynamic=dynamic)(y, t), F.cross_entropy(y, t))


# Options that are a mistake


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_constants_that_make_no_loss(way):
    x, w, t = problem()
    logits = F.linear(x, w)
    for call, text in (
        (lambda: xent_ops.cross_entropy(logits, t, lse_square_scale=-1), "lse_square_scale must be at least 0, got -1"),
        (lambda: xent_ops.cross_entropy(logits, t, logit_scale=0), "logit_scale must not be 0, .*, got 0.0"),
        (lambda: xent_ops.token_log_probs(logits, t, logit_scale=-0.0), "logit_scale must not be 0, .*, got -0.0"),
        (lambda: xent_ops.cross_entropy(logits, t, logit_scale=1e-50), "logit_scale must not be 0, .*, got 1e-50"),
        (
            lambda: xent_ops.linear_cross_entropy(x, w, t, logit_scale=-1e-39),
            r"logit_scale .*, got -1e-39 \(the least is",
        ),
        (lambda: xent_ops.linear_cross_entropy(x, w, t, logit_scale=0.0), "logit_scale must not be 0"),
        (lambda: xent_ops.linear_cross_entropy(x, w, t, lse_square_scale=-0.5), "lse_square_scale must be at least 0"),
        (
            lambda: xent_ops.linear_cross_entropy(x, w, t, reduction="sum", divisor=0),
            "divisor must be a finite number above 0",
        ),
    ):
        with pytest.raises(Exception if way == "compiled" else ValueError, match=text):
            (compiled(call) if way == "compiled" else call)()


def test_what_stays_valid():
    """Distances as logits; a divisor that is a tensor is not read."""
    x, w, t = problem()
    distances = torch.cdist(x, w)
    torch.testing.assert_close(xent_ops.cross_entropy(distances, t, logit_scale=-1.0), F.cross_entropy(-distances, t))
    assert xent_ops.linear_cross_entropy(x, w, t, reduction="sum", divisor=torch.tensor(0.0)).isinf()
    ignored = torch.full_like(t, -100)
    assert xent_ops.linear_cross_entropy(x, w, ignored, reduction="sum", divisor=torch.tensor(0.0)).isnan()


def helper():
    pass


@pytest.mark.parametrize("call", LINEAR.values(), ids=LINEAR)
def test_options(call):
    """Functions are named: not <function helper at 0x7f...>."""
    x, w, t = problem()
    taken = inspect.signature(call).parameters
    for options, error, text in (
        ({"ignore_index": helper}, TypeError, "ignore_index must be an integer, got helper$"),
        ({"softcap": helper}, TypeError, "softcap must be a number, got helper$"),
        ({"softcap": True}, TypeError, "softcap must be a number, got True$"),
        ({"logit_scale": True}, TypeError, "logit_scale must be a number, got True$"),
        ({"lse_square_scale": False}, TypeError, "lse_square_scale must be a number, got False$"),
        ({"divisor": True, "reduction": "sum"}, TypeError, "divisor must be a number, got True$"),
        ({"reduction": helper}, ValueError, "helper is not a valid value for reduction; valid are 'none'"),
        ({"accumulate_dtype": helper}, TypeError, "accumulate_dtype must be a torch.dtype or None, got helper$"),
        ({"skip_ignored": nn.ReLU()}, TypeError, "skip_ignored must be True or False, got torch.nn.modules.activation.ReLU$"),
        ({"softcap": [helper]}, TypeError, "softcap must be a number, got list$"),
        ({"softcap": "3"}, TypeError, "softcap must be a number, got '3'$"),
        ({"logit_scale": torch.ones((), requires_grad=True)}, RuntimeError, "logit_scale .* requires grad"),
        ({"chunk_rows": 2.5}, TypeError, "chunk_rows must be an integer, got 2.5$"),
        ({"chunk_rows": True}, TypeError, "chunk_rows must be an integer, got True$"),
        ({"chunk_rows": 2**63}, ValueError, "chunk_rows must fit into 64 bits"),
        ({"skip_ignored": 1}, TypeError, "skip_ignored must be True or False, got 1$"),
        ({"linear_bias": [1.0] * 9}, TypeError, "linear_bias must be a torch.Tensor, got list; torch.as_tensor"),
    ):  # fmt: skip
        if options.keys() <= taken.keys():
            with pytest.raises(error, match=f"^{text}"):
                call(x, w, t, **options)
    call(x, w, t, chunk_rows=np.int64(3))


# Arguments that a function lacks


def test_shards():
    x, w, t = problem()
    with pytest.raises(TypeError, match=r"shard must be .*\.Shard\(num_classes, .* got torch.*placement_types.Shard$"):
        xent_ops.linear_cross_entropy(x, w, t, shard=torch.distributed.tensor.Shard(0))
    for name in ("linear_cross_entropy", "linear_top_k"):
        with pytest.raises(ImportError, match=rf"write xent_ops\.{name}\(\.\.\., shard=xent_ops"):
            exec(f"from xent_ops.distributed import vocab_parallel_{name}")
    with pytest.raises(AttributeError, match="has no attribute 'linear_cross_entropy'"):
        xent_ops.distributed.linear_cross_entropy  # noqa: B018 (raises)


def test_arguments_by_position():
    """Bias, weight and options go by name."""
    x, w, t = problem()
    for call, text in (
        (lambda: xent_ops.linear_cross_entropy(x, w, t, w[:, 0]), r"linear_cross_entropy\(\) takes 3 .*, got 4; by name: linear_bias, "),
        (lambda: xent_ops.linear_token_loss(x, w, t, helper, (t,)), r"\(input, linear_weight, target, fn\), got 5; by name: rows, "),
        (lambda: xent_ops.cross_entropy(x, t, None, -100), r"takes 3 arguments .*\(input, target, weight\), got 4; by name: ignore"),
        (lambda: xent_ops.CrossEntropyLoss(None, -100), r"CrossEntropyLoss.__init__\(\) takes 1 .*\(weight\), got 2; by name: ignore"),
        (lambda: compiled(xent_ops.linear_cross_entropy)(x, w, t, w[:, 0]), "takes 3 arguments by position"),
    ):  # fmt: skip
        with pytest.raises(Exception, match=text):
            call()


# Functions of tokens


def test_functions_with_other_parameters():
    x, w, t = problem()
    row = torch.ones(6)
    for fn, rows, text in (
        (lambda stats, old, advantage: stats.lse, (row,), r"\(stats, old, advantage\), but gets .* with 1 rows"),
        (lambda stats: stats.lse, (row,), r"\(stats\), but gets \(stats, \*rows\) with 1 rows: .*too many positional"),
        (lambda: row, (), r"fn has the parameters \(\), but gets \(stats, \*rows\) with 0 rows"),
    ):
        with pytest.raises(TypeError, match=text):
            xent_ops.linear_token_loss(x, w, t, fn, rows=rows)
    with pytest.raises(TypeError, match=r"^unsupported operand"):  # an error of its own
        xent_ops.linear_token_loss(x, w, t, lambda stats: stats.lse + "1")


def test_rows_of_another_layout():
    x, w, t = problem()
    with pytest.raises(TypeError, match=r"^rows\[0\] has layout torch.sparse_coo; .* pass rows\[0\].to_dense\(\)$"):
        xent_ops.linear_token_loss(x, w, t, lambda stats, row: stats.lse * row, rows=(torch.ones(6).to_sparse(),))


# Class probabilities


def number_in(caught):
    """The least probability. C++ says six digits of it."""
    return float(re.search(r"has (\S+) in a row", str(caught.value)).group(1))


@pytest.mark.parametrize("kernel", ["C++", "plain torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weighted", [False, True])
def test_log_probabilities(monkeypatch, kernel, dtype, smoothing, weighted):
    if kernel == "plain torch":
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
    elif cpu.problem() is not None:
        pytest.skip("built without C++")
    x, weight = torch.randn(4, 5000), torch.rand(5000) if weighted else None
    probabilities = torch.randn(4, 5000).softmax(-1).to(dtype)

    def call(target):
        return xent_ops.cross_entropy(x, target, weight, label_smoothing=smoothing, reduction="none")

    for made, least in ((probabilities.log(), float(probabilities.float().log().to(dtype).min())), (-x.abs(), None)):
        with pytest.raises(
            (ValueError, RuntimeError), match=r"^target of class probabilities has -.* pass target.exp\(\)"
        ) as caught:
            call(made)
        if least is not None and dtype != torch.float64:
            assert number_in(caught) == pytest.approx(least, rel=1e-5)
    zeros = torch.cat([probabilities[:2], torch.zeros_like(probabilities[:2])])  # rows of padding
    assert call(probabilities).isfinite().all() and call(zeros).isfinite().all()
    tiny = probabilities.clone()
    tiny[:, 0] = -1e-4  # what rounding leaves of a difference
    assert call(tiny).isfinite().all()


def test_both_kernels_name_the_same_number():
    if cpu.problem() is not None:
        pytest.skip("built without C++")
    x = torch.randn(3, 7)
    for target in (
        x.log_softmax(-1),
        x.log_softmax(-1).half(),
        x.double().log_softmax(-1),
        torch.full((3, 7), -torch.inf),
    ):
        with pytest.raises((ValueError, RuntimeError)) as by_cpp:
            torch.ops.xent.soft_cross_entropy_forward(x, target)
        with pytest.raises(ValueError) as by_torch:
            checks.refuse_log_probabilities("target of class probabilities", target)
        assert number_in(by_cpp) == pytest.approx(number_in(by_torch), rel=1e-5)


# check_targets


def test_check_targets():
    t = torch.arange(4)
    for arguments, error, text in (
        (([0, 1], 4), TypeError, r"target must be a torch.Tensor, got list; torch.as_tensor\(target\) makes one$"),
        ((None, 4), TypeError, "target must be a torch.Tensor, got None$"),
        (("labels", 4), TypeError, "target must be a torch.Tensor, got str$"),
        ((t, 0), ValueError, "num_classes must be at least 1, got 0$"),
        ((t, "4"), TypeError, "num_classes must be an integer, got '4'$"),
        ((t, 4, 1.5), TypeError, "ignore_index must be an integer, got 1.5$"),
        ((t.float(), 4), TypeError, "target has dtype torch.float32; expected one of int64, int32, uint8$"),
        ((t, 3), IndexError, "target 3 is out of bounds: valid are 0 to 2 and ignore_index=-100"),
        ((t, 3), IndexError, r".*; a part of a sharded head, as weight.to_local\(\), has a part of the classes$"),
        ((torch.tensor([0, -1]), 3), IndexError, ".*; to ignore targets of -1, pass ignore_index=-1$"),
    ):
        with pytest.raises(error, match=f"^{text}"):
            xent_ops.check_targets(*arguments)
    xent_ops.check_targets(t, torch.tensor(4), ignore_index=torch.tensor(-1))


@pytest.mark.parametrize("kernel", ["C++", "plain torch"])
def test_marks_of_ignored_targets(monkeypatch, kernel):
    """One value beyond the classes at several places, or uint8's last one, marks what shall be ignored."""
    if kernel == "plain torch":
        monkeypatch.setattr(cpu, "kernel", lambda name: None)
    elif cpu.problem() is not None:
        pytest.skip("built without C++")
    x = torch.randn(4, V)
    for values, dtype, mark in (
        ([0, 255, 255, 1], torch.uint8, 255),
        ([0, 255, 2, 1], torch.uint8, 255),
        ([V, 0, V, 1], torch.int64, V),
        ([0, 10, 11, 1], torch.int64, None),
        ([0, 10, 2, 1], torch.int32, None),
    ):
        text = "a part of a sharded head" if mark is None else f"ignore targets of {mark}, pass ignore_index={mark}$"
        with pytest.raises(IndexError, match=text):
            xent_ops.cross_entropy(x, torch.tensor(values, dtype=dtype))


# Modules


def test_linear_cross_entropy_loss():
    module, head = xent_ops.LinearCrossEntropyLoss, nn.Linear(H, V)
    taken = r"; LinearCrossEntropyLoss\(tied_weight=...\) takes the weight of a head that is there already$"
    for arguments, options, error, text in (
        ((), {}, TypeError, ".* needs in_features and num_classes, or a tied_weight"),
        ((H,), {}, TypeError, ".* needs in_features and num_classes"),
        ((-1,), {}, ValueError, "in_features must be at least 1, got -1$"),
        (("8",), {}, TypeError, "in_features must be an integer, got '8'$"),
        ((H, 0), {}, ValueError, "num_classes must be at least 1, got 0$"),
        ((H, V), {"bias": "x"}, TypeError, "bias must be True or False, got 'x'$"),
        ((H, V), {"reduction": "avg"}, ValueError, "'avg' is not a valid value for reduction"),
        ((H, V), {"accumulate_dtype": "float32"}, TypeError, "accumulate_dtype must be a torch.dtype or None"),
        ((H, V), {"chunk_rows": 2.5}, TypeError, "chunk_rows must be an integer, got 2.5$"),
        ((H, V), {"chunk_rows": 0}, ValueError, "chunk_rows must be at least 1, or None for the default, got 0$"),
        ((head,), {}, TypeError, f"in_features must be an integer, got torch.nn.modules.linear.Linear{taken}"),
        ((head.weight,), {}, TypeError, f"in_features must be an integer, got torch.nn.parameter.Parameter{taken}"),
        ((), {"tied_weight": head}, TypeError, "tied_weight must be a .* got torch.nn.*Linear; pass tied_weight.weight$"),
        ((), {"tied_weight": head.bias}, TypeError, r"tied_weight must be .* \(V, H\), got one of shape \(9,\)$"),
        ((), {"tied_weight": head.weight, "num_classes": 8}, ValueError, r"tied_weight has shape \(9, 5\); expected"),
        ((), {"tied_weight": head.weight.detach()}, TypeError, r"tied_weight must be .* \(V, H\), got torch.Tensor$"),
    ):  # fmt: skip
        with pytest.raises(error, match=f"^{text}"):
            module(*arguments, **options)
    for option in ("inplace_backward", "grad_in_forward"):
        with pytest.raises(TypeError, match=f"^{option} must be True or False, got 'yes'$"):
            xent_ops.CrossEntropyLoss(**{option: "yes"})
