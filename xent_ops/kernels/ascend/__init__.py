"""Triton kernels for Ascend NPUs. Kernel files hold ``@triton.jit`` functions only; launch.py calls them.

Vector cores need other kernels than a GPU: few programs with many rows each, tiles as large as the unified buffer
holds, and no comparison of integer vectors, because the scalar unit would run it element by element. The code keeps to
Triton 3.2, the version that triton-ascend is built on.
"""
