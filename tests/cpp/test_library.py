"""libxent_ops.so beside and without the Python package: which of the two registers what, in both orders, without a crash.

Each case is a process of its own: what the dispatcher holds can be registered once.
"""

import json
import re
import shutil
import textwrap

import pytest
import torch
from helpers.processes import run_with_torch
from helpers.samples import calls_of

import xent_ops
from xent_ops import _extension
from xent_ops.__main__ import main
from xent_ops.ops.library import OPERATORS
from xent_ops.ops.schemas import COMPOSITES, PYTHON_ONLY, SCHEMAS

pytestmark = pytest.mark.skipif(not _extension.LIBRARY.exists(), reason="built without C++ (XENT_OPS_BUILD_CPP=0)")

LOAD = f"import torch; torch.ops.load_library({str(_extension.LIBRARY)!r})\n"
IMPORT = "import torch, xent_ops\n"
STEP = """
x, target = torch.randn(3, 5), torch.tensor([0, 4, -100])
loss = torch.ops.xent.cross_entropy(x, target)
torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, target))
"""


WITHOUT_PYTHON = """
import sys, torch
ops = torch.ops.xent
for name, args, options, expected in torch.load({path!r}):
    overload = getattr(ops, name).default
    written = [i for i, one in enumerate(overload._schema.arguments) if one.alias_info is not None]
    on_meta = [arg.to("meta") if isinstance(arg, torch.Tensor) else arg for arg in args]
    shapes = overload(*on_meta, **options)
    results = overload(*args, **options)
    as_tuple = lambda found: found if isinstance(found, tuple) else () if found is None else (found,)
    found = (*as_tuple(results), *(args[i] for i in written))
    torch.testing.assert_close(found, expected, equal_nan=True, msg=lambda text: f"{{name}}{{options}}: {{text}}")
    for made, meta in zip(as_tuple(results), as_tuple(shapes), strict=True):
        assert meta.is_meta and (meta.shape, meta.dtype, meta.stride()) == (made.shape, made.dtype, made.stride()), name
assert "xent_ops" not in sys.modules
"""


def test_the_same_results_without_python(tmp_path):
    """Values of plain torch, and meta tensors, of every operator's samples, where xent_ops is never imported."""
    calls = []
    for name in sorted(set(SCHEMAS) - set(PYTHON_ONLY)):
        overload = getattr(torch.ops.xent, name).default
        for _, args, options in calls_of(name, "cpu", torch.float32, False):
            if name.endswith("_") and torch.bfloat16 in args:
                continue  # a gradient of 16 bits fills half of the logits' memory, and the rest may hold anything
            copies = [arg.clone() if isinstance(arg, torch.Tensor) else arg for arg in args]
            if name in OPERATORS:
                results = OPERATORS[name].reference(*copies, **OPERATORS[name].keywords(options))
            else:
                results = overload(*copies, **options)
            written = [copies[i] for i, one in enumerate(overload._schema.arguments) if one.alias_info is not None]
            results = results if isinstance(results, tuple) else () if results is None else (results,)
            calls.append((name, args, options, (*results, *written)))
    torch.save(calls, tmp_path / "calls")
    run_with_torch(LOAD + WITHOUT_PYTHON.format(path=str(tmp_path / "calls")))


def test_errors_without_python():
    run_with_torch(
        LOAD
        + STEP
        + textwrap.dedent("""
        ops = torch.ops.xent
        for device in ("cpu", "meta"):  # an empty shard may start behind the last class
            empty = torch.empty(3, 0, device=device)
            assert ops.cross_entropy_shard(empty, target.to(device), 10, 10).shape == (1, 14)
        # An operator that a composite calls: torch 2.11 prints what it says and raises "... failed".
        wanted = "target 5 is out of bounds: valid are 0 to 4", "xent::cross_entropy_reduced failed"
        composite = RuntimeError, wanted[torch.__version__ < "2.12"]
        for call, (kind, text) in (
            (lambda: ops.cross_entropy_forward(x, target + 5), (IndexError, wanted[0])),
            (lambda: ops.cross_entropy(x, target + 5), composite),
            (lambda: ops.cross_entropy_shard(empty, target.to("meta"), 11, 10), (RuntimeError, "class_start")),
        ):
            try:
                call()
            except kind as error:
                assert text in str(error), error
            else:
                raise AssertionError("no error")
        """)
    )


