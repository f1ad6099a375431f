"""Tests reach the packages by public names: their private reads are counted and bounded."""

from __future__ import annotations

import ast

from tools.count_private_reads import LIMIT, find, private_reads

READS = """
from radixserve.cache.events import _LIMIT, EventLog
from elsewhere import _LIMIT

class Double(Engine):
    def __init__(self):
        self._own = 1
        self._own, self._pages
        super()._launch()

def test(monkeypatch):
    monkeypatch.setattr(events, "_LIMIT", 1)
    row._replace(a=engine._pages[0]._unknown)
"""


def test_few_private_names_are_read() -> None:
    found = find()
    assert len(found) <= LIMIT, "\n".join(found)


def test_what_is_counted() -> None:
    private = {"_LIMIT", "_own", "_pages", "_launch"}
    names = [name for _, name in sorted(private_reads(ast.parse(READS), private))]
    assert names == ["_LIMIT", "_pages", "_launch", "_LIMIT", "_pages"]
