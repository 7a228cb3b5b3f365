"""What a type checker sees of the package."""

import re

import pytest

api = pytest.importorskip("mypy.api", reason="mypy is not installed")

# torch's own types would take mypy a minute: here its tensors are Any.
SETTINGS = """
[mypy]
[mypy-torch.*]
follow_imports = skip
[mypy-xent_ops.*]
follow_imports = silent
"""
SNIPPET = """
import torch, xent_ops
from xent_ops import distributed
x, t = torch.randn(2, 3), torch.tensor([0, 1])
reveal_type(xent_ops.distributed.vocab_parallel_cross_entropy)
reveal_type(xent_ops.linear_token_log_probs(x, x, t, shard=distributed.Shard(num_classes=3)))
reveal_type(xent_ops.token_log_probs(x, t))
xent_ops.cross_entropy(x, t, reduction="avg")
xent_ops.LinearCrossEntropyLoss(3, 3, reduction="avg")
reduction: xent_ops.Reduction = "sum"
xent_ops.distributed.vocab_parallel_cross_entropy(x, t, num_classes=3, reduction=reduction)
"""


def test_types(tmp_path):
    """The module that is imported when asked for is no Any, and a reduction is one of three words."""
    (tmp_path / "mypy.ini").write_text(SETTINGS)
    (tmp_path / "snippet.py").write_text(SNIPPET)
    out, problem, _ = api.run(
        [f"--config-file={tmp_path / 'mypy.ini'}", f"--cache-dir={tmp_path}", str(tmp_path / "snippet.py")]
    )
    lines = dict(re.findall(r"snippet.py:(\d+): (.*)", out))
    assert not problem and lines.keys() == {"5", "6", "7", "8", "9"}, out + problem
    assert "def (logits_shard: Any, target: Any, group: " in lines["5"] and "num_classes: int" in lines["5"]
    assert "TokenLogProbs" in lines["6"] and "TokenLogProbs" in lines["7"]
    for line in ("8", "9"):
        assert "Literal['avg']" in lines[line] and "Literal['none', 'mean', 'sum']" in lines[line]
