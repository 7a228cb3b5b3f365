"""Triton kernels for CUDA and ROCm. Kernel files hold ``@triton.jit`` functions only; launch.py calls them."""
