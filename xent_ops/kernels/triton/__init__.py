"""Triton kernels for CUDA and ROCm. Kernel files hold kernels only; launch*.py call them."""
