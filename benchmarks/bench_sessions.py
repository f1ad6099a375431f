"""What the session headers of unmodified clients save, over HTTP, in a pool that is too small.

    python benchmarks/bench_sessions.py [--trace FILE] [--every 3] [--conversations 67]
        [--scale 0.25] [--beside 3] [--beside-tokens 375] [--returning 0] [--pool 12000]
        [--lease-shares 0.5] [--admissions priced,greedy] [--threads N] [--quick] [--json]
        [--save DIR]

Agents' conversations are replayed against `radixserve serve`: each request continues the one
before it and its answer with new tokens. The model is very small, with random weights: the counts
do not depend on it. Between two of them --beside prompts that never come again are sent, without a
session. The same requests are sent one after another to new servers. With each of --admissions:
without a header, and with the header that Claude Code sends (x-claude-code-session-id); at last
without one to a pool in which everything fits.

The sizes are those of a trace, or of a built-in shape like tau_airline's: one system prompt of
4,135 tokens, about 12 requests a conversation, 5 conversations at a time. --scale multiplies all
lengths, --every takes each so-manieth conversation of the trace. --returning 20 draws the prompts
beside from 20 that come again and again. --lease-shares 0.5,0.9 sends the requests with the header
to a server for each of these values of --max-lease-share, with greedy admission: priced admission
has no leases. Tokens are random: only lengths and their order count. Requests are sent one at a
time, so that the counts of greedy admission are the same every time.
"""

from __future__ import annotations

import argparse
import heapq
import http.client
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.arguments import REPORT, parse
from harness.processes import Processes, ServerProcess, python_path
from harness.report import Cell, Report, Section, Table
from harness.shapes import DEMO_VOCAB, Shape, save_checkpoint

HEADER = "x-claude-code-session-id"
MODEL = Shape(1, 64, 2, 1, 32, 128, DEMO_VOCAB, max_positions=16_384)
LOWEST_ID, HIGHEST_ID = 300, 4_000  # of its tokenizer's ordinary tokens
MAX_LENGTH = MODEL.max_positions - 64  # of a prompt and its answer
NOTES = (
    "hit: tokens of prompts that were found in the cache. Unless they return, prompts beside the"
    " agents find nothing. The counts do not depend on the machine."
)


@dataclass(frozen=True)
class Turn:
    """One request of a conversation: so many tokens after what was there, and so many generated."""

    conversation: str
    num_new: int
    num_output: int


@dataclass(frozen=True)
class Workload:
    """`turns` in the order in which they are sent; all conversations begin with the same `shared`
    tokens."""

    name: str
    num_shared: int
    turns: Sequence[Turn]


@dataclass
class Counts:
    """Of all requests of a kind."""

    requests: int = 0
    prompt: int = 0
    cached: int = 0

    def add(self, usage: dict[str, Any]) -> None:
        self.requests += 1
        self.prompt += usage["prompt_tokens"]
        self.cached += usage["prompt_tokens_details"]["cached_tokens"]

    @property
    def hit_percent(self) -> float:
        return 100 * self.cached / max(1, self.prompt)

    @property
    def computed(self) -> int:
        return self.prompt - self.cached


@dataclass
class Outcome:
    agents: Counts = field(default_factory=Counts)
    beside: Counts = field(default_factory=Counts)
    evicted: int = 0


# -- workloads -------------------------------------------------------------------------------------


def built_in(num_conversations: int, scale: float, seed: int = 5) -> Workload:
    """A shape like tau_airline's, 5 conversations at a time: lengths and gaps are drawn."""
    rng = random.Random(seed)
    ready: list[tuple[float, int]] = []  # (time of the next request, conversation)
    left = {number: 1 + int(rng.expovariate(1 / 11.3)) for number in range(num_conversations)}
    waiting = list(range(num_conversations))[::-1]
    for _ in range(min(5, num_conversations)):
        heapq.heappush(ready, (rng.random(), waiting.pop()))
    turns = []
    while ready:
        now, number = heapq.heappop(ready)
        tokens = rng.lognormvariate(5.0, 0.8), rng.lognormvariate(4.1, 0.6)
        num_new, num_output = (max(1, round(scale * length)) for length in tokens)
        turns.append(Turn(str(number), num_new, num_output))
        left[number] -= 1
        if left[number]:
            heapq.heappush(ready, (now + rng.lognormvariate(1.2, 0.8), number))
        elif waiting:
            heapq.heappush(ready, (now + rng.random(), waiting.pop()))
    return Workload("built in", round(scale * 4_135), _within_context(turns, round(scale * 4_135)))


