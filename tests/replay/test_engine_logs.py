"""Logs of vLLM and SGLang and recorded KV events, read as traces. The samples are written by hand
in the form that these engines write."""

from __future__ import annotations

import gzip
import json
import logging
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from radixserve.cache import RadixCache
from radixserve.cli import main
from radixserve.errors import InvalidRequest
from radixserve.replay import build_paths, read_trace
from radixserve.replay.trace import TraceRequest, tokenize

PARAMS = "SamplingParams(n=1, temperature=0.7, stop=['prompt_token_ids: [8]'], max_tokens=100)"
VLLM = "(APIServer pid=9) INFO 02-13 11:33:3{} [request_logger.py:49] "


def write(path: Path, *lines: str) -> Path:
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def tokens(request: TraceRequest) -> tuple[list[int], list[int]]:
    return request.prompt.tolist(), request.output.tolist()


# -- vLLM -----------------------------------------------------------------------------------------


def test_a_log_of_vllm_with_prompts_at_debug(tmp_path: Path) -> None:
    """Since 0.11.1 the prompt has a line of its own. The answers of streams have no token ids."""
    debug = VLLM.replace("INFO", "DEBUG")
    path = write(
        tmp_path / "vllm.log",
        "INFO 02-13 11:33:01 [api_server.py:1] vLLM API server version 0.33.0",
        debug.format(2)
        + "Request chatcmpl-a details: prompt: None, prompt_token_ids: [1, 2, 3, 4], "
        "prompt_embeds shape: None.",
        VLLM.format(2) + f"Received request chatcmpl-a: params: {PARAMS}, lora_request: "
        "LoRARequest(lora_name='sql', lora_int_id=1).",
        "(APIServer pid=9) INFO 02-13 11:33:33 [loggers.py:257] Engine 000: Running: 1 reqs",
        VLLM.format(4) + "Generated response chatcmpl-a (streaming delta): output: 'an', "
        "output_token_ids: [5], finish_reason: None",
        VLLM.format(5) + "Generated response chatcmpl-a (streaming complete): "
        "output: 'an answer', output_token_ids: None, finish_reason: stop",
        debug.format(7) + "Request chatcmpl-b details: prompt: 'Ask: \"x\"', prompt_token_ids: "
        "[1, 2, 3, 4, 5, 6, 7], prompt_embeds shape: None.",
        VLLM.format(7) + f"Received request chatcmpl-b: params: {PARAMS}, lora_request: None.",
        VLLM.format(8) + "Generated response chatcmpl-b: output: 'yes', "
        "output_token_ids: [8, 9], finish_reason: stop",
    )
    first, second = read_trace(path)
    assert (first.time, second.time) == (0.0, 5.0)
    assert (first.namespace, second.namespace) == ("sql", "")
    # Two pieces of text long, and taken from the request that continues this one.
    assert tokens(first) == ([1, 2, 3, 4], [5, 6])
    assert tokens(second) == ([1, 2, 3, 4, 5, 6, 7], [8, 9])
    plain = read_trace(path, stitch=False).request(0)
    assert len(plain.output) == 2
    assert plain.output.tolist() != [5, 6]


def test_an_older_log_of_vllm(tmp_path: Path) -> None:
    """One line has all; texts of users do not pass for fields. A list of prompts has one answer
    line for each, under the id of the list."""
    rest = "prompt_embeds shape: None, lora_request: None, prompt_adapter_request: None."
    trick = "\"it's prompt_token_ids: [9], Received request x: prompt: 'y'\""
    ids = ("[1, 2]", "[3]", "[10, 11, 12]")
    path = write(
        tmp_path / "vllm.log",
        *(
            f"\x1b[32mINFO\x1b[0m 12-31 23:59:59 [logger.py:43] Received request cmpl-c-{number}: "
            f"prompt: {trick}, params: {PARAMS}, prompt_token_ids: {one}, {rest}"
            for number, one in enumerate(ids)
        ),
        "INFO 01-01 00:00:01 [logger.py:80] Generated response cmpl-c: output: 'a', "
        "output_token_ids: [4, 5], finish_reason: length",
        "INFO 01-01 00:00:01 [logger.py:80] Generated response cmpl-c: output: 'a', "
        "output_token_ids: [6], finish_reason: length",
        f"INFO 01-01 00:00:04 [logger.py:43] Received request cmpl-d: prompt: 'Hello you', "
        f"params: {PARAMS}, prompt_token_ids: None, {rest}",
        "INFO 01-01 00:00:05 [logger.py:80] Generated response cmpl-d: output: 'Hi', "
        "output_token_ids: [6], finish_reason: length",
    )
    trace = read_trace(path)
    assert trace.times.tolist() == [0.0, 0.0, 0.0, 5.0]  # over the turn of the year
    found = sorted(map(tokens, trace), key=lambda pair: pair[1])
    assert ([1, 2], [4, 5]) in found
    assert ([3], [6]) in found
    assert ([10, 11, 12], []) in found
    assert trace.request(3).prompt.tolist() == tokenize("Hello you").tolist()