def test_composite():
    """Any ignore_index, beyond what a double holds too; and nothing but one operator is called where that is enough."""
    run_with_torch(
        LOAD
        + textwrap.dedent("""
        from torch.utils._python_dispatch import TorchDispatchMode
        ops, x = torch.ops.xent, torch.randn(4, 5)
        for ignored in (-1, 2**32, 2**53 + 1, 2**63 - 1, -(2**53) - 1, -(2**63)):
            target = torch.tensor([1, 2, ignored, 4])
            mean = ops.cross_entropy(x, target, ignore_index=ignored, lse_square_scale=0.1)
            counted = x[[0, 1, 3]]
            wanted = torch.nn.functional.cross_entropy(counted, target[[0, 1, 3]])
            squares = 0.1 * counted.logsumexp(-1).square()
            torch.testing.assert_close(mean, wanted + squares.mean())
            rows = ops.cross_entropy(x, target, ignore_index=ignored, lse_square_scale=0.1, reduction="none")
            torch.testing.assert_close(rows.sum() - squares.sum(), 3 * wanted)
            assert rows[2] == 0

        options = {"label_smoothing": 0.1, "softcap": 2.0, "logit_scale": 0.7}
        for reduction in ("none", "sum"):
            got = ops.cross_entropy(x, target[:1].expand(4), lse_square_scale=0.3, reduction=reduction, **options)
            loss, lse, _, _, _ = ops.cross_entropy_forward(x, target[:1].expand(4), **options)
            wanted = loss + 0.3 * lse.square()
            torch.testing.assert_close(got, wanted if reduction == "none" else wanted.sum())

        class Calls(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, arguments=(), options=None):
                calls.append(str(function))
                return function(*arguments, **(options or {}))

        for reduction, called in {"none": "forward", "sum": "reduced", "mean": "reduced"}.items():
            calls = []
            with Calls():
                ops.cross_entropy(x, target, ignore_index=ignored, reduction=reduction)
            assert calls == [f"xent.cross_entropy_{called}.default"], calls
        """)
    )


TRAINING = """
import warnings
warnings.simplefilter("error")
ops, leaf, target = torch.ops.xent, torch.randn(3, 5, requires_grad=True), torch.tensor([0, 4, -100])
rows = torch.ones(3)
calls = {
    "forward": lambda x: ops.cross_entropy_forward(x, target),
    "reduced": lambda x: ops.cross_entropy_reduced(x, target),
    "none": lambda x: ops.cross_entropy(x, target, reduction="none"),
    "backward": lambda x: ops.cross_entropy_backward(rows, None, x, target, rows),
    "with grad": lambda x: ops.cross_entropy_with_grad(x, target, rows[0]),
    "soft": lambda x: ops.soft_cross_entropy_forward(x, torch.ones(3, 5)),
    "shard": lambda x: ops.cross_entropy_shard(x, target, 0, 10),
    "divergences": lambda x: ops.divergences_forward(x, torch.ones(3, 5), target),
    "teacher": lambda x: ops.divergences_forward(torch.ones(3, 5), x, target),
}
for name, call in calls.items():
    for x in (leaf, leaf * 2):
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                call(x)
        call(x.detach())
        try:
            call(x)
        except RuntimeError as error:
            text = "forward failed" if name == "none" and torch.__version__ < "2.12" else "`import xent_ops` in Python"
            assert text in str(error), (name, error)
        else:
            raise AssertionError(name)


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        loss, lse = ops.cross_entropy_forward(x, target)[:2]
        ctx.save_for_backward(x, lse)
        return loss

    @staticmethod
    def backward(ctx, grad):
        x, lse = ctx.saved_tensors
        return ops.cross_entropy_backward(grad, None, x, target, lse)


grads = [torch.autograd.grad(loss.sum(), leaf)[0] for loss in (
    Loss.apply(leaf), torch.nn.functional.cross_entropy(leaf, target, reduction="none"))]
torch.testing.assert_close(*grads)
"""


def test_a_gradient_that_would_be_lost_is_refused():
    """Without a gradient, below a mode or inside a Function of the caller's, nothing is in the way."""
    run_with_torch(LOAD + TRAINING)


def test_library_after_import(tmp_path):
    """Also as a copy at another path: the Python package keeps its operators."""
    copy = shutil.copy(_extension.LIBRARY, tmp_path)
    run_with_torch(IMPORT + LOAD + f"torch.ops.load_library({copy!r})\n" + STEP)


def test_copy_after_library(tmp_path):
    copy = shutil.copy(_extension.LIBRARY, tmp_path)
    run_with_torch(LOAD + f"torch.ops.load_library({copy!r})\n" + STEP)


def test_import_after_library():
    """Refused by a Python error that names the library and the way out."""
    out = run_with_torch(
        LOAD
        + textwrap.dedent("""
        try:
            import xent_ops
        except ImportError as error:
            print(error)
        """)
        + STEP
    )
    assert "Import xent_ops first" in out and str(_extension.LIBRARY) in out


DUMP = """
import json, sys
names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("xent::")]
print(json.dumps({name: str(getattr(torch.ops.xent, name[6:]).default._schema) for name in names}))
"""


def test_the_same_schemas():
    python, library = (json.loads(run_with_torch(start + DUMP)) for start in (IMPORT, LOAD))
    assert python.keys() == {f"xent::{name}" for name in SCHEMAS}
    assert library == {name: schema for name, schema in python.items() if name[6:] not in PYTHON_ONLY}


CPP_TYPES = {
    "Tensor": "const Tensor&",
    "Tensor?": "const MaybeTensor&",
    "bool": "bool",
    "SymInt": "int64_t",
    "SymInt?": "MaybeInt",
    "float": "double",
    "float?": "MaybeNumber",
    "ScalarType?": "MaybeDtype",
    "str": "const std::string&",
}


