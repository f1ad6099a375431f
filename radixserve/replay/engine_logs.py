"""`logged_requests`: the requests in a log of vLLM or SGLang, as lines of a trace.

    vLLM     "Received request ID: prompt: '...', ..., prompt_token_ids: [...]", from 0.11.1 on
             "Request ID details: prompt: '...', prompt_token_ids: [...]" at the level DEBUG;
             "Generated response ID: output: '...', output_token_ids: [...]"
    SGLang   "Receive: obj=GenerateReqInput(...)", "Finish: obj=GenerateReqInput(...), out={...}",
             or the same as JSON: {"timestamp", "event": "request.received", "rid", "obj"}

Other lines are skipped. An answer whose token ids are not logged has the length of its text.
"""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import numpy as np

from radixserve.arrays import IntArray
from radixserve.checks import shown
from radixserve.errors import InvalidRequest
from radixserve.replay.lines import Line, raw_lines, warn_cut_off
from radixserve.replay.trace import tokenize

_log = logging.getLogger("radixserve")

_MOST_OPEN = 4096  # requests whose answer is waited for; the oldest one gives up
_YEAR_ZERO = datetime(2000, 1, 1)
_HALF_YEAR_S = 182 * 86_400.0

_SGLANG_JSON = re.compile(rb'\s*\{.*"event"\s*:\s*"request\.(?:received|finished)"', re.S)
_COLORS = re.compile(r"\x1b\[[0-9;]*m")
_PREFIX = r"^[^'\"]{0,400}?"  # of a log line: no text of a user stands before the message
_VLLM_PROMPT = re.compile(
    _PREFIX + r"(?:Received request (\S+): |Request (\S+) details: )prompt: (?=['\"N])"
)
_VLLM_PARAMS = re.compile(_PREFIX + r"Received request (\S+): params: .*lora_request: (.*)", re.S)
_VLLM_OUTPUT = re.compile(
    _PREFIX + r"Generated response (\S+?)( \(streaming (?:delta|complete)\))?: output: "
)
_SGLANG = re.compile(_PREFIX + r"(Receive|Finish): obj=\w+\(")
_LORA = re.compile(r"lora_name='([^']*)'")
_DATE = re.compile(r"(?:(\d{4})-)?(\d\d)-(\d\d)[ T](\d\d):(\d\d):(\d\d(?:\.\d+)?)")

_LITERAL = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|None", re.S)
_PIECES = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|\[[\d\s,]*\]|[\[\](){},]", re.S)


def is_engine_log(start: bytes) -> bool:
    """Whether a file that begins so is a log of another engine, and not JSON lines."""
    text = start.lstrip()
    if text.startswith(b"{"):
        return _SGLANG_JSON.match(text) is not None
    if text.startswith(b"["):
        return re.match(rb"\[\d{4}-\d\d-\d\d", text) is not None
    return bool(text)


def logged_requests(path: str) -> Iterator[Line]:
    """The requests of a log; those whose answer is logged first.

    Raises InvalidRequest, with the line, for a request whose tokens are cut or cannot be read, and
    for a log without requests.
    """
    log = _Log(path)
    for number, data in enumerate(raw_lines(path), 1):
        text = data.decode("utf-8", "replace").rstrip("\n")
        try:
            yield from log.read(Line(path, number, {}), text)
        except InvalidRequest:
            if data.endswith(b"\n"):
                raise
            warn_cut_off(path, number)
    yield from log.close()


@dataclass(slots=True)
class _Asked:
    """A request whose answer is not known yet."""

    line: Line
    time: float | None  # seconds
    prompt: str | IntArray
    namespace: str = ""
    session: str | None = None

    def answered(self, output: str | IntArray | int) -> Line:
        """The line of a trace. `output`: text, token ids, or only their number."""
        fields: dict[str, Any] = {"namespace": self.namespace, "session": self.session}
        if self.time is not None:
            fields["time"] = self.time
        if isinstance(self.prompt, str):
            fields["prompt"] = self.prompt
        else:
            fields["tokens"] = self.prompt.tolist()
        if isinstance(output, int):
            fields["output_length"] = output
        elif not isinstance(output, str):
            fields["output_tokens"] = output.tolist()
        elif isinstance(self.prompt, str):
            fields["output"] = output
        else:
            fields["output_length"] = len(tokenize(output))
        return self.line._replace(fields=fields)


