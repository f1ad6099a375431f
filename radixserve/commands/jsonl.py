"""Batches of JSON lines: reads requests, runs them, and writes a line for each, in order.

A bad line gets an error; the others are answered.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from radixserve.api.request_builder import check_single
from radixserve.errors import InvalidRequest, RadixServeError
from radixserve.request import SamplingParams

if TYPE_CHECKING:
    from radixserve.api.progress import BatchProgress
    from radixserve.api.runtime import Runtime
    from radixserve.completion import Completion

    # The completion, None for an error, and the line of the output.
    Answer = tuple[Completion | None, dict[str, Any]]

REFRESH_S = 0.5  # between two refreshes of the progress bar while no request ends


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input: a prompt with its parameters, or an error."""

    number: int  # of the line, from 1
    tag: dict[str, Any]  # {"id": ...} if the line has an id, else {}
    prompt: Any = None
    fields: Mapping[str, Any] = field(default_factory=dict)  # of SamplingParams, checked
    error: str | None = None


def read_batch(data: bytes, base: Mapping[str, Any], as_prompt: Any) -> list[BatchLine]:
    """Read the lines of `data`. Empty lines are left out; a bad line has an `error`.

    base       sampling fields that a line's own override
    as_prompt  converts a prompt that is text
    """
    lines = enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1)
    return [_read_line(number, line, base, as_prompt) for number, line in lines if line.strip()]


def _read_line(number: int, line: bytes, base: Mapping[str, Any], as_prompt: Any) -> BatchLine:
    tag: dict[str, Any] = {}
    try:
        fields = json.loads(line.decode("utf-8"))
        if not isinstance(fields, dict):
            raise InvalidRequest('a line is an object such as {"prompt": "..."}')
        if "id" in fields:
            tag = {"id": fields.pop("id")}
        json.dumps(fields, ensure_ascii=False).encode()  # half a surrogate pair is not text
        prompt = _take_prompt(fields)
        bias = fields.get("logit_bias")
        if isinstance(bias, dict):  # keys in JSON are strings
            fields["logit_bias"] = {int(token_id): value for token_id, value in bias.items()}
        fields = {**base, **fields}
        check_single(SamplingParams(**fields), "a line")
    except RecursionError:
        return BatchLine(number, tag, error="the line is nested too deeply")
    except UnicodeError as error:
        return BatchLine(number, tag, error=f"the line is not valid Unicode text: {error}")
    except json.JSONDecodeError as error:
        return BatchLine(number, tag, error=f"the line is not JSON: {error}")
    except ValueError as error:  # InvalidRequest among them
        return BatchLine(number, tag, error=str(error))
    return BatchLine(number, tag, as_prompt(prompt) if isinstance(prompt, str) else prompt, fields)


def _take_prompt(fields: dict[str, Any]) -> Any:
    if ("prompt" in fields) == ("messages" in fields):
        raise InvalidRequest('a line has either "prompt" or "messages"')
    if "messages" in fields:
        messages = fields.pop("messages")
        if not isinstance(messages, list) or not all(
            isinstance(message, dict) for message in messages
        ):
            raise InvalidRequest('"messages" is a list of objects with "role" and "content"')
        return messages
    prompt = fields.pop("prompt")
    is_ids = isinstance(prompt, list) and all(type(token) is int for token in prompt)
    if not is_ids and not isinstance(prompt, str):
        raise InvalidRequest('"prompt" is text or a list of token ids')
    return prompt


def count_answers(path: str, num_lines: int) -> int:
    """The number of a batch's lines that an output file answers. An incomplete line at its end is
    removed from the file.

    Raises InvalidRequest if it has more lines than the batch.
    """
    if not os.path.exists(path):
        return 0
    with open(path, "rb+") as file:
        data = file.read()
        whole = data.rfind(b"\n") + 1
        if whole < len(data):
            file.truncate(whole)
    count = data.count(b"\n")
    if count > num_lines:
        raise InvalidRequest(
            f"{path} has {count} answers and the batch {num_lines} lines: it is not of this batch"
        )
    return count


async def answer_batch(
    runtime: Runtime, batch: Sequence[BatchLine], out: TextIO
) -> list[Completion]:
    """Run all requests together. Writes the line of each as soon as those before it are written.

    Returns the completions, which are fewer than the lines if some failed.
    """
    from radixserve.api.progress import BatchProgress

    tasks = [asyncio.create_task(_answer(runtime, line)) for line in batch]
    done: list[Completion] = []
    wanted = False if out.isatty() else None
    # What was last reported, which blocks nothing; at the end what is counted now.
    with BatchProgress(len(tasks), lambda: runtime.status().stats, wanted=wanted) as bar:
        for task in tasks:
            task.add_done_callback(partial(_count, bar))
        try:
            for task in tasks:
                while not (await asyncio.wait([task], timeout=REFRESH_S))[0]:
                    bar.refresh()
                completion, answer = task.result()
                print(json.dumps(answer), file=out, flush=True)
                if completion is not None:
                    done.append(completion)
            bar.refresh(runtime.cache_stats())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    return done


def _count(bar: BatchProgress, task: asyncio.Task[Answer]) -> None:
    """Count a line that has its answer or an error."""
    if not task.cancelled() and task.exception() is None:
        bar.add(task.result()[0])


async def _answer(runtime: Runtime, line: BatchLine) -> Answer:
    if line.error is None:
        try:
            params = runtime.sampling_params(**line.fields)
            completion = await runtime.agenerate(line.prompt, params)
            return completion, {**line.tag, **completion_fields(completion)}
        except RadixServeError as error:
            return None, {**line.tag, "line": line.number, "error": str(error)}
    return None, {**line.tag, "line": line.number, "error": line.error}


def completion_fields(completion: Completion) -> dict[str, Any]:
    """A completion as the fields of a JSON object."""
    fields: dict[str, Any] = {
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "usage": asdict(completion.usage),
        "metrics": asdict(completion.metrics),
    }
    for name in ("logprobs", "top_logprobs", "digest"):
        if getattr(completion, name) is not None:
            fields[name] = getattr(completion, name)
    return fields
