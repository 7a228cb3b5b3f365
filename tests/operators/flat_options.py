"""Kernels that are called without an operator in front of them, with options as an operator takes them."""

from xent_ops.kernels.options import as_record


class FlatOptions:
    """Functions of a module, with the options as keywords instead of one record, as operators take them."""

    def __init__(self, module):
        self.module = module

    def __getattr__(self, name):
        function = getattr(self.module, name)
        return lambda *args, **options: function(*args, **as_record(options))
