"""OpenVINO GenAI's continuous batching on CPUs as an `Engine`, in the same process.

It does not tell which prompt tokens it computed: all of them are counted. It cannot forget: `reset`
builds it anew and warms it up, on prompts that are others than those measured.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.base import Answer, Engine, Prompts, Setup, Unavailable

CACHE_GIB = 2
BATCH_TOKENS = 512  # of one step; radixserve's default
_PRECISIONS = {"float32": "f32", "bfloat16": "bf16"}


class OpenVinoEngine(Engine):
    def __init__(self, setup: Setup) -> None:
        """Exports the checkpoint into a folder below it, once. Raises Unavailable."""
        try:
            import openvino
            import openvino_genai
        except ImportError as error:
            raise Unavailable(f"it is not installed: {error}") from error
        self._setup, self._folder = setup, setup.folder / "openvino"
        if not self._folder.exists():
            _export(setup.folder, self._folder)
        self._tensor, self._genai, self._pipeline = openvino.Tensor, openvino_genai, None
        self._ids = itertools.count()

    def serve(self, prompts: Prompts, _sessions: Sequence[int], num_new: int) -> list[Answer]:
        pipeline: Any = self._pipeline
        how = {"max_new_tokens": num_new, "ignore_eos": True, "do_sample": False}
        config = self._genai.GenerationConfig(**how)
        start, first = time.perf_counter(), [0.0] * len(prompts)
        token_ids: list[list[int]] = [[] for _ in prompts]
        handles = [
            pipeline.add_request(next(self._ids), self._tensor([prompt]), config)
            for prompt in prompts
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for number, handle in enumerate(handles):
                if handle.can_read():
                    first[number] = first[number] or time.perf_counter() - start
                    for output in handle.read().values():
                        token_ids[number] += output.generated_ids
        self.num_computed += sum(map(len, prompts))
        return list(map(Answer, token_ids, first))

    def reset(self) -> None:
        self._pipeline = None  # before the next takes its memory
        scheduling = self._genai.SchedulerConfig()
        scheduling.cache_size = CACHE_GIB
        scheduling.max_num_batched_tokens = BATCH_TOKENS
        scheduling.enable_prefix_caching = True
        properties = {
            "INFERENCE_NUM_THREADS": int(os.environ["OMP_NUM_THREADS"]),
            "INFERENCE_PRECISION_HINT": _PRECISIONS[self._setup.dtype],
        }
        make = self._genai.ContinuousBatchingPipeline
        self._pipeline = make(self._folder, scheduling, "CPU", properties)
        self._setup.work.warm_up(self)
        super().reset()


def _export(checkpoint: Path, folder: Path) -> None:
    """Also writes the tokenizer that the pipeline asks for, an empty one where the checkpoint has
    none; nothing uses it. Raises Unavailable."""
    program = shutil.which("optimum-cli")  # may have an environment of its own
    if program is None:
        raise Unavailable("optimum-cli, which exports the model, is not on the PATH")
    command = [program, "export", "openvino", "--task", "text-generation-with-past"]
    subprocess.run([*command, "--model", checkpoint, folder], check=True, capture_output=True)
