"""Answers in the schemas of ten pydantic models, at temperature 1, over each interface.

    python benchmarks/pydantic_answers.py [--model smollm2] [--answers 10] [--max-tokens 400]

Each model's schema, as pydantic writes it, is asked for over chat completions (`response_format`),
Responses, Anthropic's messages, a forced tool call, and `Runtime`. An answer ends if the model ends
it within the bound of tokens; it is valid if pydantic reads it. Prints the counts, and why answers
did not end; ends with 1 if fewer than 95 of 100 answers that ended are valid on an interface.
"""

from __future__ import annotations

import argparse
import datetime
import enum
import json
import sys
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from harness.processes import ServerProcess, python_path
from pydantic import BaseModel, Field, ValidationError

from radixserve import Runtime, SamplingParams, StructuredOutput

SAMPLING = {"temperature": 1.0, "top_p": 1.0}
LEAST_VALID = 0.95  # of the answers that end


class Person(BaseModel):
    name: str
    city: str


class City(BaseModel):
    name: str
    population: int


class Trip(BaseModel):
    traveller: Person
    start: City
    end: City


class Profile(BaseModel):
    nickname: str | None = None
    age: int | None = None
    newsletter: bool = False


class Cat(BaseModel):
    kind: Literal["cat"]
    lives: int


class Dog(BaseModel):
    kind: Literal["dog"]
    tricks: Annotated[list[str], Field(max_length=3)]


class Owner(BaseModel):
    pet: Cat | Dog


class Menu(BaseModel):
    dishes: Annotated[list[str], Field(min_length=1, max_length=4)]
    prices: Annotated[list[Annotated[float, Field(ge=0, le=100)]], Field(max_length=4)]


class Level(enum.Enum):
    LOW = "low"
    HIGH = "high"


class Ticket(BaseModel):
    level: Level
    summary: str


class Words(BaseModel):
    counts: dict[str, int]


class Vote(BaseModel):
    answer: Literal["yes", "no", "maybe"]
    confidence: Literal[1, 2, 3]


class Event(BaseModel):
    title: str
    day: datetime.date
    begins: datetime.datetime


class Node(BaseModel):
    value: int
    children: Annotated[list[Node], Field(max_length=2)] = []


SHAPES: tuple[type[BaseModel], ...] = (
    *(Person, Trip, Profile, Owner, Menu, Ticket, Words, Vote, Event, Node),
)


class Answer(NamedTuple):
    has_ended: bool
    text: str  # JSON


def question(shape: type[BaseModel]) -> str:
    return f"Make up an example of a {shape.__name__.lower()}. Answer in JSON."


class Server:
    """The interfaces over HTTP. Each method asks for one answer."""

    def __init__(self, url: str, max_tokens: int) -> None:
        self._url = url
        self._max_tokens = max_tokens

    def chat(self, shape: type[BaseModel], seed: int) -> Answer:
        schema = {"name": shape.__name__, "schema": shape.model_json_schema()}
        fields = {"response_format": {"type": "json_schema", "json_schema": schema}}
        choice = self._chat(shape, seed, fields)
        return Answer(choice["finish_reason"] == "stop", choice["message"]["content"])

    def tools(self, shape: type[BaseModel], seed: int) -> Answer:
        function = {"name": "answer", "parameters": shape.model_json_schema()}
        named = {"type": "function", "function": {"name": "answer"}}
        fields = {"tools": [{"type": "function", "function": function}], "tool_choice": named}
        choice = self._chat(shape, seed, fields)
        calls = choice["message"].get("tool_calls") or [{"function": {"arguments": ""}}]
        has_ended = choice["finish_reason"] in ("stop", "tool_calls")
        return Answer(has_ended, calls[0]["function"]["arguments"])

    def responses(self, shape: type[BaseModel], seed: int) -> Answer:
        form = {"type": "json_schema", "name": "it", "schema": shape.model_json_schema()}
        fields = {"input": f"{question(shape)} ({seed})", "text": {"format": form}}
        answer = self._post("/v1/responses", {**fields, "max_output_tokens": self._max_tokens})
        text = "".join(part["text"] for item in answer["output"] for part in item["content"])
        return Answer(answer["status"] == "completed", text)

    def anthropic(self, shape: type[BaseModel], seed: int) -> Answer:
        form = {"type": "json_schema", "schema": shape.model_json_schema()}
        messages = [{"role": "user", "content": f"{question(shape)} ({seed})"}]
        fields = {"messages": messages, "output_config": {"format": form}}
        answer = self._post("/v1/messages", {**fields, "max_tokens": self._max_tokens})
        text = "".join(block["text"] for block in answer["content"])
        return Answer(answer["stop_reason"] == "end_turn", text)

    def _chat(self, shape: type[BaseModel], seed: int, fields: dict[str, Any]) -> Any:
        messages = [{"role": "user", "content": question(shape)}]
        body = {"messages": messages, "seed": seed, "max_tokens": self._max_tokens, **fields}
        return self._post("/v1/chat/completions", body)["choices"][0]

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        content = json.dumps({"model": "it", **SAMPLING, **body}).encode()
        headers = {"content-type": "application/json"}
        request = urllib.request.Request(self._url + path, content, headers)
        with urllib.request.urlopen(request, timeout=3_600) as answer:
            return json.load(answer)


