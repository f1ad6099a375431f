"""The runtimes of the API's tests."""

from tests.api.conftest import (
    audit,
    collected,
    demo,
    folder,
    quick_collections,
    rt,
    shared_rt,
    tiny,
    tiny_folder,
)

__all__ = [
    "audit",
    "collected",
    "demo",
    "folder",
    "quick_collections",
    "rt",
    "shared_rt",
    "tiny",
    "tiny_folder",
]
