"""Empty modules in place of packages that an import asks for, that are not installed, and that what
is measured never calls; an installed package always wins."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _Anything(type):
    """A class that has every attribute, takes every base list and stands in every annotation."""

    def __new__(cls, name: str, bases: tuple[type, ...], body: dict[str, Any], **_: Any) -> Any:
        return super().__new__(cls, name, bases, body)

    def __init__(cls, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(cls, name: str) -> Any:
        return _attribute(name)

    def __getitem__(cls, _: Any) -> Any:
        return cls

    __or__ = __ror__ = __getitem__


class Nothing(metaclass=_Anything):
    """Whatever an absent package is asked for: a class, a decorator, a constant."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        is_decorator = len(args) == 1 and not options and callable(args[0])
        return args[0] if is_decorator else super().__new__(cls)

    def __call__(self, decorated: Any = None, *_: Any, **__: Any) -> Any:
        return decorated

    def __getattr__(self, name: str) -> Any:
        return _attribute(name)

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> dict[str, str]:
        return {"type": "any"}


def _attribute(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Nothing


class _Finder(MetaPathFinder, Loader):
    """Asked last: answers only for the names it was given."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names

    def find_spec(self, name: str, _path: Any, _target: Any = None) -> ModuleSpec | None:
        is_known = name.split(".")[0] in self._names
        return ModuleSpec(name, self, is_package=True) if is_known else None

    def exec_module(self, module: ModuleType) -> None:
        module.__version__ = "0"  # type: ignore[attr-defined]
        module.__getattr__ = _attribute  # type: ignore[method-assign]


@contextmanager
def stub_packages(*names: str) -> Iterator[None]:
    """While it lasts, the named packages import as empty ones unless they are installed."""
    finder = _Finder(names)
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
