"""Triton kernels for CUDA, one file a family, their torch references, and their ahead-of-time
compiler.

`radixserve_kernels.gpu_ops` is the way in: it imports these files when a kernel is first launched.
"""