# -- SGLang ---------------------------------------------------------------------------------------

OBJECT = (
    "GenerateReqInput(rid='{rid}', http_worker_ipc=None, text=None, input_ids={ids}, "
    "input_embeds=None, image_data=None, sampling_params={{'stop': ['input_ids=[9], (']}}, "
    "return_logprob=False, lora_path={lora}, session_params=None, extra_key=None, priority=0)"
)


def sglang(second: int, text: str) -> str:
    return f"[2026-11-30 10:00:0{second} TP0] {text}"


def test_a_log_of_sglang(tmp_path: Path) -> None:
    asked = OBJECT.format(rid="r1", ids="[1, 2, 3]", lora="'sql'")
    alone = OBJECT.format(rid="r2", ids="[1, 2, 3, 4]", lora="None")
    meta = "'meta_info': {'id': 'r1', 'finish_reason': {'type': 'stop'}, 'completion_tokens': 2, "
    path = write(
        tmp_path / "sglang.log",
        sglang(0, "server_args=ServerArgs(model_path='x')"),
        sglang(1, f"Receive: obj={asked}"),
        sglang(2, "Prefill batch. #new-seq: 1, #new-token: 3, #cached-token: 0"),
        sglang(
            5,
            f"Finish: obj={asked}, out={{'text': 'It\\'s [', 'output_ids': [4, 5], {meta}"
            "'prompt_tokens': 3, 'e2e_latency': 4.0}}",
        ),
        sglang(9, f"Finish: obj={alone}, out={{'text': '', {meta}'e2e_latency': 2.5}}}}"),
    )
    first, second = read_trace(path, stitch=False)
    assert tokens(first) == ([1, 2, 3], [4, 5])
    assert first.namespace == "sql"
    assert second.time == pytest.approx(5.5)  # it was logged at its end alone
    assert second.prompt.tolist() == [1, 2, 3, 4]
    assert len(second.output) == 2


def test_a_log_of_sglang_in_json(tmp_path: Path) -> None:
    """Between other lines on standard output, a batch of prompts and one with texts."""

    def event(kind: str, second: int, **fields: Any) -> str:
        time = f"2026-11-30T10:00:0{second}.250000"
        return json.dumps({"timestamp": time, "event": f"request.{kind}", **fields})

    batch = {"text": None, "input_ids": [[1, 2], [3]], "rid": ["a", "b"], "lora_path": [None, "l"]}
    texts = {"text": ["Hi you", "Hello"], "input_ids": None, "rid": ["c", "d"]}
    single = {"text": None, "input_ids": [3], "rid": "b", "lora_path": "l"}
    out = {"text": "x", "output_ids": [7], "meta_info": {"completion_tokens": 1, "e2e_latency": 1}}
    path = write(
        tmp_path / "sglang.log",
        event("received", 1, rid=["a", "b"], obj=batch),
        "[2026-11-30 10:00:02] INFO: 127.0.0.1 - POST /generate HTTP/1.1 200 OK",
        event("finished", 3, rid="b", obj=single, out=out),
        event("received", 4, rid=["c", "d"], obj=texts),
        event("finished", 5, rid="d", obj={"text": "Hello", "rid": "d"}, out=out),
    )
    trace = read_trace(path)
    assert trace.times.tolist() == [0.0, 0.0, 3.0, 3.0]
    found = {(one.namespace, *map(tuple, tokens(one))) for one in trace}
    assert ("", (1, 2), ()) in found
    assert ("l", (3,), (7,)) in found
    hello, answer = tuple(tokenize("Hello").tolist()), tuple(tokenize("x").tolist())
    assert ("", hello, answer) in found


