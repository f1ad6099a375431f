"""C++ kernels for CPUs, Triton kernels for GPUs, and their references in PyTorch."""
