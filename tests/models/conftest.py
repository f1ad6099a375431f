"""What these tests share with those of attention."""

from tests.cpu_kernels import cpu_level

__all__ = ["cpu_level"]