def of_trace(path: Path, every: int, num_conversations: int, scale: float) -> Workload:
    """The lengths of a trace's conversations, in the order of its times."""
    from radixserve.replay.reader import read_trace

    trace = read_trace(path)
    names = list(dict.fromkeys(name for name in trace.sessions if name is not None))
    chosen = set(names[::every][:num_conversations])
    lengths: dict[str, int] = {}
    first_prompts = []
    turns = []
    for index, name in enumerate(trace.sessions):
        if name not in chosen or name is None:
            continue
        prompt, output = int(trace.num_prompt[index]), int(trace.num_output[index])
        if name not in lengths and len(first_prompts) < 8:
            first_prompts.append(trace.request(index).prompt)
        num_new = prompt - lengths.get(name, 0)
        lengths[name] = prompt + output
        turns.append(Turn(name, max(1, round(scale * num_new)), max(1, round(scale * output))))
    num_shared = _common(first_prompts)
    begun: set[str] = set()
    for index, turn in enumerate(turns):
        if turn.conversation not in begun:  # the shared tokens are counted apart
            begun.add(turn.conversation)
            num_new = max(1, turn.num_new - round(scale * num_shared))
            turns[index] = Turn(turn.conversation, num_new, turn.num_output)
    num_shared = round(scale * num_shared)
    return Workload(path.name.partition(".")[0], num_shared, _within_context(turns, num_shared))


def _common(prompts: Sequence[Any]) -> int:
    """Tokens that all prompts begin with."""
    count = min(map(len, prompts))
    first = prompts[0][:count]
    for prompt in prompts[1:]:
        differs = prompt[:count] != first
        if differs.any():
            count = int(differs.argmax())
            first = first[:count]
    return count


def _within_context(turns: Sequence[Turn], num_shared: int) -> list[Turn]:
    """Without the turns of conversations that have outgrown the model's context."""
    lengths: dict[str, int] = {}
    kept = []
    for turn in turns:
        length = lengths.get(turn.conversation, num_shared) + turn.num_new + turn.num_output
        lengths[turn.conversation] = length
        if length <= MAX_LENGTH:
            kept.append(turn)
    return kept


# -- a run -----------------------------------------------------------------------------------------


def requests_of(
    workload: Workload, num_beside: int, beside_tokens: int, num_returning: int, seed: int = 1
) -> Iterator[tuple[str | None, list[int], int]]:
    """(conversation, its new tokens, tokens to generate); without a conversation it stands
    alone."""
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(LOWEST_ID, HIGHEST_ID) for _ in range(count)]

    shared = tokens(workload.num_shared)
    returning = [tokens(beside_tokens) for _ in range(num_returning)]
    begun: set[str] = set()
    for turn in workload.turns:
        for _ in range(num_beside):
            yield None, list(rng.choice(returning)) if returning else tokens(beside_tokens), 2
        head = [] if turn.conversation in begun else shared
        begun.add(turn.conversation)
        yield turn.conversation, head + tokens(turn.num_new), turn.num_output


