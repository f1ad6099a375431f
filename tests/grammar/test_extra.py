"""llguidance is an extra: one file imports it, when a form is asked for."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def test_one_file_imports_it() -> None:
    importing = []
    for path in sorted((ROOT / "radixserve").rglob("*.py")):
        if "llguidance" not in (text := path.read_text()):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [one.name for one in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "llguidance" for name in names):
                importing.append(path.relative_to(ROOT).as_posix())
    assert set(importing) == {"radixserve/grammar/backend.py"}


def test_without_it_the_error_says_what_to_install() -> None:
    code = """
import sys
for name in ("llguidance", "torch", "transformers"):
    sys.modules[name] = None
from radixserve import InvalidRequest, SamplingParams, StructuredOutput
from radixserve.grammar.compiler import GrammarCompiler
params = SamplingParams(structured=StructuredOutput(regex="a"))
try:
    GrammarCompiler(lambda: None).compile(params.structured_outputs)
except InvalidRequest as error:
    assert 'pip install "radixserve[grammar]"' in str(error), error
else:
    raise AssertionError("it was compiled")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
