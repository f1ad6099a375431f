"""The JSON Schema Test Suite (draft 2020-12) against structured output.

    pip download --no-deps --no-binary :all: jsonschema==4.26.0 && tar xzf jsonschema-4.26.0.tar.gz
    python benchmarks/json_schema_suite.py jsonschema-4.26.0/json --page docs/structured-output.md

Each schema is compiled for the demo model's tokens. Of an accepted one finished answers are drawn
by random walks over the allowed tokens and validated with `jsonschema`; and the suite's own
instances are read token by token. Outcomes of a schema:

    valid    every finished answer is valid, and no instance that the suite calls invalid is taken
    refused  InvalidRequest at once, with its reason
    long     no walk finished within the bound; every prefix was accepted
    wrong    a finished answer is not valid, or an invalid instance is taken
    failed   another exception, or an error of the parser in the middle of an answer

Columns of instances, of accepted schemas: `taken` of the valid ones (a form may be narrower than
its schema: keys in their order, no white space), `kept out` of the invalid ones.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from radixserve.api.runtime import DEMO
from radixserve.errors import InvalidRequest
from radixserve.grammar.backend import TokenTable, compile_matcher
from radixserve.structured_outputs import StructuredOutput
from radixserve.text.tokenizer import Tokenizer

DRAFT = "draft2020-12"
OUTCOMES = ("valid", "refused", "long", "wrong", "failed")
WALKS = 40  # of a schema
LONGEST = 160  # tokens of a walk
HURRIED_AFTER = 20  # tokens; then closing brackets and quotes are preferred
MARK = ("<!-- json-schema-suite -->", "<!-- end of json-schema-suite -->")


@dataclass(frozen=True)
class Case:
    """A schema of the suite."""

    keyword: str  # the file
    name: str
    schema: Any
    valid: tuple[Any, ...]  # instances
    invalid: tuple[Any, ...]


@dataclass
class Outcome:
    kind: str
    num_answers: int = 0
    detail: str = ""
    num_taken: int = 0
    num_kept_out: int = 0


@dataclass
class Vocabulary:
    """The demo model's tokens."""

    tokenizer: Tokenizer
    table: TokenTable
    closing: Any = field(init=False)
    first_bytes: Any = field(init=False)  # of each token

    def __post_init__(self) -> None:
        texts = ('"', "}", "]", "null", "true", "0")
        self.closing = np.array([t for text in texts for t in self.tokenizer.encode_more(text)])
        size = 32 * self.table.num_words
        texts_of = (self.tokenizer.bytes_of(token) for token in range(self.table.end_id))
        firsts = [(text or b" ")[0] for text in texts_of]
        self.first_bytes = np.array(firsts + [0] * (size - len(firsts)))


def load_vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    return Vocabulary(tokenizer, TokenTable(tokenizer.backend))


def cases(suite: Path) -> Iterator[Case]:
    """The schemas of the draft's required tests, in order of their files."""
    for path in sorted((suite / "tests" / DRAFT).glob("*.json")):
        for group in json.loads(path.read_text(encoding="utf-8")):
            instances: dict[bool, list[Any]] = {True: [], False: []}
            for test in group["tests"]:
                instances[test["valid"]].append(test["data"])
            yield Case(
                path.stem,
                group["description"],
                group["schema"],
                tuple(instances[True]),
                tuple(instances[False]),
            )


def validator_of(suite: Path, schema: Any) -> Any:
    """A validator that knows the suite's remote schemas."""
    from jsonschema import Draft202012Validator
    from referencing import Registry
    from referencing.jsonschema import DRAFT202012

    remotes = suite / "remotes"
    resources = [
        (f"http://localhost:1234/{path.relative_to(remotes).as_posix()}",
         DRAFT202012.create_resource(json.loads(path.read_text(encoding="utf-8"))))
        for path in remotes.rglob("*.json")
        if DRAFT in path.parts or path.parent == remotes
    ]  # fmt: skip
    return Draft202012Validator(schema, registry=Registry().with_resources(resources))


def outcome_of(case: Case, suite: Path, vocabulary: Vocabulary, *, closes: bool) -> Outcome:
    """Compile and draw."""
    try:
        form = StructuredOutput(
            json=case.schema, disable_any_whitespace=True, disable_additional_properties=closes
        )
        start = compile_matcher(form, vocabulary.table)
    except InvalidRequest as error:
        return Outcome("refused", detail=str(error))
    except Exception as error:
        return Outcome("failed", detail=repr(error))
    for instance in case.invalid:
        if takes(start.deep_copy(), vocabulary, instance):
            return Outcome("wrong", detail=f"takes {json.dumps(instance)}")
    num_taken = sum(takes(start.deep_copy(), vocabulary, instance) for instance in case.valid)
    validator = validator_of(suite, case.schema)
    outcome = Outcome("long", num_taken=num_taken, num_kept_out=len(case.invalid))
    for seed in range(WALKS):
        try:
            text = walk(start.deep_copy(), vocabulary, random.Random(seed))
        except RuntimeError as error:
            return Outcome("failed", outcome.num_answers, str(error))
        if text is None or "\ufffd" in text:  # a walk may end inside of a character
            continue
        error = next(validator.iter_errors(json.loads(text)), None)
        if error is not None:
            return Outcome("wrong", outcome.num_answers, f"{text}: {error.message}")
        outcome.kind = "valid"
        outcome.num_answers += 1
    return outcome


