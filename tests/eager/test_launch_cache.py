"""The cache of launches behind the operators: which calls take a cached launch, and what is refused all the same.

On a GPU, and on CPU tensors in Triton's interpreter.
"""

import threading
from collections import Counter

import pytest
import torch
from helpers.interpreter import INTERPRETED
from helpers.overwriting import assert_refused, assert_written_in_inference_mode

from xent_ops.kernels import devices
from xent_ops.ops import library
from xent_ops.ops.launch_cache import SignatureCache
from xent_ops.testing import assert_loss, oracle

pytestmark = pytest.mark.interpreter
ops = torch.ops.xent


@pytest.fixture(params=["cpu" if INTERPRETED else "cuda"])  # a CPU without the interpreter has no launches
def device(request):
    return request.param


@pytest.fixture
def count(monkeypatch):
    """``count(name)`` gives that operator an empty cache and returns how often it checks and chooses kernels."""

    def watch(name):
        operator, launchers, calls = library.OPERATORS[name], devices.triton_launchers(), Counter()

        def counted(kind, function):
            def call(*args, **keywords):
                calls[kind] += 1
                return function(*args, **keywords)

            return call

        monkeypatch.setattr(operator, "launches", SignatureCache())
        monkeypatch.setattr(operator, "check", counted("check", operator.check))
        monkeypatch.setitem(launchers, name, counted("first stage", launchers[name]))
        return calls

    return watch


def once(number):
    return {"check": number, "first stage": number}


def test_a_second_call_takes_the_cached_launch(device, count):
    calls = count("cross_entropy_forward")
    for seed in range(3):  # other numbers in other memory
        logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(seed))
        target = torch.tensor([seed, 49, -100, 7])
        loss = ops.cross_entropy_forward(logits.to(device), target.to(device), label_smoothing=0.125)[0]
        assert_loss(loss, oracle(logits, target, label_smoothing=0.125))
        assert calls == once(1)


OTHER_CALLS = {
    "rows": lambda x, t: ((x[:3], t[:3]), {}),
    "classes": lambda x, t: ((x[:, :40], t), {}),
    "stride": lambda x, t: ((torch.cat([x, x], 1)[:, :50], t), {}),
    "dtype": lambda x, t: ((x.bfloat16(), t), {}),
    "dtype of the target": lambda x, t: ((x, t.int()), {}),
    "weight": lambda x, t: ((x, t, torch.ones_like(x[0])), {}),
    "option": lambda x, t: ((x, t), {"label_smoothing": 0.125}),
    "value of an option": lambda x, t: ((x, t), {"ignore_index": 1}),
}


@pytest.mark.parametrize("case", OTHER_CALLS)
def test_another_signature_does_not(device, count, case):
    calls = count("cross_entropy_forward")
    logits, target = torch.randn(4, 50, device=device), torch.tensor([1, 2, 3, 30], device=device)
    ops.cross_entropy_forward(logits, target)
    args, options = OTHER_CALLS[case](logits, target)
    for _ in range(2):
        loss = ops.cross_entropy_forward(*args, **options)[0]
        assert calls == once(2)
        assert_loss(loss, oracle(*args, **options))


def test_two_options_of_one_value_are_two_signatures(device, count):
    calls = count("cross_entropy_forward")
    logits, target = torch.randn(2, 50, device=device), torch.tensor([1, 2], device=device)
    for option in ({"softcap": 0.5}, {"logit_scale": 0.5}, {"label_smoothing": 0.5}):
        assert_loss(ops.cross_entropy_forward(logits, target, **option)[0], oracle(logits, target, **option))
    assert calls == once(3)


def test_a_full_cache_drops_its_oldest_entry(device, count, monkeypatch):
    calls = count("cross_entropy_forward")
    monkeypatch.setattr(SignatureCache, "SIZE", 2)
    for rows, made in [(1, 1), (2, 2), (1, 2), (3, 3), (2, 3), (1, 4)]:
        ops.cross_entropy_forward(torch.randn(rows, 9, device=device), torch.zeros(rows, device=device).long())
        assert calls == once(made), rows
        assert len(library.OPERATORS["cross_entropy_forward"].launches) <= 2


def test_the_cache_is_bounded():
    cache = SignatureCache()
    for number in range(SignatureCache.SIZE + 3):
        cache.put((number,), number)
    assert len(cache) == SignatureCache.SIZE
    assert [cache.get((number,)) for number in (0, 2, 3, SignatureCache.SIZE + 2)] == [
        None,
        None,
        3,
        SignatureCache.SIZE + 2,
    ]


