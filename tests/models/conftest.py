"""What these tests share with those of attention."""

from tests.cpu_kernels import bf16_routine

__all__ = ["bf16_routine"]
