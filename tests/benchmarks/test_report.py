"""What the benchmarks print: tables, whole or a row at a time."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

COLUMNS = ("name", "GB/s")
WIDEST = ("bfloat16", "0.00 (0.00)")


def table(is_json: bool) -> Any:
    arguments = importlib.import_module("harness.arguments")
    args = arguments.parse("What it measures.", ["--json"] if is_json else [], json=False)
    return importlib.import_module("harness.report").TablePrinter(args, COLUMNS, WIDEST)


def test_rows_are_printed_as_they_are_added(capsys: pytest.CaptureFixture[str]) -> None:
    printer = table(False)
    assert capsys.readouterr().out.splitlines()[1] == "name             GB/s"
    printer.add([["float32", 12.345], ["int8", None]])
    assert capsys.readouterr().out == "float32          12.3\nint8                -\n"
    printer.finish()
    assert capsys.readouterr().out == ""


def test_the_document_is_all_that_json_prints(capsys: pytest.CaptureFixture[str]) -> None:
    printer = table(True)
    printer.add([["float32", 12.345]])
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines()[-1].startswith("float32")
    printer.finish()
    document = json.loads(capsys.readouterr().out)
    assert document["columns"] == list(COLUMNS)
    assert document["rows"] == [["float32", 12.345]]
    assert "cpu" in document["settings"]
