"""What computes: cpu.py (C++), reference.py (plain torch), triton/ (CUDA, ROCm), ascend/ (Ascend NPUs).

Nothing here knows the operators of the namespace ``xent``, which call it.
"""