# -- KV events ------------------------------------------------------------------------------------


def stored(hashes: list[Any], parent: Any, ids: list[int], **fields: Any) -> dict[str, Any]:
    size = len(ids) // len(hashes)
    base = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent}
    return {**base, "token_ids": ids, "block_size": size, "lora_id": None, **fields}


def as_array(event: dict[str, Any]) -> list[Any]:
    names = "type block_hashes parent_block_hash token_ids block_size lora_id medium".split()
    return [event[name] for name in names if name in event]


BATCHES: list[tuple[float, list[dict[str, Any]]]] = [
    (100.0, [stored([1, 2], None, [1, 2, 3, 4], medium="GPU")]),
    (100.5, [stored([3], 2, [5, 6], medium="GPU")]),  # the answer
    (100.6, [stored([9], 2, [5, 6], medium="CPU")]),  # a copy in another tier
    (130.0, [stored([4], 3, [7, 8], medium="GPU")]),  # the next turn
    (131.0, [{"type": "BlockRemoved", "block_hashes": [3, 4], "medium": "GPU"}]),
    (140.0, [stored([3, 4], 2, [5, 6, 7, 8], medium="GPU")]),  # computed once more
    (150.0, [{"type": "AllBlocksCleared"}]),
]


def check_batches(path: Path) -> None:
    trace = read_trace(path)
    assert [tokens(one) for one in trace] == [
        ([1, 2, 3, 4], [5, 6]),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
        ([1, 2, 3, 4, 5, 6, 7, 8], []),
    ]
    assert trace.times.tolist() == [0.0, 30.0, 40.0]
    assert build_paths(trace).reusable_tokens == 5 + 7  # an answer's last token has no K/V


@pytest.mark.parametrize("form", ["maps", "arrays", "gzip"])
def test_kv_events_as_json_lines(tmp_path: Path, form: str) -> None:
    lines = []
    for seconds, events in BATCHES:
        document: Any = {"ts": seconds, "events": events, "data_parallel_rank": 0}
        if form == "arrays":
            arrays = [as_array(one) for one in events]
            document = [seconds, arrays]
        lines.append(json.dumps(document))
    path = write(tmp_path / "events.jsonl", *lines)
    if form == "gzip":
        path.write_bytes(gzip.compress(path.read_bytes()))
    check_batches(path)