def test_arguments_of_the_functions_are_those_of_the_schemas():
    """Types, names and order, as the sources have them: at a call nothing notices two floats that are swapped."""
    found = {}
    for path in (_extension.SOURCES / "operators").glob("*.cpp"):
        text = path.read_text()
        functions = dict(re.findall(r"^[\w:]+ (\w+)\(([^()]*)\) \{$", text, re.MULTILINE))
        for name, function in re.findall(r'add\("(\w+)", TORCH_BOX\(&(\w+)(?:<\w+>)?\)\)', text):
            found[name] = [tuple(parameter.split()) for parameter in functions[function].split(",")]
    for name in set(SCHEMAS) - set(PYTHON_ONLY):
        arguments = re.findall(r"([\w?]+)(?:\(a!\))? (\w+)(?:=[^,)]+)?[,)]", SCHEMAS[name].split(" -> ")[0])
        assert found.pop(name) == [(*CPP_TYPES[kind].split(), argument) for kind, argument in arguments], name
    assert not found


def test_every_operator_has_its_kernels():
    out = run_with_torch(
        LOAD + "has = torch._C._dispatch_has_kernel_for_dispatch_key\n"
        f"names = {[name for name in SCHEMAS if name not in PYTHON_ONLY]}\n"
        "keys = ('CPU', 'Meta', 'CompositeImplicitAutograd')\n"
        "for name in names: print(name, *(key for key in keys if has('xent::' + name, key)))\n"
    )
    for line in out.splitlines():
        name, *keys = line.split()
        assert keys == (["CompositeImplicitAutograd"] if name in COMPOSITES else ["CPU", "Meta"]), line


def test_export_stays_dynamic():
    """Neither N nor V is specialised, and sizes that must agree are found to."""
    run_with_torch(
        LOAD
        + textwrap.dedent("""
        from torch.export import Dim, export
        ops = torch.ops.xent

        class Everything(torch.nn.Module):
            def forward(self, x, t, w, p):
                loss, lse, *_ = ops.cross_entropy_forward(x, t, w)
                grad = ops.cross_entropy_backward(loss, lse, x, t, lse, w)
                value, divisor, lse, _ = ops.cross_entropy_reduced(x, t, w, lse_square_scale=0.1)
                divisor = divisor + ops.row_divisors(t)[0]
                value = value + ops.row_summary(loss, lse, t, w)[0]
                reduced = ops.cross_entropy_backward(value, None, x, t, lse, w, divisor, lse_square_scale=0.1)
                entropy = ops.cross_entropy_forward(x, t, None, True, True)[3]
                again = ops.cross_entropy_backward(loss, None, x, t, lse, None, None, entropy, entropy)
                soft, soft_lse = ops.soft_cross_entropy_forward(x, p)
                soft_grad = ops.soft_cross_entropy_backward(soft, None, x, p, soft_lse)
                part = ops.cross_entropy_shard(x, t, 0, 64, w)
                joined = ops.cross_entropy_shard_join(x, t, part, 0, 64, w)
                whole, both, lse, lse_coefficient, _ = ops.cross_entropy_shard_reduced(x, t, part, 0, 64, w)
                of_slice = w, both, entropy, entropy, lse_coefficient, 0, 64
                shard = ops.cross_entropy_backward(whole, None, x, t, lse, *of_slice)
                composite = ops.cross_entropy(x, t, w, lse_square_scale=0.1)
                return loss, grad, reduced, again, soft_grad, part, *joined, shard, composite

        for classes in (Dim.STATIC, Dim.DYNAMIC):
            x = torch.randn(4, 9)
            arguments = x, torch.zeros(4, dtype=torch.long), torch.ones(9), x.softmax(-1)
            n, v = Dim.DYNAMIC, classes
            program = export(Everything(), arguments, dynamic_shapes=({0: n, 1: v}, {0: n}, {0: v}, {0: n, 1: v}))
            assert len(program.range_constraints) == (1 if v is Dim.STATIC else 2), program.range_constraints
            decomposed = program.run_decompositions()
            assert "cross_entropy_forward" in str(decomposed.graph), decomposed
            x = torch.randn(7, 9)
            t = torch.randint(9, (7,))
            loss = decomposed.module()(x, t, torch.ones(9), x.softmax(-1))[0]
            torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x, t, reduction="none"))

        class Mismatch(torch.nn.Module):
            def forward(self, x, t):
                return ops.cross_entropy_forward(x, t)

        try:
            export(Mismatch(), (torch.randn(4, 9), torch.zeros(5, dtype=torch.long)))
        except Exception as error:
            assert "target must be one class for each row" in str(error), error
        else:
            raise AssertionError("no error")
        """)
    )


def test_library_path(capsys, monkeypatch, tmp_path):
    assert xent_ops.library_path() == str(_extension.LIBRARY)
    assert main(["library-path"]) == 0
    assert capsys.readouterr().out.strip() == xent_ops.library_path()
    monkeypatch.setattr(_extension, "LIBRARY", tmp_path / "libxent_ops.so")
    assert main(["library-path"]) == 1
    assert _extension.build_command() in capsys.readouterr().err
