"""The command lines of the benchmarks: what the default of an option makes of it."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


def parse(*given: str, **more: Any) -> Any:
    arguments = importlib.import_module("harness.arguments")
    options = {
        "prompts": 40,
        "patience": 1.0,
        "out": Path("docs"),
        "limit": int,
        "rows": [1, 8],
        "depths": [],
        "models": ["demo"],
        "dtype": ("float32", "bfloat16"),
        "only": arguments.Names("case", "abc"),
        "workload": arguments.Names("workload", "abc", ()),
        **arguments.RUN,
    }
    return arguments.parse("What it measures.", given, **options, **more)


def test_defaults() -> None:
    args = parse()
    assert (args.prompts, args.patience, args.out, args.limit) == (40, 1.0, Path("docs"), None)
    assert (args.rows, args.depths, args.models) == ([1, 8], [], ["demo"])
    assert (args.dtype, args.only, args.workload) == ("float32", ["a", "b", "c"], [])
    assert (args.threads, args.repeats, args.quick) == (1, 3, False)
    assert (args.json, args.save) == (False, None)
    assert parse("--quick").repeats == 1


def test_given_values() -> None:
    args = parse(
        *("--prompts", "3", "--out", "there", "--limit", "5", "--rows", "2,4", "--depths", "0"),
        *("--models", "demo,smollm2", "--dtype", "bfloat16", "--only", "c,a", "--quick"),
        *("--repeats", "7", "--save", "results"),
    )
    assert (args.prompts, args.out, args.limit) == (3, Path("there"), 5)
    assert (args.rows, args.depths, args.models) == ([2, 4], [0], ["demo", "smollm2"])
    assert (args.dtype, args.only) == ("bfloat16", ["c", "a"])
    assert (args.repeats, args.save) == (7, Path("results"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--only", "a,z"), "no such case: z; there are a, b, c"),
        (("--threads", "0"), "--threads must be at least 1"),
        (("--rows", "1,x"), "invalid list of int value: '1,x'"),
        (("--dtype", "int8"), "invalid choice: 'int8'"),
        (("--prompts", "0"), "prompts are few"),
    ],
)
def test_wrong_values(
    given: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as leaving:
        parse(*given, check=lambda args: "" if args.prompts else "prompts are few")
    assert leaving.value.code == 2
    assert message in capsys.readouterr().err


def test_an_option_that_must_be_given(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(required=("traces",), traces=Path)
    assert "the following arguments are required: --traces" in capsys.readouterr().err
    assert parse("--traces", "here", required=("traces",), traces=Path).traces == Path("here")