def takes(matcher: Any, vocabulary: Vocabulary, instance: Any) -> bool:
    """Whether the instance is an answer in the form."""
    text = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    for token in vocabulary.tokenizer.encode_more(text):
        if matcher.is_stopped() or not matcher.consume_token(token):
            return False
    return bool(matcher.is_stopped() or matcher.is_accepting())


def walk(matcher: Any, vocabulary: Vocabulary, rng: random.Random) -> str | None:
    """A random answer; None where it becomes too long."""
    ids: list[int] = []
    ends_early = rng.random() < 0.5
    while len(ids) < LONGEST:
        if matcher.is_stopped():
            return vocabulary.tokenizer.decode(ids)
        mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        if matcher.is_error():
            raise RuntimeError(matcher.get_error())
        allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if not len(allowed):
            raise RuntimeError("no token is allowed")
        if vocabulary.table.end_id in allowed:
            if len(allowed) == 1 or ends_early or rng.random() < 0.3:
                return vocabulary.tokenizer.decode(ids)
            allowed = allowed[allowed != vocabulary.table.end_id]
        closing = np.intersect1d(allowed, vocabulary.closing)
        is_hurried = len(closing) and (len(ids) > HURRIED_AFTER or (ids and rng.random() < 0.3))
        if is_hurried:
            allowed = closing
        kinds = vocabulary.first_bytes[allowed]  # a bracket is as likely as all letters
        token = int(rng.choice(allowed[kinds == rng.choice(np.unique(kinds))]))
        if not matcher.consume_token(token):
            raise RuntimeError(matcher.get_error())
        ids.append(token)
    return None


def run(
    suite: Path, only: str = "", *, closes: bool = False
) -> dict[str, list[tuple[Case, Outcome]]]:
    """The outcomes by file. `closes`: close objects, as is the default elsewhere."""
    vocabulary, outcomes = load_vocabulary(), dict[str, list[tuple[Case, Outcome]]]()
    for case in cases(suite):
        if only in case.keyword:
            outcome = outcome_of(case, suite, vocabulary, closes=closes)
            outcomes.setdefault(case.keyword, []).append((case, outcome))
    return outcomes


def table_of(outcomes: dict[str, list[tuple[Case, Outcome]]]) -> str:
    """As Markdown: a line for each file, and the sums."""
    lines = [
        f"| file | schemas | {' | '.join(OUTCOMES)} | answers | taken | kept out |",
        "|---|---:|" + "---:|" * (len(OUTCOMES) + 3),
    ]
    total: Counter[str] = Counter()
    for keyword, several in outcomes.items():
        counts = Counter(outcome.kind for _, outcome in several)
        counts["schemas"] = len(several)
        counts["answers"] = sum(outcome.num_answers for _, outcome in several)
        taken = [(case, outcome) for case, outcome in several if outcome.kind != "refused"]
        counts["taken"] = sum(outcome.num_taken for _, outcome in taken)
        counts["of valid"] = sum(len(case.valid) for case, _ in taken)
        counts["kept out"] = sum(outcome.num_kept_out for _, outcome in taken)
        counts["of invalid"] = sum(len(case.invalid) for case, _ in taken)
        total += counts
        lines.append(_line(keyword, counts))
    return "\n".join([*lines, _line("**all**", total)])


def _line(name: str, counts: Counter[str]) -> str:
    columns = ("schemas", *OUTCOMES, "answers")
    cells = [f"{counts[column]:,}" for column in columns]
    cells.append(f"{counts['taken']:,} of {counts['of valid']:,}")
    cells.append(f"{counts['kept out']:,} of {counts['of invalid']:,}")
    return f"| {name} | {' | '.join(cells)} |"


def write_page(page: Path, table: str) -> None:
    text = page.read_text(encoding="utf-8")
    begin, end = (text.index(mark) for mark in MARK)
    page.write_text(f"{text[:begin]}{MARK[0]}\n{table}\n{text[end:]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("suite", type=Path, help="folder with tests/ and remotes/")
    parser.add_argument("--only", default="", help="files with this in their names")
    parser.add_argument("--closed", action="store_true", help="close objects")
    parser.add_argument("--page", type=Path, help="Markdown page whose table is written")
    options = parser.parse_args()
    outcomes = run(options.suite, options.only, closes=options.closed)
    for several in outcomes.values():
        for case, outcome in several:
            if outcome.kind != "valid":
                print(f"{outcome.kind:8} {case.keyword}: {case.name}: {outcome.detail[:150]}")
    print(table_of(outcomes))
    if options.page is not None:
        write_page(options.page, table_of(outcomes))


if __name__ == "__main__":
    main()
