"""Triton's interpreter, which runs the Triton kernels on CPU tensors where this process has TRITON_INTERPRET=1."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def patch_language_once():
    """Triton 3.7 patches triton.language again for each call of a device function, although the launch has done it.
    That took two fifths of the time of all tests in the interpreter. One call for each function has the same effect."""
    from triton.runtime import interpreter

    patched = set()

    def call(self, *args, **kwargs):
        if self.fn not in patched:
            patched.add(self.fn)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
