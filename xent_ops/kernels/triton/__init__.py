"""Triton kernels for CUDA and ROCm. Kernel files hold kernels only; launch*.py and prepared.py call them."""
