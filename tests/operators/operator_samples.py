"""Arguments of every operator of the namespace, for opcheck."""

import torch

ops = torch.ops.xent


def samples(device, dtype, requires_grad):
    """(operator, args, kwargs) for every operator of the namespace."""

    def rows(*shape):
        return torch.randn(shape, device=device, dtype=torch.float64 if dtype == torch.float64 else torch.float32)

    logits = torch.randn(6, 37, device=device, dtype=dtype, requires_grad=requires_grad)
    batched = torch.randn(2, 5, 16, device=device, dtype=dtype, requires_grad=requires_grad)
    soft = torch.rand(6, 37, device=device, dtype=dtype)
    target = torch.tensor([0, 36, 5, -100, 7, 8], device=device)
    weight = torch.rand(37, device=device)
    full = {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 1.5}
    index_cases = [
        ((logits, target), {}),
        ((logits, target.clamp(min=5), weight), {"ignore_index": 5, **full}),
        ((batched[:, :-1], torch.zeros(2, 4, dtype=torch.int64, device=device)), {}),
        ((batched[0, 0], torch.tensor(3, device=device)), {"label_smoothing": 0.5}),
        ((logits[:0], target[:0]), {}),
    ]
    for args, kwargs in index_cases:
        for reduction in ("none", "mean", "sum"):
            if reduction == "mean" and args[0].numel() == 0:
                continue  # NaN, as in torch: opcheck compares NaN with NaN and finds them different
            options = {**kwargs, "reduction": reduction, "lse_square_scale": 0.1}
            yield ops.cross_entropy.default, args, options
            if reduction != "none":
                yield ops.cross_entropy_reduced.default, args, options
        yield ops.cross_entropy_forward.default, args, kwargs
        x, t, *rest = args
        weighted = (*rest, None)[:1]
        for wanted in ((True, False), (False, True), (True, True)):
            yield ops.cross_entropy_forward.default, (x, t, *weighted, *wanted), kwargs
        grad, grad_lse, lse, entropy = (rows(*t.shape) for _ in range(4))
        yield ops.cross_entropy_backward.default, (grad, grad_lse, x, t, lse, *rest), kwargs
        yield ops.cross_entropy_backward.default, (grad, None, x, t, lse, *rest), kwargs
        divisor, square = rows(2).abs() + 1, {**kwargs, "lse_square_scale": 0.1}
        yield ops.cross_entropy_backward.default, (rows(), None, x, t, lse, *weighted, divisor), square
        yield ops.cross_entropy_backward.default, (grad, grad_lse, x, t, lse, *weighted, divisor), square
        of_entropy = (lse, *weighted, None, grad_lse, entropy)
        yield ops.cross_entropy_backward.default, (grad, None, x, t, *of_entropy), kwargs
        scale = rows()
        yield ops.cross_entropy_with_grad.default, (x.detach(), t, scale, None, *rest), kwargs
        yield ops.cross_entropy_with_grad.default, (x.detach(), t, grad, grad_lse, *rest), kwargs
        if not requires_grad:
            yield ops.cross_entropy_with_grad_.default, (x.clone(), t, scale, grad_lse, *rest), kwargs
            yield ops.scale_grad_.default, (x.clone(), scale), {}
            yield ops.scale_grad_.default, (x.clone(), grad), {}
            yield ops.cross_entropy_backward_.default, (grad, None, x.clone(), t, lse, *rest), kwargs
            yield ops.cross_entropy_backward_.default, (rows(), None, x.clone(), t, lse, *weighted, divisor), square
            yield ops.cross_entropy_backward_.default, (grad, grad_lse, x.clone(), t, *of_entropy), kwargs
        if x.numel():
            counting = {name: value for name, value in kwargs.items() if name == "ignore_index"}
            yield ops.cross_entropy_divisor.default, (x.detach(), t, *rest), counting
    for args, kwargs in [((logits, soft), {}), ((logits, soft, weight.to(dtype)), full)]:
        yield ops.soft_cross_entropy_forward.default, args, kwargs
        x, q, *rest = args
        yield ops.soft_cross_entropy_backward.default, (rows(6), rows(6), x, q, rows(6), *rest), kwargs
        yield ops.soft_cross_entropy_backward.default, (rows(6), None, x, q, rows(6), *rest), kwargs
    yield from shard_samples(logits, target, weight, full, rows)
    yield from linear_samples(device, dtype, requires_grad, rows)


