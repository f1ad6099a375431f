"""What these tests share with those of attention."""

from tests.cpu_kernels import bf16_routine, num_threads

__all__ = ["bf16_routine", "num_threads"]