def test_kv_events_as_they_are_sent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Payloads in msgpack, one behind the other; hashes may be bytes."""
    msgpack = pytest.importorskip("msgpack", reason="a stream of events needs [kv-events]")
    for pack in (dict, as_array):
        path = tmp_path / "events.msgpack"
        payloads = []
        for seconds, events in BATCHES:
            named = json.loads(json.dumps(events))
            for one in named:
                one["block_hashes"] = [bytes([key]) for key in one.get("block_hashes", [])]
                if one.get("parent_block_hash") is not None:
                    one["parent_block_hash"] = bytes([one["parent_block_hash"]])
            packed = [pack(one) for one in named]
            is_map = pack is dict
            payloads.append(
                msgpack.packb({"ts": seconds, "events": packed} if is_map else [seconds, packed, 0])
            )
        path.write_bytes(b"".join(payloads))
        check_batches(path)
        path.write_bytes(b"".join(payloads) + payloads[0][:20])
        with caplog.at_level(logging.WARNING, "radixserve"):
            check_batches(path)
        assert f"{path}:{len(payloads) + 1}: the last line is cut off" in caplog.text
        path.write_bytes(payloads[0] + b"\x91\xc1")
        with pytest.raises(InvalidRequest, match=f"{path}:2: not a batch"):
            read_trace(path)


def test_pages_that_are_stored_one_by_one(tmp_path: Path) -> None:
    """As SGLang does: an event for each page, all of a node at once, an answer when it ends."""
    prompt = [stored([n], n - 1 or None, [n]) for n in range(1, 6)]
    answer = [stored([n], n - 1, [n]) for n in range(6, 9)]
    later = [stored([n], n - 1, [n]) for n in range(9, 12)]
    batches = [(10.0, prompt), (40.0, answer), (60.0, later)]
    path = write(tmp_path / "e", *(json.dumps([ts, list(map(as_array, e))]) for ts, e in batches))
    first, second = read_trace(path)
    assert tokens(first) == ([1, 2, 3, 4, 5], [6, 7, 8])
    assert tokens(second) == (list(range(1, 12)), [])


def test_keys_and_unknown_parents(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Another picture behind the same placeholders is another block; the record began late."""
    batches = [
        [stored([1], None, [5, 5], extra_keys=[["cat"]])],
        [stored([2], None, [5, 5], extra_keys=[["dog"]])],
        [stored([3], None, [5, 5], lora_name="sql", cache_salt="s")],
        [stored([5], 77, [1, 2])],
        [stored([6], 77, [3, 4])],
        [stored([8], None, [6, 6], group_idx=1, kv_cache_spec_kind="sliding_window")],
    ]
    lines = [json.dumps({"ts": 10.0 * n, "events": one}) for n, one in enumerate(batches)]
    with caplog.at_level(logging.WARNING, "radixserve"):
        trace = read_trace(write(tmp_path / "e.jsonl", *lines))
    cat, dog, sql, late, later = trace
    assert cat.prompt[0] != dog.prompt[0]
    assert sql.namespace == "sql:s"
    assert late.prompt[:2].tolist() == later.prompt[:2].tolist()
    assert "1 paths begin in blocks" in caplog.text


def test_this_engines_own_events(tmp_path: Path) -> None:
    msgspec = pytest.importorskip("msgspec", reason="events need [kv-events]")
    from radixserve.kv_events.blocks import BlockView

    cache = RadixCache(400)
    log = cache.open_events()
    view = BlockView(4)
    lines = [view.restart(log.snapshot())]
    prompts = [list(range(8)), [*range(6), 90, 91], list(range(12))]
    for prompt in prompts:
        sequence = cache.acquire(np.asarray(prompt, np.int32))
        sequence.extend(prompt[sequence.length :])
        sequence.commit(len(prompt))
        sequence.release()
        lines.append(view.apply(log.take()))
    batches = [
        msgspec.json.encode({"ts": 5.0 * n, "events": events}).decode()
        for n, events in enumerate(lines)
    ]
    trace = read_trace(write(tmp_path / "own.jsonl", *batches))
    assert [one.prompt.tolist() for one in trace] == prompts


# -- errors, and the command ----------------------------------------------------------------------