def shard_samples(logits, target, weight, full, rows):
    for place, w, kwargs in [
        ((0, 37), None, {}),
        ((20, 60), weight, {"ignore_index": -100, **full}),
        ((5, 40), None, full),
    ]:
        detached = logits.detach()  # the join alone is differentiable, and but once
        gathered = torch.cat([  # this rank's shard, and others before and behind it
            ops.cross_entropy_shard(detached[:, :size], target, start, place[1], None if w is None else w[:size], **kwargs)
            for start, size in [(0, place[0]), (place[0], 37), (place[0] + 37, max(place[1] - place[0] - 37, 0))]
            if size and start < place[1]
        ])  # fmt: skip
        yield ops.cross_entropy_shard.default, (detached, target, *place, w), kwargs
        yield ops.cross_entropy_shard_join.default, (logits, target, gathered, *place, w), kwargs
        for reduction in ("mean", "sum"):
            options = {**kwargs, "reduction": reduction, "lse_square_scale": 0.1}
            yield ops.cross_entropy_shard_reduced.default, (logits, target, gathered, *place, w), options
        place = (None if w is None else rows(6), *place)
        plain, of_entropy = (w, None, None, None, *place), (w, None, rows(6), rows(6), *place)
        divided = (w, rows(2).abs() + 1, None, None, *place)
        square = {**kwargs, "lse_square_scale": 0.1}
        saved = (detached, target, rows(6))
        yield ops.cross_entropy_backward.default, (rows(6), None, *saved, *plain), kwargs
        yield ops.cross_entropy_backward.default, (rows(6), rows(6), *saved, *plain), kwargs
        yield ops.cross_entropy_backward.default, (rows(), None, *saved, *divided), square
        yield ops.cross_entropy_backward.default, (rows(6), None, *saved, *of_entropy), kwargs
        for rest in (plain, of_entropy):
            overwritten = detached.clone(), target, rows(6)
            yield ops.cross_entropy_backward_.default, (rows(6), None, *overwritten, *rest), kwargs


def linear_samples(device, dtype, requires_grad, rows):
    """Of the operators of the head and the loss as one."""

    def leaf(*shape):
        return (torch.randn(shape, device=device) / 4).to(dtype).requires_grad_(requires_grad)

    x, head, bias = leaf(6, 8), leaf(37, 8), leaf(37)
    target = torch.tensor([0, 36, 5, -100, 7, 8], device=device)
    batched = torch.zeros(2, 3, dtype=torch.int64, device=device)
    full = {"label_smoothing": 0.1, "softcap": 5.0, "logit_scale": 1.5}
    wide = None if dtype == torch.float64 else torch.float32
    cases = [
        ((x, head, target), {"chunk_rows": 4}),
        ((x, head, target), {"chunk_rows": 4, "skip_ignored": True}),
        ((x, head, target, bias, torch.rand(37, device=device)), {"chunk_rows": 4, "accumulate_dtype": wide, **full}),
        ((x.unflatten(0, (2, 3)), head, batched, bias), {"ignore_index": 5}),
        ((x[0], head, target[0]), {"label_smoothing": 0.5}),
        ((x[:0], head, target[:0]), {}),
    ]
    for args, kwargs in cases if dtype == torch.float32 else cases[:2]:
        square = {**kwargs, "lse_square_scale": 0.1}
        reduction = "mean" if "accumulate_dtype" in kwargs else "none"
        yield ops.linear_cross_entropy.default, args, {**square, "reduction": reduction}
        divided = (*args, None, None)[:5]
        divisor = torch.tensor(3, device=device)
        token_weight = torch.randn(args[2].shape, device=device)
        yield ops.linear_cross_entropy.default, (*divided, divisor, token_weight), {**square, "reduction": "sum"}
        yield ops.linear_cross_entropy_forward.default, args, kwargs
        for wanted in ((True, False), (False, True)):
            yield ops.linear_cross_entropy_forward.default, (*divided, *wanted), kwargs
        x_, head_, t, *rest = args
        grad, grad_lse, lse, entropy = (rows(*t.shape) for _ in range(4))
        saved = (x_, head_, t, lse, *(*rest, None, None)[:2])
        two = rows(2).abs() + 1
        yield ops.linear_cross_entropy_backward.default, (grad, grad_lse, *saved), kwargs
        yield ops.linear_cross_entropy_backward.default, (rows(), None, *saved, two), square
        yield ops.linear_cross_entropy_backward.default, (grad, None, *saved, None, grad_lse, entropy), kwargs
        one_pass = {name: value for name, value in square.items() if name != "accumulate_dtype"}
        masks = [[True] * 3] if "accumulate_dtype" not in kwargs else [[True, False, False], [False, True, True]]
        for mask in masks:
            yield ops.linear_cross_entropy_backward.default, (grad, None, *saved, *(None,) * 4, 0, None, mask), kwargs
            if args[0].numel():
                for factors in (None, token_weight):
                    positional = (*divided, None, factors, mask, kwargs.get("accumulate_dtype"))
                    yield ops.linear_cross_entropy_with_grad.default, positional, one_pass
    for place, w, kwargs in [
        ((0, 37), None, {"chunk_rows": 4}),
        ((0, 37), torch.rand(37, device=device), {"chunk_rows": 4, **full}),
        ((0, 30), None, full),  # with padding
    ]:
        shard, given = (x, head, target.clamp(max=29)), (*place, bias, w)
        detached = (*(tensor.detach() for tensor in shard), *place, bias.detach(), w)
        gathered = ops.linear_cross_entropy_shard(*detached, **kwargs)
        yield ops.linear_cross_entropy_shard.default, detached, kwargs
        yield ops.linear_cross_entropy_shard_join.default, (*shard, gathered, *given), kwargs
        coefficient = None if w is None else rows(6)
        for mask in ([True] * 3, [True, False, False], [False, True, True]):
            saved = (*detached[:3], rows(6), bias.detach(), w, None, None, None, coefficient, *place, mask)
            yield ops.linear_cross_entropy_backward.default, (rows(6), rows(6), *saved), kwargs
        yield from chunk_samples(shard, place, bias, w, rows, dtype, {"softcap": 5.0})
    for w in (None, torch.rand(37, device=device)):
        yield from chunk_samples((x, head, target), (0, None), bias, w, rows, dtype, full)
    plain = {"chunk_rows": 4, "softcap": 5.0}
    detached = (*(tensor.detach() for tensor in (x, head, target)), 0, 37, bias.detach(), None)
    gathered = ops.linear_cross_entropy_shard(*detached, True, **plain)
    yield ops.linear_cross_entropy_shard.default, (*detached, True), plain
    yield ops.linear_cross_entropy_shard_join.default, (x, head, target, gathered, 0, 37, bias, None, None, True), plain
    saved = (*detached[:3], rows(6), bias.detach(), None, None, rows(6), rows(6), None, 0, 37)
    yield ops.linear_cross_entropy_backward.default, (rows(6), None, *saved), plain
    for factor in (rows(), rows(37)):
        yield ops.linear_scale_grad.default, (head.detach(), factor), {}


