"""Kernels that are called without an operator in front of them, with options as an operator takes them."""

from xent_ops.kernels.options import as_record


class FlatOptions:
    """Functions of a module, with the options as keywords instead of one record, as operators take them.

    ``others`` are functions that take an operator's place under another name than its own.
    """

    def __init__(self, module, **others):
        self.module, self.others = module, others

    def __getattr__(self, name):
        function = self.others.get(name) or getattr(self.module, name)
        return lambda *args, **options: function(*args, **as_record(options))