class _Log:
    """Reads the lines of a log."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._open: dict[str, _Asked] = {}  # by request id, in order of arrival
        self._num_found = 0
        self._without_prompt: list[tuple[Line, str]] = []  # the first one, and what to do
        self._years = 0.0  # seconds; logs of vLLM do not name the year
        self._last_time = 0.0

    def read(self, line: Line, text: str) -> Iterator[Line]:
        """Yields the requests that end with this line."""
        if "\x1b" in text:
            text = _COLORS.sub("", text)
        if text.startswith("{") and _SGLANG_JSON.match(text.encode()):
            yield from self._sglang_json(line, text)
        elif match := _SGLANG.match(text):
            yield from self._sglang(line, text, match)
        elif match := _VLLM_PROMPT.match(text):
            yield from self._vllm(line, text, match)
        elif match := _VLLM_OUTPUT.match(text):
            yield from self._vllm_output(line, text, match)
        elif match := _VLLM_PARAMS.match(text):
            if match[1] in self._open:
                self._open[match[1]].namespace = _lora_name(match[2])
            else:
                self._note_without(line, "set VLLM_LOGGING_LEVEL=DEBUG in vLLM's environment")

    def close(self) -> Iterator[Line]:
        """Yields the requests without an answer."""
        for asked in self._open.values():
            yield asked.answered(0)
        if self._num_found and self._without_prompt:
            line, _ = self._without_prompt[0]
            _log.warning("%s:%d: requests without prompts are left out", self._path, line.number)
        elif self._without_prompt:
            line, what = self._without_prompt[0]
            raise line.error(f"the log has requests, but not their prompts; {what}")
        elif not self._num_found:
            raise InvalidRequest(
                f"{self._path}:1: not a line of JSON, and the file has no requests as vLLM or "
                "SGLang log them"
            )

    def _note_without(self, line: Line, what: str) -> None:
        if not self._without_prompt:
            self._without_prompt.append((line, what))

    def _ask(self, request_id: str, asked: _Asked) -> Iterator[Line]:
        """Note a request. Yields an earlier one that no answer can reach any more."""
        self._num_found += 1
        if request_id in self._open:
            yield self._open.pop(request_id).answered(0)
        elif len(self._open) >= _MOST_OPEN:
            yield self._open.pop(next(iter(self._open))).answered(0)
        self._open[request_id] = asked

    def _time(self, prefix: str) -> float | None:
        """Seconds since some time, from the last date before a message."""
        found = _DATE.findall(prefix)
        if not found:
            return None
        year, *rest, second = found[-1]
        try:
            month, day, hour, minute = map(int, rest)
            date = datetime(int(year or 2000), month, day, hour, minute)
        except ValueError:
            return None
        seconds = (date - _YEAR_ZERO).total_seconds() + float(second)
        if not year:
            if seconds + self._years < self._last_time - _HALF_YEAR_S:  # a new year has begun
                self._years += 366 * 86_400.0
            seconds += self._years
            self._last_time = seconds
        return seconds

    # -- vLLM ---------------------------------------------------------------------------------

    def _vllm(self, line: Line, text: str, match: re.Match[str]) -> Iterator[Line]:
        literal = _LITERAL.match(text, match.end())
        if literal is None:
            raise line.error("the prompt of the request is cut off")
        rest = text[literal.end() :]
        prompt: str | IntArray | None = _int_list(line, rest, "prompt_token_ids: ")
        if prompt is None:
            prompt = _text(line, literal[0])
        if prompt is None:
            self._note_without(line, "prompts of embeddings have no tokens")
            return
        asked = _Asked(line, self._time(text[: match.end()]), prompt)
        if "lora_request: " in rest:
            asked.namespace = _lora_name(rest[rest.rfind("lora_request: ") :])
        yield from self._ask(match[1] or match[2], asked)

    def _vllm_output(self, line: Line, text: str, match: re.Match[str]) -> Iterator[Line]:
        name = self._asked_as(match[1])
        if name is None or (match[2] or "").endswith("delta)"):
            return
        literal = _LITERAL.match(text, match.end())
        if literal is None:
            raise line.error("the answer is cut off")
        ids = _int_list(line, text[literal.end() :], "output_token_ids: ")
        output = (_text(line, literal[0]) or "") if ids is None else ids
        yield self._open.pop(name).answered(output)

    def _asked_as(self, request_id: str) -> str | None:
        """The open request that an answer belongs to: of a list of prompts the first."""
        if request_id in self._open:
            return request_id
        head = f"{request_id}-"
        return next((name for name in self._open if name.startswith(head)), None)

    # -- SGLang -------------------------------------------------------------------------------

    def _sglang_json(self, line: Line, text: str) -> Iterator[Line]:
        try:
            fields = json.loads(text)
            request, out = {"rid": fields["rid"], **fields["obj"]}, {**fields.get("out", {})}
        except (ValueError, RecursionError, KeyError, TypeError) as error:
            raise line.error(f"a request of SGLang cannot be read: {error!r}") from None
        time = self._time(str(fields.get("timestamp")))
        if fields["event"] == "request.received":
            yield from self._sglang_received(line, request, time)
        else:
            yield from self._sglang_finished(line, request, out, time)

    def _sglang(self, line: Line, text: str, match: re.Match[str]) -> Iterator[Line]:
        time = self._time(text[: match.end()])
        request, end = _printed(line, text, match.end() - 1, "=")
        if match[1] == "Receive":
            yield from self._sglang_received(line, request, time)
        else:
            start = text.find("{", end)
            out = _printed(line, text, start, ": ")[0] if start >= 0 else {}
            yield from self._sglang_finished(line, request, out, time)

    def _sglang_received(
        self, line: Line, request: Mapping[str, Any], time: float | None
    ) -> Iterator[Line]:
        given = request.get("input_ids")
        prompts = request.get("text") if given is None else given
        if prompts is None:
            self._note_without(line, "start SGLang with --log-requests-level 3")
            return
        is_batch = (
            isinstance(prompts, list)
            and len(prompts) > 0
            and (isinstance(prompts[0], list) or given is None)
        )
        for number, prompt in enumerate(prompts if is_batch else [prompts]):
            rid, lora, key = (
                _of_batch(request.get(name), number) for name in ("rid", "lora_path", "extra_key")
            )
            if is_batch and not isinstance(request.get("rid"), list):
                rid = f"{rid}_{number}"
            namespace = ":".join(part for part in (lora, key) if isinstance(part, str))
            params = request.get("session_params")
            session = params.get("id") if isinstance(params, dict) else None
            asked = _Asked(line, time, _sglang_prompt(line, prompt), namespace, session)
            yield from self._ask(str(rid), asked)

    def _sglang_finished(
        self,
        line: Line,
        request: Mapping[str, Any],
        out: Mapping[str, Any],
        time: float | None,
    ) -> Iterator[Line]:
        name, found = str(request.get("rid")), out.get("meta_info")
        meta = found if isinstance(found, dict) else {}
        if name not in self._open:
            seconds = meta.get("e2e_latency")
            if time is not None and isinstance(seconds, int | float):
                time -= seconds
            yield from self._sglang_received(line, request, time)
        if name not in self._open:
            return
        asked = self._open.pop(name)
        ids, count = out.get("output_ids"), meta.get("completion_tokens")
        output: str | IntArray | int = count if isinstance(count, int) else 0
        if isinstance(asked.prompt, str) and isinstance(out.get("text"), str):
            output = out["text"]
        elif isinstance(ids, list) and "..." not in ids and count in (None, len(ids)):
            output = _tokens(line, ids)
        yield asked.answered(output)


_BAD_LITERAL = (ValueError, TypeError, SyntaxError, MemoryError, RecursionError)
_UNREADABLE = object()  # a printed value that is shortened, such as "[1, 2] ... [8, 9]"
_WANTED = frozenset(
    "rid text input_ids lora_path extra_key session_params output_ids meta_info".split()
)


def _printed(line: Line, text: str, start: int, separator: str) -> tuple[dict[str, Any], int]:
    """Some fields of a printed object or dict, and the position behind it. `start`: of its opening
    bracket; `separator`: between name and value."""
    depth, begin, fields = 0, start + 1, {}
    for piece in _PIECES.finditer(text, start):
        mark = piece[0]
        depth += (mark in "[({") - (mark in "])}")
        if depth == 0 or (depth == 1 and mark == ","):
            name, _, value = text[begin : piece.start()].partition(separator)
            name = name.strip(" '")
            if name in _WANTED:
                fields[name] = _value(value)
            begin = piece.end()
        if depth == 0:
            return fields, piece.end()
    raise line.error("the request is cut off")


def _value(printed: str) -> Any:
    is_list = printed[:1] == "["  # often a long one of numbers, which JSON reads much faster
    for parse in (json.loads, ast.literal_eval) if is_list else (ast.literal_eval,):
        with contextlib.suppress(*_BAD_LITERAL):
            return parse(printed)
    return _UNREADABLE


def _of_batch(value: Any, number: int) -> Any:
    """A field of one request of a batch, where each may have its own."""
    return value[number] if isinstance(value, list) and number < len(value) else value


def _sglang_prompt(line: Line, prompt: Any) -> str | IntArray:
    is_cut = prompt is _UNREADABLE or (isinstance(prompt, list) and "..." in prompt)
    if isinstance(prompt, str):
        is_cut = len(prompt) == 2051 and prompt[1024:1027] == "..."
    if is_cut:
        raise line.error("the prompt is shortened; start SGLang with --log-requests-level 3")
    return prompt if isinstance(prompt, str) else _tokens(line, prompt)


# -- values -----------------------------------------------------------------------------------


def _tokens(line: Line, ids: Any) -> IntArray:
    """[n] int32. Raises InvalidRequest for what is not a list of token ids."""
    try:
        tokens = np.asarray(ids) if ids != [] else np.empty(0, np.int64)
        if tokens.ndim == 1 and tokens.dtype == np.int64 and (abs(tokens) < 2**31).all():
            # Placeholders of pictures may be negative.
            return abs(tokens).astype(np.int32)
    except (ValueError, OverflowError, TypeError):
        pass
    raise line.error(f"token ids must be a list of integers below 2**31, got {shown(ids)}")


def _int_list(line: Line, text: str, name: str) -> IntArray | None:
    """The token ids behind the last `name` in a text; None if it has None there."""
    start = text.rfind(name)
    value = text[start + len(name) :] if start >= 0 else ""
    if value.startswith("None"):
        return None
    try:
        ids = json.loads(value[: value.index("]") + 1])
    except (ValueError, RecursionError):
        raise line.error(
            f"the list of {name.strip(': ')} is cut off or not one of integers"
        ) from None
    return _tokens(line, ids)


def _text(line: Line, literal: str) -> str | None:
    """A printed text, or None."""
    try:
        text: str | None = ast.literal_eval(literal)
    except _BAD_LITERAL as error:
        raise line.error(f"the text cannot be read: {error}") from None
    return text


def _lora_name(printed: str) -> str:
    """The name in a printed LoRARequest; "" for None."""
    match = _LORA.search(printed)
    return match[1] if match else ""
