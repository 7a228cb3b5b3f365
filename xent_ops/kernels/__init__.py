"""What computes: cpu.py (C++), reference.py (plain torch), triton/ (CUDA, ROCm). Nothing here knows operators."""
