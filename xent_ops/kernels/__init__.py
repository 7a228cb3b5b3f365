"""The kernels: cpu.py (C++), reference.py (plain torch), triton/ (CUDA, ROCm), ascend/ (Ascend NPUs).

The operators of the namespace ``xent`` call the kernels. Nothing here imports them.
"""
