"""What branches save: samples, chats, beams, forks, and attention over what sequences share.

    python benchmarks/bench_branch.py [--only a,b,c,d,e] [--threads N] [--repeats N] [--quick]
        [--json] [--save DIR] [--page FILE]

    a  random samples of one prompt       b  decoding over a shared prefix, tree and flat
    c  chat sessions of several turns     d  beam search           e  forking a long branch

radix is radixserve as it is, cold the same with cache="off": every request is computed whole;
transformers is its `generate` on the same checkpoint. The model is a Llama shape with seeded random
weights and the demo model's tokenizer, float32; in e a smaller one, because a fork's cost depends
on no model. `--page docs/branching.md` puts the tables between that page's markers. Ends with 1
when a claim beside the tables does not hold.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from branching.measures import backend_name, measure_attention, measure_forks
from branching.work import beams, chats, new_tokens, random_prompt, random_words, samples
from engine.base import Setup, Work
from engine.turns import Record, run_engines
from harness.arguments import RUN, Names, parse
from harness.processes import Processes
from harness.report import Cell, Report, Section, Table, replace_block
from harness.shapes import DEMO_VOCAB, SHAPES, Shape, save_checkpoint

DTYPE = "float32"
SCORE_TOLERANCE = 1e-3  # of a beam's score
ENGINES = {"radix": "radix", "cold": "off", "transformers": "transformers"}
# What the engines import, as far as that computes nothing.
PRELOAD = ("branching.measures", "engine.transformers_engines")
NOTES = (
    "Medians of the repeats. s: wall clock; CPU s: of all threads of the process; x: over the first"
    " row. computed: prompt tokens computed, padding included. peak: most resident memory of the"
    " process while the case ran, with interpreter, libraries and weights. Engines run in processes"
    " of their own, in turns, each turn with nothing cached. Lines that begin with ok were checked"
    " in this run; a run in which one fails ends with an error."
)


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
class Case:
    """One table; `checks`: claims about this run and whether they hold."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[Cell, ...]]
    checks: dict[str, bool] = field(default_factory=dict)

    @property
    def failed(self) -> list[str]:
        return [f"{self.name}: {claim}" for claim, holds in self.checks.items() if not holds]

    def section(self) -> Section:
        lines = [f"{'ok' if holds else 'FAILED'}: {claim}" for claim, holds in self.checks.items()]
        return Section(f"{self.name}  {self.title}", Table(self.columns, self.rows), lines)


@dataclass(frozen=True)
class Bench:
    """Settings of a run and the means to measure."""

    processes: Processes
    sizes: Sizes
    shape: Shape
    folder: Path  # the model's
    long_folder: Path  # a small model's, for long branches
    repeats: int

    def compare(self, names: tuple[str, ...], work: Work) -> dict[str, Record]:
        engines = {name: ENGINES[name] for name in names}
        setup = Setup(self.folder, DTYPE, work)
        records, absent = run_engines(self.processes, engines, setup, [work] * self.repeats)
        assert not absent, absent
        return records


def make_case(name: str, title: str, records: dict[str, Record], checks: dict[str, bool]) -> Case:
    """The table of engines that took turns; times are held against the first one's."""
    first = next(iter(records.values())).wall_s
    rows: list[tuple[Cell, ...]] = [
        (
            label,
            record.wall_s,
            record.cpu_s,
            f"{record.wall_s / first:.2f}",
            record.num_computed,
            record.peak_mib,
        )
        for label, record in records.items()
    ]
    return Case(name, title, ("", "s", "CPU s", "x", "computed", "peak MiB"), rows, checks)


def samples_case(bench: Bench) -> Iterator[Case]:
    length, count, num_new = bench.sizes.samples
    work = samples(random_prompt(length, DEMO_VOCAB, 1), count, num_new)
    records = bench.compare(("radix", "cold", "transformers"), work)
    radix, cold = records["radix"], records["cold"]
    checks = {
        "the prompt is computed once, its last token once a sample": radix.num_computed
        == length + count - 1,
        "cold requests compute it as often as it is sent": cold.num_computed == length * count,
        "the same samples as those of cold requests": radix.outputs == cold.outputs,
    }
    title = f"{count} samples of {num_new} tokens from a prompt of {length:,} tokens"
    yield make_case("a", title, records, checks)


def attention_case(bench: Bench) -> Iterator[Case]:
    num_rows, shared = bench.sizes.rows
    arguments = (bench.folder, bench.shape, DTYPE, num_rows, shared, 3 * bench.repeats)
    figures, difference = bench.processes.call(measure_attention, *arguments)
    tree = figures["tree"]
    rows: list[tuple[Cell, ...]] = []
    for name, record in figures.items():
        ratios = [f"{record[what] / tree[what]:.2f}" for what in ("attention_ms", "step_ms")]
        rows.append(
            (
                name,
                record["attention_ms"],
                ratios[0],
                record["plan_ms"],
                record["step_ms"],
                ratios[1],
            )
        )
    columns = ("", "attention ms", "x", "plan ms", "step ms", "x")
    title = f"a decode step of {num_rows} sequences over {shared:,} shared tokens"
    yield Case("b", title, columns, rows, {"both compute the same": difference < 1e-4})