def test_a_refused_call_is_not_kept(device, count):
    calls = count("cross_entropy_backward_")
    rows, target = torch.ones(2, device=device), torch.tensor([1, 2], device=device)
    bad = [
        (torch.randn(2, 9, device=device), rows[:1], "grad_loss has shape"),
        (torch.randn(1, 9, device=device).expand(2, 9), rows, "share memory"),
    ]
    for number, (logits, grad_loss, text) in enumerate(bad):
        for attempt in (1, 2):
            with pytest.raises((RuntimeError, ValueError), match=text):
                ops.cross_entropy_backward_(grad_loss, None, logits, target, rows)
            assert calls == {"check": 2 * number + attempt}
    assert len(library.OPERATORS["cross_entropy_backward_"].launches) == 0


IN_PLACE = {
    "cross_entropy_backward_": lambda x, t, row: (row, None, x, t, row),
    "cross_entropy_with_grad_": lambda x, t, row: (x, t, row),
    "slice": lambda x, t, row: (row, None, x, t, row, *(None,) * 5, 0, 9),
    "scale_grad_": lambda x, t, row: (x, 2 * row),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_must_not_be_overwritten_is_refused_in_spite_of_a_cached_launch(device, count, name):
    """Neither requires_grad nor inference mode is part of a signature."""
    of = "cross_entropy_backward_" if name == "slice" else name
    calls, operator = count(of), getattr(ops, of)
    argument = library.OPERATORS[of].overwrites

    def call(x):
        operator(*IN_PLACE[name](x, torch.tensor([1, 2, 3, 4], device=device), torch.ones(4, device=device)))

    call(torch.randn(4, 9, device=device))
    leaf = torch.randn(4, 9, device=device, requires_grad=True)
    with torch.inference_mode():
        inference = torch.randn(4, 9, device=device)
    for x, text in ((leaf, "must not require grad"), (inference, "was made in inference mode")):
        assert_refused(call, x, f"^{argument} {text}")
    assert_written_in_inference_mode(call, inference)
    assert calls == once(1)


def test_threads_share_a_cache():
    """Reads and writes at once, with more signatures than the cache holds: no error, no foreign entry."""
    cache, failures = SignatureCache(), []
    start = threading.Barrier(4)

    def work(seed):
        start.wait()
        try:
            for step in range(3 * SignatureCache.SIZE):
                signature = ((seed + step) % (2 * SignatureCache.SIZE),)
                assert cache.get(signature) in (None, signature)
                cache.put(signature, signature)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(97 * seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and len(cache) <= SignatureCache.SIZE


@pytest.mark.parametrize("shape", [(0, 37), (3, 37)], ids=["no row", "rows"])
def test_an_operator_and_its_twin_return_what_their_schemas_say(device, shape):
    logits = torch.randn(shape, device=device)
    target = torch.zeros(shape[:1], dtype=torch.int64, device=device)
    lse = logits.logsumexp(-1)
    gradient = ops.cross_entropy_backward(lse, None, logits, target, lse)
    over = logits.clone()
    assert ops.cross_entropy_backward_(lse, None, over, target, lse) is None
    assert torch.equal(over, gradient)
    *_, gradient = ops.cross_entropy_with_grad(logits, target, lse)
    over = logits.clone()
    assert len(ops.cross_entropy_with_grad_(over, target, lse)) == 4
    assert torch.equal(over, gradient)


@pytest.mark.parametrize("kind", ["rows", "head"])
def test_a_call_is_checked_once_for_its_signature(monkeypatch, kind):
    """Without launches too: a head's operators, and all operators of a CPU."""
    name = "cross_entropy_forward" if kind == "rows" else "linear_cross_entropy_with_grad"
    operator, checked = library.OPERATORS[name], []
    monkeypatch.setattr(operator, "launches", SignatureCache())
    monkeypatch.setattr(operator, "checked", SignatureCache())
    monkeypatch.setattr(operator, "check", lambda *call: checked.append(type(operator).check(operator, *call)))
    x, weight, target = torch.randn(4, 8), torch.randn(9, 8), torch.tensor([0, 1, -100, 8])
    head_args = (None, None, None, None, [True, False, False])
    call = {"rows": lambda x: ops.cross_entropy_forward(x, target % 8)}
    call["head"] = lambda x: ops.linear_cross_entropy_with_grad(x, weight, target, *head_args)
    for _ in range(3):
        call[kind](x)
        call[kind](x.clone())
    assert len(checked) == 1
    call[kind](x.t().contiguous().t())
    assert len(checked) == 2
    for _ in range(2):  # a refused call is refused again
        with pytest.raises(ValueError, match="expected"):
            call[kind](x[:3])