def of_runtime(model: str, num_answers: int, max_tokens: int) -> dict[str, list[Answer]]:
    """By shape, with all answers of `Runtime.generate`."""
    answers = {}
    with Runtime(model, num_pages=32_768) as rt:
        for shape in SHAPES:
            form = StructuredOutput(json=shape.model_json_schema())
            sampling = [
                SamplingParams(max_tokens=max_tokens, seed=seed, structured=form, **SAMPLING)
                for seed in range(num_answers)
            ]
            outs = rt.generate([question(shape) + "\n"] * num_answers, sampling)
            answers[shape.__name__] = [Answer(o.finish_reason == "stop", o.text) for o in outs]
    return answers


def over_http(
    ask: Callable[[type[BaseModel], int], Answer], num_answers: int
) -> dict[str, list[Answer]]:
    with ThreadPoolExecutor(16) as pool:
        waiting = {
            shape.__name__: [pool.submit(ask, shape, seed) for seed in range(num_answers)]
            for shape in SHAPES
        }
        return {name: [one.result() for one in several] for name, several in waiting.items()}


def outcome(shape: type[BaseModel], answer: Answer) -> str:
    if not answer.has_ended:
        return f"cut {_open_end(answer.text)}"
    try:
        shape.model_validate_json(answer.text)
    except ValidationError as error:
        print(f"  {shape.__name__}: {error.errors()[0]['msg']}: {answer.text[:200]!r}")
        return "wrong"
    return "valid"


def _open_end(text: str) -> str:
    """Where an answer was cut."""
    if not text:
        return "before its text"
    quotes = text.replace("\\\\", "").replace('\\"', "").count('"')
    if quotes % 2:
        return "in a string"
    if not text[-24:].strip():
        return "in white space"
    return "in a number" if text[-24:].isdigit() else "elsewhere"


def run(model: str, num_answers: int, max_tokens: int) -> dict[str, Counter[str]]:
    """The counts of outcomes by interface, which are printed, too."""
    counts = {}
    command = [sys.executable, "-m", "radixserve", "serve", model, "--served-model-name", "it",
               "--num-pages", "32768"]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        process = ServerProcess(
            command, "/health/ready", Path(folder) / "log", PYTHONPATH=python_path()
        )
        try:
            server = Server(process.address, max_tokens)
            for ask in (server.chat, server.responses, server.anthropic, server.tools):
                counts[ask.__name__] = _printed(ask.__name__, over_http(ask, num_answers))
        finally:
            process.close()
    counts["runtime"] = _printed("runtime", of_runtime(model, num_answers, max_tokens))
    return counts


def _printed(name: str, answers: dict[str, list[Answer]]) -> Counter[str]:
    """The counts of outcomes, after they are printed."""
    shapes = {shape.__name__: shape for shape in SHAPES}
    pairs = [(shapes[shape], answer) for shape, several in answers.items() for answer in several]
    counts = Counter(outcome(shape, answer) for shape, answer in pairs)
    ended = counts["valid"] + counts["wrong"]
    rest = ", ".join(f"{count} {kind}" for kind, count in counts.items() if kind.startswith("cut"))
    print(f"{name}: {ended} of {counts.total()} ended, {counts['valid']} of them valid; {rest}")
    return counts


def is_enough(counts: Counter[str]) -> bool:
    """Whether enough of the answers that ended are valid, and half of all ended."""
    ended = counts["valid"] + counts["wrong"]
    return counts["valid"] >= LEAST_VALID * ended and 2 * ended >= counts.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--answers", type=int, default=10, help="of each shape and interface")
    parser.add_argument("--max-tokens", type=int, default=400)
    options = parser.parse_args()
    counts = run(options.model, options.answers, options.max_tokens)
    if not all(map(is_enough, counts.values())):
        sys.exit(1)


if __name__ == "__main__":
    main()
