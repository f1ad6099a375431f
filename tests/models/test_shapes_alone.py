"""Reading a model's shapes alone, onto the device "meta", does no arithmetic there: PyTorch imports
torch._dynamo and sympy for it, which takes longer than all else of a start."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checkpoints import NATIVE, NATIVE_PARTS, RECURRENT, make_config
from tests.pacing import PATIENCE_S

CODE = """
import sys
sys.modules["torch._dynamo"] = sys.modules["sympy"] = None  # their import fails
from pathlib import Path
import torch
from radixserve.models.decoder_tensors import describe
from radixserve.models.source import ModelSource
from radixserve.models.weights import load_config
for folder in sorted(Path(sys.argv[1]).iterdir()):
    print(folder.name, flush=True)
    describe(ModelSource(load_config(folder), None), torch.bfloat16)
"""


def test_no_family_computes_on_meta(tmp_path: Path) -> None:
    families = (*NATIVE, *NATIVE_PARTS, *RECURRENT)
    for family in families:
        config = make_config(family)
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
        (tmp_path / family).mkdir()
        (tmp_path / family / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    command = [sys.executable, "-c", CODE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{done.stdout.split()[-1:]}: {done.stderr}"
    assert done.stdout.split() == sorted(families)
