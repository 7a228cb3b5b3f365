"""Dispatch modes that note operators."""

from torch.utils._python_dispatch import TorchDispatchMode


class Notes(TorchDispatchMode):
    """What ``of(func, args, result)`` says of each operator that ran: a list, which may be empty."""

    def __init__(self, of):
        super().__init__()
        self.of, self.seen = of, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen += self.of(func, args, result)
        return result


class Log(Notes):
    """The names."""

    def __init__(self):
        super().__init__(lambda func, args, result: [str(func)])

    def ours(self):
        """Of our operators, without ``xent.`` and the overload."""
        return [name.removeprefix("xent.").removesuffix(".default") for name in self.seen if name.startswith("xent")]


def operators_of(call):
    """The names of our operators that a call runs."""
    with Log() as log:
        call()
    return log.ours()
