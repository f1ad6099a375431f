"""What a form costs: the same requests with and without one, by turns, and each mask by itself.

    python benchmarks/bench_structured.py [--rows 32] [--tokens 32] [--threads N] [--repeats N]
        [--quick] [--json] [--save DIR]

The model is the benchmarks' small shape with a vocabulary of 131,072 and seeded random weights in
bfloat16; the tokenizer has as many tokens, made from syllables. Every request runs to its last
token: ignore_eos, and a JSON schema with a list that does not end before. A step is one decode step
of all rows. Structured and plain requests take turns; figures are medians of the turns. Ends with 1
when the form costs more than 5 % of a step.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import sys
import tempfile
import time
import timeit
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from harness.arguments import RUN, parse
from harness.processes import take_turns
from harness.report import Report, Section, Table
from harness.shapes import SHAPES, save_checkpoint

from radixserve import Completion, Runtime, SamplingParams, StructuredOutput
from radixserve.grammar.compiler import GrammarCompiler

VOCAB = 131_072
MOST = 0.05  # of a step
NOTES = (
    "ms a step: over the number of steps. CPU: of all threads of the process, so that other"
    " processes do not count; wall: the clock's; sample: of the clock, after the forward pass."
    " masks alone: CPU time of each mask of the structured answers, computed again in one thread."
)
ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 4, "maxLength": 40},
        "kind": {"enum": ["person", "place", "thing"]},
        "weight": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 5},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "kind", "weight", "tags", "where"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 1_000}


def write_tokenizer(folder: Path) -> None:
    """All bytes, then words of syllables, each with and without a space or a quote before it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = dict.fromkeys(alphabet)
    tokens.update(dict.fromkeys(('{"', '":', '",', '"}', '"]', "},", "],", '["', "ĊĊ", "ĠĠ")))
    tokens.update(dict.fromkeys(f"{number}" for number in range(1_000)))
    syllables = [
        "".join(letters) for letters in itertools.product("bcdfghklmnprst", "aeiou", ("", "n"))
    ]
    rng = random.Random(0)
    while len(tokens) < VOCAB - 1:
        word = "".join(rng.choices(syllables, k=rng.randrange(1, 5)))
        tokens[rng.choice(("", "Ġ", '"')) + rng.choice((word, word.capitalize()))] = None
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def turn(
    rt: Runtime, rows: int, params: SamplingParams, _number: int
) -> tuple[dict[str, float], list[Completion]]:
    """One batch: what a decode step took, in milliseconds, and the answers."""
    rng = random.Random(1)
    prompts = [[rng.randrange(300, VOCAB - 1) for _ in range(16)] for _ in range(rows)]
    rt.flush_cache()
    rt.generate(prompts, replace(params, max_tokens=1))  # from now on steps are decode steps
    before, began, cpu = rt.cache_stats(), time.perf_counter(), time.process_time()
    answers = rt.generate(prompts, params)
    seconds = {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}
    after = rt.cache_stats()
    num_steps = after["steps"] - before["steps"]
    assert all(len(answer.token_ids) == params.max_tokens for answer in answers)
    spent = {name: after[name] - before[name] for name in ("forward_s", "sample_s")}
    per_step = {name: 1e3 * spent_s / num_steps for name, spent_s in (seconds | spent).items()}
    return {**per_step, "steps": num_steps}, answers


def masks_alone(rt: Runtime, form: StructuredOutput, answers: list[Completion]) -> list[float]:
    """Microseconds of every mask of the answers, in this thread."""
    assert rt.tokenizer is not None
    grammar = GrammarCompiler(lambda: rt.tokenizer.backend).compile(form)
    spans = []
    for answer in answers:
        matcher = grammar.matcher(frozenset())
        row = np.zeros(matcher.num_words, np.int32)
        for token_id in answer.token_ids:
            began = time.thread_time()
            matcher.compute(row)
            matcher.finish_row(row)
            matcher.accept(token_id)
            spans.append(1e6 * (time.thread_time() - began))
    return spans


def main() -> int:
    args = parse(__doc__, rows=32, tokens=32, **RUN)
    shape = replace(SHAPES["tiny" if args.quick else "small"], vocab=VOCAB)
    head = [f"model: {shape}, bfloat16"]
    report = Report("Structured output", NOTES, args, ("torch", "llguidance"), head)
    import torch

    torch.set_num_threads(args.threads)
    form = StructuredOutput(json=SCHEMA)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_checkpoint(shape, "bfloat16", folder)
        write_tokenizer(folder)
        with Runtime(folder, num_pages=8_000, max_running_requests=args.rows) as rt:
            table_s, compile_s = (
                timeit.timeit(partial(rt.compile_grammar, structured), number=1)
                for structured in (StructuredOutput(regex="a"), form)
            )
            temperatures = [
                measure(rt, report, form, args, temperature) for temperature in (0.0, 1.0)
            ]
            data = {"table_s": table_s, "compile_s": compile_s, "temperatures": temperatures}
    line = f"tokens as a trie {table_s:.2f} s, once; the schema {1e3 * compile_s:.2f} ms, once"
    is_kept = all(row["share"] <= MOST for row in temperatures)
    verdict = f"{'ok' if is_kept else 'FAILED'}: a form costs at most {MOST:.0%} of a step"
    report.finish("structured-cpu", data, tail=[line, verdict])
    return int(not is_kept)


def measure(
    rt: Runtime, report: Report, form: StructuredOutput, args: argparse.Namespace, heat: float
) -> dict[str, Any]:
    plain = SamplingParams(max_tokens=args.tokens, temperature=heat, seed=1, ignore_eos=True)
    kinds = {"plain": plain, "structured": replace(plain, structured=form)}
    operations = {name: partial(turn, rt, args.rows, params) for name, params in kinds.items()}
    turns = take_turns(operations, args.repeats, warm_up=1)
    middle = {
        name: {part: statistics.median(turn[part] for turn, _ in several) for part in several[0][0]}
        for name, several in turns.items()
    }
    pairs = zip(turns["structured"], turns["plain"], strict=True)
    share = statistics.median(a["cpu_s"] / b["cpu_s"] for (a, _), (b, _) in pairs) - 1
    masks = masks_alone(rt, form, turns["structured"][-1][1])
    alone = {"mean": statistics.fmean(masks), "p50": float(np.percentile(masks, 50)),
             "p99": float(np.percentile(masks, 99))}  # fmt: skip
    mask_share = alone["mean"] * args.rows / 1e3 / middle["structured"]["cpu_s"]
    title = "greedy" if not heat else f"temperature {heat:g}"
    parts = ("cpu_s", "wall_s", "forward_s", "sample_s")
    rows = [(name, *(figures[part] for part in parts)) for name, figures in middle.items()]
    lines = [
        f"a structured step over a plain one: {share:+.1%} (median of {args.repeats} pairs)",
        f"masks alone: mean {alone['mean']:.0f} us, p50 {alone['p50']:.0f} us, "
        f"p99 {alone['p99']:.0f} us; {args.rows} of them are {mask_share:.1%} of a step",
    ]
    columns = (title, "CPU ms", "wall ms", "forward ms", "sample ms")
    report.add(Section(title, Table(columns, rows), lines))
    return {"title": title, "share": share, "mask_share": mask_share, "masks_us": alone, **middle}


if __name__ == "__main__":
    sys.exit(main())