def chats_case(bench: Bench) -> Iterator[Case]:
    sessions, turns, words, num_new = bench.sizes.chats
    said = [
        [random_words(words, 100 * turn + session) for session in range(sessions)]
        for turn in range(turns)
    ]
    records = bench.compare(("radix", "cold"), chats(said, num_new))
    radix, cold = records["radix"], records["cold"]
    answers = radix.samples[0].answers
    sent = sum(len(answer.prompt) for answer in answers)
    checks = {
        "new tokens are computed, once, and no others": radix.num_computed
        == new_tokens(answers, sessions, num_new),
        "a cold engine computes every history whole": cold.num_computed == sent,
        "the same answers": radix.outputs == cold.outputs,
    }
    title = f"chat, {sessions} sessions x {turns} turns, {num_new} tokens an answer"
    yield make_case("c", title, records, checks)


def beams_case(bench: Bench) -> Iterator[Case]:
    length, num_new = bench.sizes.beam_lengths
    for width in bench.sizes.beams:
        work = beams(random_prompt(length, DEMO_VOCAB, 2), width, num_new)
        records = bench.compare(("radix", "transformers"), work)
        radix, peer = records["radix"], records["transformers"]
        pairs = zip(radix.samples[0].answers, peer.samples[0].answers, strict=True)
        gap = max(abs(mine.score - other.score) for mine, other in pairs)
        checks = {
            "the same answers in the same order": radix.outputs == peer.outputs,
            f"scores differ by less than {SCORE_TOLERANCE:g}": gap < SCORE_TOLERANCE,
            "the prompt is computed once, exactly": radix.num_computed == length,
        }
        title = f"beam search of width {width}, {num_new} tokens after a prompt of {length:,}"
        yield make_case(f"d{width}", title, records, checks)


def forks_case(bench: Bench) -> Iterator[Case]:
    length, repeats = bench.sizes.forked, bench.sizes.fork_repeats
    small, large = (
        bench.processes.call(measure_forks, bench.long_folder, DTYPE, length, page_size, repeats)
        for page_size in (1, 16)
    )
    names = ("fork_us", "moved_by_forks", "moved_after", "computed_after")
    rows: list[tuple[Cell, ...]] = [
        (f"page size {record['page_size']}", *(record[name] for name in names))
        for record in (small, large)
    ]
    columns = ("", "us a fork", "bytes moved by forks", "by 8 first answers", "tokens computed")
    heads = 8 * (length % 16) * large["bytes_per_token"]
    checks = {
        "a fork moves no K and V": small["moved_by_forks"] == large["moved_by_forks"] == 0,
        "at page size 1 nothing is ever moved": small["moved_after"] == 0,
        "at page size 16 the head of one page each": large["moved_after"] == heads,
        "tokens that the forks share are not computed again": small["computed_after"]
        == large["computed_after"]
        == 8,
    }
    yield Case("e", f"forking a branch of {length:,} tokens", columns, rows, checks)


_CASES = (samples_case, attention_case, chats_case, beams_case, forks_case)
CASES: dict[str, Callable[[Bench], Iterator[Case]]] = dict(zip("abcde", _CASES, strict=True))


def save_models(shape: Shape, folder: Path, long_folder: Path, longest: int) -> None:
    """The model with a tokenizer, and a smaller one for long branches."""
    save_checkpoint(shape, DTYPE, folder, has_tokenizer=True)
    save_checkpoint(replace(SHAPES["tiny"], max_positions=longest + 64), DTYPE, long_folder)


def write_page(page: Path, report: Report, cases: list[Case]) -> None:
    """Put the tables between the markers of a page."""
    names = ("cpu", "cores", "python", "torch", "transformers", "model", "attention", "threads")
    facts = ", ".join(f"{k} {report.settings[k]}" for k in names if k in report.settings)
    tables = [f"**{case.title}**\n\n{case.section().table.markdown()}" for case in cases]
    text = "\n\n".join([f"Measured with: {facts}.", *tables])
    page.write_text(replace_block(page.read_text(), "branch-cpu", text))


def main() -> int:
    args = parse(__doc__, only=Names("case", CASES), page=Path, **RUN)
    sizes, model = (QUICK, "tiny") if args.quick else (FULL, "small")
    shape = replace(SHAPES[model], vocab=DEMO_VOCAB)
    processes = Processes(args.threads, PRELOAD)
    about = {"model": model, "shape": str(shape), "dtype": DTYPE}
    attention = processes.call(backend_name, DTYPE)
    packages = ("torch", "transformers")
    report = Report("Branches, CPU", NOTES, args, packages, **about, attention=attention)
    cases: list[Case] = []
    with tempfile.TemporaryDirectory(prefix="bench-branch-") as name:
        folder, long_folder = Path(name) / "model", Path(name) / "long"
        processes.call(save_models, shape, folder, long_folder, sizes.forked + 1_024)
        bench = Bench(processes, sizes, shape, folder, long_folder, args.repeats)
        for case in (case for letter in args.only for case in CASES[letter](bench)):
            cases.append(case)
            report.add(case.section())
    report.finish("branch-cpu", {"cases": [asdict(case) for case in cases]})
    if args.page is not None:
        write_page(args.page, report, cases)
    failed = [claim for case in cases for claim in case.failed]
    for claim in failed:
        print(f"bench_branch: does not hold: {claim}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
