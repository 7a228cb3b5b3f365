"""Programs in a fresh process."""

import os
import subprocess
import sys
import textwrap


def run_python(program, **environment):
    environment = {**os.environ, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1", **environment}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stdout + result.stderr
