"""The C++ lines of docs/cpp.md compile, and call an operator of libxent_ops.so in a process without Python's xent_ops."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from xent_ops import _extension

PAGE = Path(__file__).parents[2] / "docs" / "cpp.md"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not _extension.LIBRARY.exists(), reason="built without C++ (XENT_OPS_BUILD_CPP=0)"),
]

PROGRAM = """
import sys, torch
from torch.utils.cpp_extension import load_inline

torch.ops.load_library(sys.argv[1])
module = load_inline("documented", [sys.stdin.read()], functions=["loss_of"], build_directory=sys.argv[2])
logits, target = torch.randn(4, 9), torch.tensor([0, 1, 2, -100])
torch.testing.assert_close(module.loss_of(logits, target), torch.nn.functional.cross_entropy(logits, target))
assert "xent_ops" not in sys.modules
"""


def test_the_documented_call(tmp_path):
    page = PAGE.read_text(encoding="utf-8")
    include, body = re.search(r"```cpp\n(#include .*?\n)\n(.*?)```", page, re.DOTALL).groups()
    function = f"at::Tensor loss_of(at::Tensor logits, at::Tensor target) {{\n{body}return loss;\n}}\n"
    source = f"#include <torch/extension.h>\n{include}{function}"
    command = [sys.executable, "-c", PROGRAM, _extension.LIBRARY, tmp_path]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