def replay(port: int, workload: Workload, args: argparse.Namespace, header: str | None) -> Outcome:
    """Send all requests, one at a time."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    outcome, histories = Outcome(), dict[str, list[int]]()

    def ask(path: str, body: dict[str, Any] | None, headers: dict[str, str]) -> Any:
        content = None if body is None else json.dumps(body)
        connection.request("GET" if body is None else "POST", path, content, headers)
        answer = connection.getresponse()
        data = answer.read()
        assert answer.status == 200, data
        return json.loads(data)

    requests = requests_of(workload, args.beside, args.beside_tokens, args.returning)
    for conversation, new, num_output in requests:
        headers = {"content-type": "application/json"}
        if conversation is not None and header is not None:
            headers[header] = f"session-{conversation}"
        history = [] if conversation is None else histories.setdefault(conversation, [])
        history += new
        body = {
            "prompt": history,
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        answer = ask("/v1/completions", body, headers)
        history += answer["choices"][0]["token_ids"]
        counts = outcome.beside if conversation is None else outcome.agents
        counts.add(answer["usage"])
    outcome.evicted = ask("/v1/cache/stats", None, {})["evicted_tokens"]
    connection.close()
    return outcome


def measure(
    folder: Path,
    workload: Workload,
    args: argparse.Namespace,
    pool: int,
    header: str | None,
    *settings: str,
) -> Outcome:
    """With a server of its own."""
    with tempfile.TemporaryDirectory() as logs:
        command = [sys.executable, "-m", "radixserve", "serve", str(folder), f"--num-pages={pool}"]
        command += settings
        log = Path(logs) / "log"
        served = ServerProcess(command, "/health/ready", log, PYTHONPATH=python_path())
        try:
            return replay(served.port, workload, args, header)
        finally:
            assert served.close() == 0, log.read_text()


def main() -> None:
    args = parse(
        __doc__, trace=Path, every=3, conversations=67, scale=0.25, beside=3, beside_tokens=375,
        returning=0, pool=12_000, lease_shares="0.5", admissions="priced,greedy", threads=1,
        quick=False, **REPORT,
    )  # fmt: skip
    if args.quick:
        args.conversations, args.scale, args.beside_tokens, args.pool = 8, 0.05, 75, 1_500
    if args.trace is None:
        workload = built_in(args.conversations, args.scale)
    else:
        workload = of_trace(args.trace, args.every, args.conversations, args.scale)
    everything = sum(turn.num_new + turn.num_output for turn in workload.turns)
    everything += len(workload.turns) * args.beside * (args.beside_tokens + 2)
    num_conversations = len({turn.conversation for turn in workload.turns})
    report = Report(
        "Session headers over HTTP", NOTES, args, ("torch", "fastapi", "uvicorn"),
        workload=f"{workload.name}: {num_conversations} conversations, {len(workload.turns)}"
        f" requests, {workload.num_shared} shared tokens",
    )  # fmt: skip
    roomy = everything + workload.num_shared + MAX_LENGTH
    runs: dict[str, tuple[int, str | None, tuple[str, ...]]] = {}
    for admission in args.admissions.split(","):
        setting = f"--admission={admission}"
        runs[f"{admission}, no header"] = args.pool, None, (setting,)
        if admission == "priced":
            runs[f"{admission}, {HEADER}"] = args.pool, HEADER, (setting,)
            continue
        for share in args.lease_shares.split(","):
            leases = f"--max-lease-share={share}"
            name = f"{admission}, {HEADER}, leases {float(share):.0%}"
            runs[name] = args.pool, HEADER, (setting, leases)
    runs["no header, a pool for everything"] = roomy, None, ()
    rows: list[list[Cell]] = []
    data: dict[str, Any] = {}
    model = tempfile.TemporaryDirectory()
    folder = Path(model.name)
    Processes(args.threads).call(save_checkpoint, MODEL, "float32", folder, has_tokenizer=True)
    for name, (pool, header, settings) in runs.items():
        outcome = measure(folder, workload, args, pool, header, *settings)
        agents, beside = outcome.agents, outcome.beside
        rows.append([
            name, pool, round(agents.hit_percent, 1), round(beside.hit_percent, 1), agents.computed,
            agents.computed + beside.computed, outcome.evicted,
        ])  # fmt: skip
        data[name] = {
            "pool": pool, "agents": vars(agents), "beside": vars(beside),
            "evicted": outcome.evicted,
        }  # fmt: skip
    model.cleanup()
    columns = [
        "requests", "pool", "agents' hit %", "others' hit %", "agents computed", "all computed",
        "evicted",
    ]  # fmt: skip
    title = f"{workload.name}, {args.beside} other prompts of {args.beside_tokens} tokens a request"
    if args.returning:
        title += f", drawn from {args.returning}"
    report.add(Section(title, Table(columns, rows)))
    report.finish("sessions-http", {"runs": data})


if __name__ == "__main__":
    main()
