"""``--shuffle SEED`` of tests/conftest.py: the tests in a random order."""

from types import SimpleNamespace


def order(request, seed):
    """Of 50 tests, each fifth of which shares processes."""
    hooks = request.config.hook.pytest_collection_modifyitems.get_hookimpls()
    (ours,) = (hook.function for hook in hooks if hook.function.__code__.co_filename.endswith("tests/conftest.py"))
    items = [
        SimpleNamespace(name=f"{i:02}", keywords=(), fixturenames=["pool"] if i % 5 == 0 else []) for i in range(50)
    ]
    ours(SimpleNamespace(option=SimpleNamespace(shuffle=seed)), items)
    return [item.name for item in items]


def test_the_order_is_that_of_the_seed(request):
    plain, first, again, other = (order(request, seed) for seed in (None, 1, 1, 2))
    assert first == again
    assert len({tuple(found) for found in (plain, first, other)}) == 3
    assert plain[:10] == sorted(first[:10]) == sorted(other[:10])  # what shares processes comes first
    assert plain[10:] == sorted(first[10:])
