"""Whether this process runs the Triton kernels in Triton's interpreter, on CPU tensors."""

import os

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
