"""What computes: reference.py in plain torch, triton/ for CUDA and ROCm. Nothing here knows operators."""
