"""What the package does where torch lacks a private name: hidden_names.py NAME... prints a line of JSON for each.

Each in a process of its own, a fork of one that has imported torch and Inductor, which takes a second. Modules of xent_ops alone see a torch without it.
"""

import builtins
import json
import os
import sys
import types
import warnings

import torch
import torch._inductor.codegen.cpp
import torch._inductor.compile_fx
import torch.export
import torch.nn.functional as F


def without(module, parts):
    """A copy of the module, whose name at the end of ``parts`` is hidden; of no module, the first name that is none."""
    first, *rest = parts
    inner = getattr(module, first, None)
    copy = types.ModuleType(module.__name__)
    copy.__dict__.update({name: value for name, value in vars(module).items() if name != first})
    if rest and isinstance(inner, types.ModuleType):
        setattr(copy, first, without(inner, rest))

    def later(name):  # what is imported or set later
        if name == first:
            raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
        return getattr(module, name)

    copy.__getattr__ = later
    return copy


def hide(full_name):
    """From all that xent_ops imports from now on."""
    top, *parts = full_name.split(".")
    __import__(".".join([top, *parts[:1]]) if parts[0] == "_inductor" else top)
    for end in range(len(parts), 0, -1):  # its modules, as far as they are some
        try:
            __import__(".".join([top, *parts[:end]]))
            break
        except ImportError:
            continue
    hidden = without(sys.modules[top], parts)
    plain = builtins.__import__

    def seen(name):
        """The module of this name as xent_ops sees it."""
        found = hidden
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        return found

    def hiding(name, globals=None, locals=None, fromlist=(), level=0):
        found = plain(name, globals, locals, fromlist, level)
        if level or name.split(".")[0] != top or not (globals or {}).get("__name__", "").startswith("xent_ops"):
            return found
        if not fromlist:
            return hidden
        return seen(name)

    builtins.__import__ = hiding


def grads(function, *tensors):
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    loss = function(*leaves)
    return [loss.detach(), *torch.autograd.grad(loss, leaves)]


def close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)


def answers():
    """What fails, of a meta call, an eager step, an export, aot_eager, Inductor, and the pass, beside plain torch."""
    import xent_ops

    x, h, w = (torch.randn(*shape) for shape in ((6, 40), (6, 8), (40, 8)))
    t = torch.randint(0, 40, (6,))

    def ours(x, h, w):
        return xent_ops.cross_entropy(x.sin(), t) + xent_ops.linear_cross_entropy(h, w, t)

    def plain(x, h, w):
        return F.cross_entropy(x.sin(), t) + F.cross_entropy(h @ w.t(), t)

    wanted, failed = grads(plain, x, h, w), {}

    def meta():
        assert xent_ops.cross_entropy(x.to("meta"), t.to("meta")).shape == ()

    def export():
        program = torch.export.export(types_of(ours), (x, h, w))
        with torch.no_grad():
            close(program.module()(x, h, w), wanted[0])

    def compiled(function, **how):
        torch.compiler.reset()
        close(grads(torch.compile(function, fullgraph=True, **how), x, h, w), wanted)

    asked = {
        "meta": meta,
        "eager": lambda: close(grads(ours, x, h, w), wanted),
        "export": export,
        "aot_eager": lambda: compiled(ours, backend="aot_eager"),
        "Inductor": lambda: compiled(ours),
        "pass": lambda: compiled(plain, options=xent_ops.inductor.options(linear=True)),
    }
    for name, ask in asked.items():
        try:
            ask()
        except Exception as error:
            failed[name] = f"{type(error).__name__}: {error}"[:300]
    from xent_ops._private import LEFT_OUT

    return {"failed": failed, "left out": LEFT_OUT}


def types_of(function):
    class Module(torch.nn.Module):
        def forward(self, *args):
            return function(*args)

    return Module()


def answers_without(full_name):
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if full_name != "nothing":
            hide(full_name)
        found = answers()
    found["warnings"] = [str(one.message) for one in caught if str(one.message).startswith("xent_ops leaves out")]
    return found


def main():
    for full_name in sys.argv[1:]:
        read, write = os.pipe()
        if os.fork() == 0:
            try:
                found = answers_without(full_name)
            except BaseException as error:
                found = {"failed": {"import": f"{type(error).__name__}: {error}"}, "left out": {}, "warnings": []}
            os.write(write, json.dumps(found).encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            print(json.dumps([full_name, json.loads(answer.read())]), flush=True)
        os.wait()


if __name__ == "__main__":
    main()
