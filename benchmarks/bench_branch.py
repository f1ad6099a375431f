"""What branches save: samples, chats, beams, forks, and attention over what sequences share.

    python benchmarks/bench_branch.py [--only a,b,c,d,e] [--threads N] [--repeats N] [--quick]
        [--json] [--save DIR] [--page FILE]

    a  random samples of one prompt       b  decoding over a shared prefix, tree and flat
    c  chat sessions of several turns     d  beam search           e  forking a long branch

The model is a Llama shape with seeded random weights and the demo model's tokenizer, float32; in e
a smaller one, because a fork's cost depends on no model. branch_players.py says who takes part.
`--page docs/branching.md` puts the tables between that page's markers. Ends with 1 when something
that is claimed beside the tables is not so.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

from branch_attention import backend_name, measure_attention
from branch_forks import measure_forks
from branch_players import (
    DTYPE,
    Beams,
    Chats,
    Samples,
    chat_prompts,
    random_prompt,
    random_words,
)
from branch_report import Case, Run, race
from branch_stage import Stage
from engine_models import SHAPES, Shape, save_checkpoint
from engine_report import describe_run

DEMO = Path(__file__).parent.parent / "radixserve" / "models" / "demo"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
VOCAB = 4_096  # the demo tokenizer's
SCORE_TOLERANCE = 1e-3  # of a beam's score


@dataclass(frozen=True)
class Sizes:
    """How much of everything."""

    samples: tuple[int, int, int] = (1_024, 16, 32)  # prompt, samples, tokens of each
    rows: tuple[int, int] = (32, 2_048)  # sequences, tokens that they share
    chats: tuple[int, int, int, int] = (8, 6, 80, 32)  # sessions, turns, words a turn, tokens
    beams: tuple[int, ...] = (4, 30)
    beam_lengths: tuple[int, int] = (256, 32)  # prompt, tokens
    forked: int = 16_384 + 9  # tokens; 9 of them in the last page of 16
    fork_repeats: int = 1_000


FULL = Sizes()
QUICK = Sizes((64, 4, 6), (4, 96), (2, 2, 6, 4), (3,), (24, 5), 256 + 9, 20)


@dataclass(frozen=True)
class Bench:
    """Settings of a run and the means to measure."""

    stage: Stage
    sizes: Sizes
    folder: Path  # the model's
    long_folder: Path  # a small model's, for long branches
    repeats: int


def samples_case(bench: Bench) -> Case:
    length, count, num_new = bench.sizes.samples
    work = Samples(random_prompt(length, VOCAB, 1), count, num_new)
    names = ("radix", "cold", "transformers")
    records = bench.stage.take_turns(names, work, bench.folder, bench.repeats)
    radix, cold = records["radix"].played, records["cold"].played
    return race(
        "a",
        f"{count} samples of {num_new} tokens from a prompt of {length:,} tokens",
        records,
        {
            "the prompt is computed once, exactly": radix.num_computed == length,
            "cold requests compute it as often as it is sent": cold.num_computed == length * count,
            "the same samples as those of cold requests": radix.outputs == cold.outputs,
        },
    )


def attention_case(bench: Bench) -> Case:
    num_rows, num_shared = bench.sizes.rows
    repeats = 3 * bench.repeats
    figures = bench.stage.call(measure_attention, bench.folder, num_rows, num_shared, repeats)
    both, tree = figures.pop("both"), figures["tree"]
    rows = [
        (
            name,
            one["attention_ms"],
            f"{one['attention_ms'] / tree['attention_ms']:.2f}",
            one["plan_ms"],
            one["step_ms"],
            f"{one['step_ms'] / tree['step_ms']:.2f}",
        )
        for name, one in figures.items()
    ]
    columns = ("", "attention ms", "x", "plan ms", "step ms", "x")
    title = f"a decode step of {num_rows} sequences over {num_shared:,} shared tokens"
    is_same = both["difference"] < 1e-4 * both["size"]
    return Case("b", title, columns, rows, {"both compute the same": is_same})


def chats_case(bench: Bench) -> Case:
    sessions, turns, words, num_new = bench.sizes.chats
    said = tuple(
        tuple(random_words(words, 100 * turn + session) for session in range(sessions))
        for turn in range(turns)
    )
    work = Chats(said, num_new)
    prompts = bench.stage.call(chat_prompts, bench.folder, work)
    work = replace(work, prompts=prompts)
    records = bench.stage.take_turns(("radix", "cold"), work, bench.folder, bench.repeats)
    radix, cold = records["radix"].played, records["cold"].played
    expected, sent = _new_tokens(prompts, num_new), sum(len(p) for turn in prompts for p in turn)
    return race(
        "c",
        f"chat, {sessions} sessions x {turns} turns, {num_new} tokens an answer",
        records,
        {
            "what is new is computed, once, and nothing else": radix.num_computed == expected,
            "a cold engine computes every history whole": cold.num_computed == sent,
            "the same answers": radix.outputs == cold.outputs,
        },
    )


def _new_tokens(prompts: tuple[tuple[tuple[int, ...], ...], ...], num_new: int) -> int:
    """Tokens of the turns whose K and V no turn before has left: what was said, the template around
    it, and the last token of each answer. What the first turns have in common counts once."""
    known = {prompt[:end] for prompt in prompts[0] for end in range(1, len(prompt))}
    first = len(known) + len(prompts[0])  # the last token of a prompt is always computed
    return first + sum(
        len(now) - (len(before) + num_new - 1)
        for last, turn in pairwise(prompts)
        for before, now in zip(last, turn, strict=True)
    )


def beams_case(bench: Bench, width: int) -> Case:
    length, num_new = bench.sizes.beam_lengths
    work = Beams(random_prompt(length, VOCAB, 2), width, num_new)
    records = bench.stage.take_turns(("radix", "transformers"), work, bench.folder, bench.repeats)
    radix, peer = records["radix"].played, records["transformers"].played
    gaps = [abs(a - b) for a, b in zip(radix.scores, peer.scores, strict=True)]
    return race(
        f"d{width}",
        f"beam search of width {width}, {num_new} tokens behind a prompt of {length:,}",
        records,
        {
            "the same answers in the same order": radix.outputs == peer.outputs,
            f"scores differ by less than {SCORE_TOLERANCE:g}": max(gaps) < SCORE_TOLERANCE,
            "the prompt is computed once, exactly": radix.num_computed == length,
        },
    )


def forks_case(bench: Bench) -> Case:
    length, repeats = bench.sizes.forked, bench.sizes.fork_repeats
    figures = [
        bench.stage.call(measure_forks, bench.long_folder, length, page_size, repeats)
        for page_size in (1, 16)
    ]
    names = ("fork_us", "moved_by_forks", "moved_after", "computed_after")
    rows = [(f"page size {one['page_size']}", *(one[name] for name in names)) for one in figures]
    columns = ("", "us a fork", "bytes moved by forks", "by 8 first answers", "tokens computed")
    heads = 8 * (length % 16) * figures[1]["bytes_per_token"]
    checks = {
        "a fork moves no K and V": all(one["moved_by_forks"] == 0 for one in figures),
        "at page size 1 nothing is ever moved": figures[0]["moved_after"] == 0,
        "at page size 16 the head of one page each": figures[1]["moved_after"] == heads,
        "what the forks share is not computed again": all(
            one["computed_after"] == 8 for one in figures
        ),
    }
    return Case("e", f"forking a branch of {length:,} tokens", columns, rows, checks)


def cases(bench: Bench) -> dict[str, Callable[[], list[Case]]]:
    return {
        "a": lambda: [samples_case(bench)],
        "b": lambda: [attention_case(bench)],
        "c": lambda: [chats_case(bench)],
        "d": lambda: [beams_case(bench, width) for width in bench.sizes.beams],
        "e": lambda: [forks_case(bench)],
    }


def save_models(shape: Shape, folder: Path, long_folder: Path, longest: int) -> None:
    """The model with a tokenizer, and a smaller one for long branches."""
    save_checkpoint(shape, DTYPE, folder)
    for name in TOKENIZER_FILES:
        shutil.copy(DEMO / name, folder / name)
    save_checkpoint(replace(SHAPES["tiny"], max_positions=longest + 64), DTYPE, long_folder)


def measure(bench: Bench, names: list[str], run: Run, show: Callable[[str], None]) -> None:
    show("\n".join(run.header()) + "\n")
    for name in names:
        for case in cases(bench)[name]():
            run.cases.append(case)
            show(case.table())


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="a,b,c,d,e", metavar="CASES", help="such as a,c")
    parser.add_argument("--threads", type=int, default=1, help="for everyone (default: 1)")
    parser.add_argument("--repeats", type=int, help="default: 3, quick: 1")
    parser.add_argument("--quick", action="store_true", help="everything, shrunk")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write branch-cpu.md and .json")
    parser.add_argument("--page", type=Path, metavar="FILE", help="put the tables into this page")
    args = parser.parse_args()
    args.only = args.only.split(",")
    unknown = sorted(set(args.only) - set("abcde"))
    if unknown:
        parser.error(f"no such case: {', '.join(unknown)}; there are a, b, c, d, e")
    args.repeats = (1 if args.quick else 3) if args.repeats is None else args.repeats
    if min(args.threads, args.repeats) < 1:
        parser.error("--threads and --repeats must be at least 1")
    return args


def main() -> int:
    args = arguments()

    def show(text: str) -> None:
        print(text, file=sys.stderr if args.json else sys.stdout, flush=True)

    sizes = QUICK if args.quick else FULL
    shape = replace(SHAPES["tiny" if args.quick else "small"], vocab=VOCAB)
    asked = {"threads": args.threads, "repeats": args.repeats, "quick": args.quick}
    with tempfile.TemporaryDirectory(prefix="bench-branch-") as name:
        folder, long_folder = Path(name) / "model", Path(name) / "long"
        stage = Stage(args.threads)
        backend = stage.call(backend_name)
        run = Run(describe_run(shape, dtype=DTYPE, attention=backend, **asked), [])
        stage.call(save_models, shape, folder, long_folder, sizes.forked + 1_024)
        bench = Bench(stage, sizes, folder, long_folder, args.repeats)
        measure(bench, args.only, run, show)
    if args.json:
        print(run.document())
    if args.save is not None:
        run.save(args.save)
    if args.page is not None:
        run.write_into(args.page)
    for claim in run.failed:
        print(f"bench_branch: not so: {claim}", file=sys.stderr)
    return 1 if run.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