GOOD = VLLM.format(1) + "Request a details: prompt: None, prompt_token_ids: [1, 2], x."
EVENT = json.dumps({"ts": 1.0, "events": [stored([1], None, [1, 2])]})


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ([GOOD, GOOD.replace("[1, 2], x.", "[1, 2")], 2, "cut off"),
        ([GOOD, GOOD.replace("[1, 2]", "[1, 2.5]")], 2, "integers"),
        ([GOOD, GOOD.replace("None", "'no end")], 2, "the prompt of the request is cut off"),
        ([GOOD, GOOD.replace("[1, 2]", "[]")], 2, "the prompt is empty"),
        (
            [GOOD, GOOD.replace("None, prompt_token_ids: [1, 2]", r"'\x', prompt_token_ids: None")],
            2,
            "cannot be read",
        ),
        ([sglang(1, "Receive: obj=GenerateReqInput(rid='a', input_ids=[])")], 1, "prompt is empty"),
        ([sglang(1, "Receive: obj=GenerateReqInput(rid='a', text={[]: 1})")], 1, "shortened"),
        (
            ["INFO", VLLM.format(1) + f"Received request a: params: {PARAMS}, lora_request: None."],
            2,
            "VLLM_LOGGING_LEVEL=DEBUG",
        ),
        ([sglang(1, "Receive: obj=GenerateReqInput(rid='a', stream=True)")], 1, "level 3"),
        (
            [sglang(1, "Receive: obj=GenerateReqInput(rid='a', input_ids=[1, 2] ... [8, 9])")],
            1,
            "shortened",
        ),
        ([sglang(1, "Receive: obj=GenerateReqInput(rid='a', input_ids=[1, 2]")], 1, "cut off"),
        (
            [
                '{"timestamp": "x", "event": "request.received", "rid": "a", "obj": {"text": null, '
                '"input_ids": [1, "...", 2]}}'
            ],
            1,
            "shortened",
        ),
        (['{"timestamp": "x", "event": "request.received", "rid": "a"}'], 1, "cannot be read"),
        (["INFO nothing of interest", "INFO"], 1, "no requests as vLLM or SGLang"),
        ([EVENT, "{"], 2, "not a batch of KV events"),
        ([EVENT, '{"ts": 2.0}'], 2, "a time and a list of events"),
        ([EVENT, '[2.0, [["Other", 1]]]'], 2, "an event must be one of BlockStored"),
        ([EVENT, '[2.0, [["BlockStored", [1, 2], null, [1, 2, 3], 2, null]]]'], 2, "block_size"),
        ([EVENT, '[2.0, [["BlockStored", [1], null, [1, -2], 2, null]]]'], 2, "2**31"),
        (['[2.0, [["BlockStored", [1], null, "ab", 2, null]]]'], 1, "block_size"),
        (['[2.0, [["BlockStored", [[1]], null, [1, 2], 2]]]'], 1, "block hashes must be"),
        (['[2.0, [["BlockStored", [1], [2], [1, 2], 2]]]'], 1, "parent_block_hash must be"),
        (['[2.0, [[["BlockStored"], [1], null, [1, 2], 2]]]'], 1, "an event must be one of"),
        (['{"ts": 2.0, "events": [{"type": []}]}'], 1, "an event must be one of"),
        (['[2.0, [["BlockStored", [1], null, [1, 2], 2]], [0]]'], 1, "data_parallel_rank"),
        (
            ['[2.0, [["BlockStored", [1, 2], null, [1, 2], 1, 0, "GPU", null, [["a"]]]]]'],
            1,
            "extra_keys must be",
        ),
        ([EVENT, '[2.0, [["BlockStored", [1], 1, [1, 2], 2]]]'], 1, "is behind itself"),
        (
            [
                EVENT,
                '[2.0, [["BlockStored", [2], 1, [1, 2], 2], ["BlockStored", [1], 2, [1, 2], 2]]]',
            ],
            1,
            "is behind itself",
        ),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, lines: list[str], number: int, words: str) -> None:
    path = write(tmp_path / "bad.log", *lines)
    with pytest.raises(InvalidRequest) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:{number}: ")
    assert words in str(caught.value)


def test_a_cut_last_line_and_pickles(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "v.log"
    path.write_text(f"{GOOD}\n{GOOD[:-5]}")
    with caplog.at_level(logging.WARNING, "radixserve"):
        assert len(read_trace(path)) == 1
    assert "v.log:2: the last line is cut off" in caplog.text
    path.write_bytes(b"\x93\xcb" + bytes(8) + b"\x91\x81\x90\x01\xc0")  # a map with a list as a key
    with pytest.raises(InvalidRequest, match="not a batch of KV events"):
        read_trace(path)
    path.write_bytes(pickle.dumps([("a", {})]))
    with pytest.raises(InvalidRequest, match="a pickle is not read"):
        read_trace(path)


def test_the_command_advises_on_a_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = list(range(100))
    path = write(
        tmp_path / "v.log",
        *(
            GOOD.replace("[1, 2]", str([*shared, 1000 + n])).replace("a details", f"{n} details")
            for n in range(5)
        ),
    )
    assert main(["replay", str(path), "--advise"]) == 0
    assert "the cache that this traffic needs" in capsys.readouterr().out
    assert main(["replay", str(path), "--diagnose"]) == 0
