"""Triton kernels for Ascend NPUs. Kernel files hold ``@triton.jit`` functions only; launch.py calls them.

The vector cores want other kernels than a GPU: few programs that walk over many rows each, tiles as large as the
unified buffer holds, and no comparison of integer vectors, which would run element by element on the scalar unit. What
is written here keeps to Triton 3.2, the version that triton-ascend is built on.
"""
