"""Records the parameters of FlashInfer's functions, for tests on machines that do not have it.

    python tools/record_flashinfer.py [--output FILE]

Run it in the root of the sources, with the FlashInfer version of setup.cfg installed.
tests/attention/test_flashinfer_calls.py compares the record with an installed package.
"""

from __future__ import annotations

import argparse
import json
import sys
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.attention.signatures import RECORD, installed


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--output", type=Path, default=RECORD)
    output: Path = parser.parse_args().output
    calls = ",\n".join(
        f"  {json.dumps(name)}: [\n"
        + ",\n".join(f"   {json.dumps(parameter)}" for parameter in parameters)
        + "\n  ]"
        for name, parameters in installed().items()
    )
    release = version("flashinfer-python")
    output.write_text(f'{{\n "version": {json.dumps(release)},\n "calls": {{\n{calls}\n }}\n}}\n')
    print(f"FlashInfer {release}: {output}")


if __name__ == "__main__":
    main()