def chunk_samples(shard, place, bias, weight, rows, dtype, kwargs):
    """Of the operators between which the caller's code stands."""
    x, head, target = (tensor.detach() for tensor in shard)
    chunk = (x, head, target, *place, bias.detach(), weight)
    yield ops.linear_cross_entropy_chunk.default, chunk, kwargs
    if weight is None:
        yield ops.linear_cross_entropy_chunk.default, (*chunk, True), {"softcap": 5.0}
    _, logits = ops.linear_cross_entropy_chunk(*chunk, **kwargs)
    square, number = {**kwargs, "lse_square_scale": 0.1}, len(x)
    first, rest = (rows(), None, head, target, rows(number)), (*place, weight, rows(2).abs() + 1, None, None)
    coefficient = None if weight is None or place[1] is None else rows(number)
    for after in ((), (rows(3), False)):
        args = (logits.clone(), *first, *rest, coefficient, *after)
        yield ops.linear_cross_entropy_chunk_grad_.default, args, square
    of_entropy = (rows(number), rows(number), head, target, rows(number), *place, None, None, rows(number))
    yield ops.linear_cross_entropy_chunk_grad_.default, (logits.clone(), *of_entropy, rows(number)), {"softcap": 5.0}
    columns = len(head) if place[1] is None else min(len(head), place[1])
    sums = rows(*head.shape).to(dtype), rows(len(head))
    for first, wanted in (
        (True, sums),
        (False, sums),
        (True, (sums[0], rows(0))),
        (False, (rows(0).to(dtype), sums[1])),
    ):
        copies = [tensor.clone() for tensor in wanted]
        yield ops.linear_cross_entropy_chunk_add_.default, (*copies, logits, x, columns, first), {}
    gradients = (x.clone(), head.clone(), bias.detach().clone())
    yield ops.linear_cross_entropy_value.default, (rows(), *shard[:2], bias, *gradients), {}
    yield ops.linear_cross_entropy_value.default, (rows(), *shard[:2], None, *gradients[:2], rows(0), rows()), {}
