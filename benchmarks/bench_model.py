"""A real model on real text, beside llama.cpp's server: CPU seconds, first token, memory.

    python benchmarks/bench_model.py [--model smollm2] [--form file,bfloat16] [--llama DIR]
        [--workload system,chat] [--threads N] [--repeats N] [--quick] [--save DIR]

    system   one system prompt, many questions     chat     sessions of several turns
    fewshot  long examples, short questions        docs     popular documents, two a prompt
    branch   continuations of one text             agent    calls with growing results
    alone    nothing shared

The text is Python's standard library, cut into pieces of exact length; both engines get the same
token ids and generate the same number of tokens, greedily, end tokens ignored. file: the weights as
the GGUF file holds them; bfloat16: the same, written again by llama-quantize. DIR holds
llama-server and llama-quantize (one unified K/V cache, prompt cache and host cache on); without it
radixserve runs alone. Each engine runs in a process of its own, whose CPU time is counted; they
take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
from pathlib import Path

from engine.base import Setup, Work
from engine.llama import quantize
from engine.serving import serving
from engine.turns import Record, run_engines
from harness.arguments import RUN, Names, parse
from harness.processes import Processes
from harness.report import Report, Section, Table
from harness.workloads import Prompt, Size, Workload

from radixserve.models.source import find_model
from radixserve.text.tokenizer import Tokenizer

NUM_TOKENS = 32_768  # of each engine's cache
SLOTS = 16  # of llama-server
FORMS = {"file": None, "bfloat16": "BF16"}  # llama-quantize's names
SIZES = {
    "system": Size(600, 40, 16, 32),
    "chat": Size(0, 60, 6, 32, rounds=5),
    "fewshot": Size(1_600, 50, 12, 16),
    "docs": Size(400, 20, 10, 24),
    "branch": Size(900, 8, 12, 32),
    "agent": Size(500, 120, 4, 24, rounds=6),
    "alone": Size(0, 400, 12, 32),
}
TITLES = {
    "system": "a system prompt of {shared:,} tokens, {count} questions of {own}",
    "chat": "{count} sessions of {rounds} turns of {own} tokens",
    "fewshot": "examples of {shared:,} tokens, {count} questions of {own}",
    "docs": "{count} prompts of two of 6 documents of {shared:,} tokens",
    "branch": "{count} continuations of {shared:,} tokens, {own} tokens apart",
    "agent": "{count} agents of {rounds} calls, tools of {shared:,} tokens, results of {own}",
    "alone": "{count} prompts of {own} tokens that share nothing",
}
FIRST = 60  # tokens that an agent is asked
NOTES = (
    "Medians of the repeats. CPU s: of all threads of the engine's process. first: mean time to the"
    " first token, ms. computed: prompt tokens. peak: most resident memory, MiB. Each repeat starts"
    " with nothing cached of its text: it is another cut of the library."
)


class Library:
    """Cuts of the standard library's text, as tokens."""

    def __init__(self, model: Path) -> None:
        tokenizer = Tokenizer.load(model)
        assert tokenizer is not None, f"{model} has no tokenizer"
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        text = "\n".join(path.read_text(errors="replace")[:20_000] for path in files)
        self._tokens = tokenizer.encode_more(text[:1_500_000])

    def workload(self, name: str, seed: int, scale: float) -> Workload:
        """A workload of SIZES over cuts that `seed` chooses; scale: of its sizes."""
        rng = random.Random(f"{name} {seed}")

        def cut(length: int) -> Prompt:
            start = rng.randrange(len(self._tokens) - length)
            return tuple(self._tokens[start : start + length])

        def scaled(number: int) -> int:
            return max(2, int(number * scale)) if number > 1 else number

        full = SIZES[name]
        shared, count, num_rounds = map(scaled, (full.shared, full.count, full.rounds))
        if name == "docs":
            head: Prompt = ()
            documents = [cut(shared) for _ in range(6)]
            weights = [1 / (rank + 1) for rank in range(6)]
            pairs = [rng.choices(documents, weights, k=2) for _ in range(count)]
            first = [first + second + cut(full.own) for first, second in pairs]
        else:
            head = cut(shared) if shared else ()
            first = [head + cut(FIRST if name == "agent" else full.own) for _ in range(count)]
        rounds = [first, *([cut(full.own) for _ in first] for _ in range(num_rounds - 1))]
        return Workload(name, title_of(name), tuple(map(tuple, rounds)), full.new, len(head))


def title_of(name: str) -> str:
    return f"{TITLES[name].format(**vars(SIZES[name]))}, {SIZES[name].new} new tokens"


def make_section(title: str, records: dict[str, Record]) -> Section:
    own = records["radixserve"]
    rows = []
    for name, record in records.items():
        answers = [
            [answer.token_ids for sample in series.samples for answer in sample.answers]
            for series in (record, own)
        ]
        num_same = sum(mine == theirs for mine, theirs in zip(*answers, strict=True))
        rows.append(
            (
                name,
                *(
                    f"{figure:.2f}"
                    for figure in (record.cpu_s, record.wall_s, record.cpu_s / own.cpu_s)
                ),
                f"{record.first_s * 1e3:,.0f}",
                record.num_computed,
                record.peak_mib,
                f"{num_same} of {len(answers[0])}",
            )
        )
    columns = ("", "CPU s", "s", "x CPU", "first ms", "computed", "peak MiB", "same answers")
    return Section(title, Table(columns, rows))


def llama_command(args: argparse.Namespace, file: Path) -> tuple[str, ...]:
    threads = str(args.threads)
    return (
        *(str(args.llama / "llama-server"), "-m", str(file), "--no-ui", "--log-disable"),
        *("-t", threads, "-tb", threads, "-np", str(SLOTS), "-kvu"),
        *("-c", str(NUM_TOKENS), "--cache-ram", "2048"),
    )


def check(args: argparse.Namespace) -> str:
    needs_files = args.llama is None and args.form != ["file"]
    return "other forms are written by llama-quantize: give --llama DIR" if needs_files else ""


def main() -> None:
    forms, workloads = Names("form", FORMS, ("file",)), Names("workload", SIZES)
    options = {"model": "smollm2", "form": forms, "llama": Path, "workload": workloads, **RUN}
    args = parse(__doc__, check=check, **options)
    path = Path(find_model(args.model).path)
    library, processes = Library(path), Processes(args.threads)
    report = Report("A real model, CPU", NOTES, args)
    engines = {"radixserve": "radix"} | ({"llama.cpp": "llama.cpp"} if args.llama else {})
    data = {}
    with tempfile.TemporaryDirectory(prefix="bench-model-") as folder:
        for form in args.form:
            file = quantize(args.llama, path, FORMS[form], Path(folder))
            command = llama_command(args, file) if args.llama else ()
            for name in args.workload:
                scale = 0.2 if args.quick else 1.0
                warm_up = library.workload(name, -1, 0.0)
                works = [
                    serving(library.workload(name, turn, scale), warm_up, is_burst=True)
                    for turn in range(args.repeats)
                ]
                room = Work(works[0].run, works[0].warm_up, works[0].num_requests, NUM_TOKENS)
                setup = Setup(file, "auto", room, command)
                records, absent = run_engines(processes, engines, setup, works)
                assert not absent, absent
                report.add(make_section(f"{name}, weights {form}: {title_of(name)}", records))
                data[f"{name} {form}"] = {
                    label: {
                        key: [getattr(sample, key) for sample in record.samples]
                        for key in ("cpu_s", "wall_s", "num_computed")
                    }
                    for label, record in records.items()
                }
    report.finish("model-cpu", {"cases": data})


if __name__ == "__main__":
    main()
