"""Answers as content, reasoning and calls: whole, and cut into pieces in every way."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the server needs the extra [serve]")

from radixserve.server.answer.content_blocks import ContentBlocks, content_blocks_of
from radixserve.server.answer.output_parser import OutputParser, OutputParserConfig, ParsedAnswer
from radixserve.server.answer.parser_configs import OutputParserConfigs
from radixserve.server.answer.reasoning import THINK, THOUGHTS, shown_thoughts
from radixserve.server.answer.tool_styles import STYLES, shown_style
from radixserve.server.config import REASONING_PARSERS, TOOL_CALL_PARSERS
from radixserve.text.tokenizer import Tokenizer
from tests.server.tool_models import make_model
from tests.server.tool_outputs import DS, DSML, WRITERS, config_of

FORMS = {
    "llama3": config_of("llama3", hidden=("<|python_tag|>",)),
    "mistral": config_of("mistral", hidden=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")),
    "one": config_of("hermes", max_calls=1),
    "think": config_of("hermes", thoughts=THINK),
    "thinking": config_of("hermes", thoughts=THINK, is_thinking=True),
    "think-mistral": config_of("mistral", thoughts=THOUGHTS["mistral"]),
    "think-gemma4": config_of("gemma4", thoughts=THOUGHTS["gemma4"]),
    "thinking-gemma4": OutputParserConfig(thoughts=THOUGHTS["gemma4"], is_thinking=True),
    "plain": OutputParserConfig(),
    "think-qwen3-coder": config_of("qwen3-coder", thoughts=THINK),
    "think-kimi": config_of("kimi", thoughts=THINK),
    "think-minimax": config_of("minimax", thoughts=THINK, is_thinking=True),
    "think-command-r7b": config_of("command-r7b", thoughts=THOUGHTS["command-r7b"]),
    **{name: config_of(name) for name in STYLES if name not in ("llama3", "mistral", "generic")},
}
F: tuple[str, Any] = ("f", {"a": 1})
G: tuple[str, Any] = ("g", {})
HERMES_F = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
HERMES_G = '<tool_call>{"name":"g"}</tool_call>'
ONE_F, ONE_G = '{"name": "f", "arguments": {"a": 1}}', '{"name":"g"}'
DS_CALLS = [
    f"{DS}calls▁begin｜>{'%s'.join(calls)}{DS}calls▁end｜>" % between
    for between, calls in (
        ("\n", [
            f"{DS}call▁begin｜>function{DS}sep｜>{name}\n```json\n{arguments}\n```{DS}call▁end｜>"
            for name, arguments in (("f", '{"a": 1}'), ("g", "{}"))
        ]),
        ("", [
            f"{DS}call▁begin｜>{name}{DS}sep｜>{arguments}{DS}call▁end｜>"
            for name, arguments in (("f", '{"a": 1}'), ("g", "{}"))
        ]),
    )
]  # fmt: skip
KIMI_CALLS = "".join(
    ["<|tool_calls_section_begin|>",
     '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>',
     "<|tool_call_begin|>functions.g:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
     "<|tool_calls_section_end|>"]
)  # fmt: skip


def coder(name: str, **arguments: str) -> str:
    """A call as Qwen3-Coder writes it."""
    each = (f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{''.join(each)}</function>\n</tool_call>"


def gemma4(call: str) -> str:
    return "<|tool_call>call:" + call.replace('"', '<|"|>') + "<tool_call|>"


def lfm2(calls: str) -> str:
    return f"<|tool_call_start|>[{calls}]<|tool_call_end|>"


LLAMA_F = '{"name": "f", "parameters": {"a": 1}}'
DEEP = '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 5_000 + "]" * 5_000 + "}}</tool_call>"

# form, text, content, calls, reasoning
CASES: list[tuple[str, str, str | None, list[tuple[str, Any]], str | None]] = [
    ("plain", " x <think> [TOOL_CALLS] ", " x <think> [TOOL_CALLS] ", [], None),
    ("hermes", "", "", [], None),
    ("hermes", " \n", " \n", [], None),
    ("hermes", "just text < and <tool", "just text < and <tool", [], None),
    ("hermes", HERMES_F, None, [F], None),
    ("hermes", HERMES_F.removesuffix("\n</tool_call>"), None, [F], None),
    ("hermes", f"Look:\n{HERMES_F}\n{HERMES_G}\n", "Look:", [F, G], None),
    ("hermes", f"{HERMES_F} and {HERMES_G} so.", "and so.", [F, G], None),
    ("hermes", f"Write <tool_call> so: {HERMES_G}", "Write <tool_call> so:", [G], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}', None, [F], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}', "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": "f"} and more', "=", [], None),
    ("hermes", '<tool_call>{"name": "f"} </tool', "=", [], None),
    ("hermes", "<tool_call>print(1)</tool_call>", "=", [], None),
    ("hermes", DEEP, "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "}</tool_call>\\"{"}}</tool_call>',
     None, [("f", {"s": '}</tool_call>"{'})], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "a\nb\\\\"}}</tool_call>',
     None, [("f", {"s": "a\nb\\"})], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"s": "\\ud800é"}}</tool_call>',
     None, [("f", {"s": "\ud800é"})], None),
    ("one", f"{HERMES_F}\n{HERMES_G}", None, [F], None),
    ("llama3", LLAMA_F, None, [F], None),
    ("llama3", f" {LLAMA_F}; {LLAMA_F}", None, [F, F], None),
    ("llama3", f"<|python_tag|>{LLAMA_F}", None, [F], None),
    ("llama3", '<|python_tag|>{"name": "h", "parameters": {}}', None, [("h", {})], None),
    ("llama3", f"I call it: <|python_tag|>{LLAMA_F}", "I call it:", [F], None),
    ("llama3", '{"name": "h", "parameters": {}}', "=", [], None),
    ("llama3", f"So: {LLAMA_F}", "=", [], None),
    ("llama3", f"{LLAMA_F} is it", "is it", [F], None),
    ("llama3", '{"name": "f", "parameters": ', "=", [], None),
    ("llama3", '{"answer": [1, 2]}', "=", [], None),
    ("llama3", '<|python_tag|>f.call(a="{")', 'f.call(a="{")', [], None),
    ("mistral", '[TOOL_CALLS][{"name": "f", "arguments": {"a": 1}}, {"name": "g"}]',
     None, [F, G], None),
    ("mistral", 'Yes. [TOOL_CALLS] [{"name": "g"}]', "Yes.", [G], None),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', None, [F, G], None),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]abc[ARGS]{"a": 1}', None, [F], None),
    ("mistral", '[TOOL_CALLS]f{"a": 1}', None, [F], None),
    ("mistral", "[TOOL_CALLS] I will not call it. {}", " I will not call it. {}", [], None),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1', 'f{"a": 1', [], None),
    ("mistral", '[TOOL_CALLS][{"name": "f"}, 5]', '[{"name": "f"}, 5]', [], None),
    ("mistral", "[TOOL_CALLS]", "", [], None),
    ("mistral", "[1, 2] and [TOOL", "[1, 2] and [TOOL", [], None),
    ("think", "<think>\nwhy\n</think>\n\nso", "so", [], "why"),
    ("think", "\n<think>a <think> b</think>c</think>", "c</think>", [], "a <think> b"),
    ("think", f"<think>{HERMES_G}</think>\n{HERMES_F}", None, [F], HERMES_G),
    ("think", "<think>no end\n", None, [], "no end"),
    ("think", "<think>\n\n</think>\n\nso", "so", [], None),
    ("think", "it is <think> in the middle </think>", "=", [], None),
    ("think", " <thin", " <thin", [], None),
    ("thinking", "why</think>so", "so", [], "why"),
    ("thinking", "<think>why\nnot </think> so ", "so ", [], "why\nnot"),
    ("thinking", "why", None, [], "why"),
    ("think-mistral", "[THINK]why [x] not[/THINK]so", "so", [], "why [x] not"),
    ("think-mistral", '[THINK]hm[/THINK][TOOL_CALLS]f[ARGS]{"a": 1}', None, [F], "hm"),
    ("think-mistral", "<think>so</think>", "=", [], None),
    ("think-gemma4", "<|channel>thought\nIt is\nlate.\n<channel|>So.", "So.", [],
     "It is\nlate."),
    ("think-gemma4", "<|channel>thought\n<channel|>So.", "So.", [], None),
    ("think-gemma4", "<|channel>thought\nA call<channel|>" + gemma4("f{a:1}"), None, [F], "A call"),
    ("think-gemma4", "<|channel>thought\nA call\n" + gemma4("f{a:1}") + "so", "so", [F], "A call"),
    ("think-gemma4", "<|channel>thought\nno end <|tool", None, [], "no end <|tool"),
    ("think-gemma4", "<|channel>final\nso", "=", [], None),
    ("think-gemma4", "it is <|channel>thought", "=", [], None),
    ("thinking-gemma4", "why<channel|>so", "so", [], "why"),
    ("thinking-gemma4", "<|channel>thought\nwhy<channel|>so", "so", [], "why"),
    ("granite", f"Well:\n<|tool_call|>[{ONE_F}, {ONE_G}]", "Well:", [F, G], None),
    ("granite", "<|tool_call|>[5]", "=", [], None),
    ("granite", "<|tool_call|>{}", "=", [], None),
    ("deepseek-v3", DS_CALLS[0], None, [F, G], None),
    ("deepseek-v3.1", f"So.{DS_CALLS[1]}", "So.", [F, G], None),
    ("deepseek-v3.1", f'{DS}call▁begin｜>f{DS}sep｜>{{"a"', "=", [], None),
    ("deepseek-v3.1", f"{DS}call▁begin｜>f g{{}} and {DS}call▁begin｜>g{DS}sep｜>{{}}",
     f"{DS}call▁begin｜>f g{{}} and", [G], None),
    ("kimi", KIMI_CALLS, None, [F, G], None),
    ("kimi", "<|tool_call_begin|>functions.f:0{}", "=", [], None),
    ("qwen3-coder", f"I look.\n{coder('f', a='1', s='1 <b>', l='[1, null]')}\n{coder('g')}",
     "I look.", [("f", {"a": 1, "s": "1 <b>", "l": [1, None]}), G], None),
    ("qwen3-coder", coder("f", s="\n x\n\n"), None, [("f", {"s": "\n x\n\n"})], None),
    ("qwen3-coder", coder("f", b="True", o="null", new="5", other="five"), None,
     [("f", {"b": True, "o": None, "new": "5", "other": "five"})], None),
    ("qwen3-coder", coder("f", a="1").removesuffix("\n</tool_call>"), None, [F], None),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1", "=", [], None),
    ("qwen3-coder", "<tool_call>\n<function=f>junk</function>\n</tool_call>", "=", [], None),
    ("qwen3-coder", "<tool_call><function=f><parameter=a>1</parameter><parameter=a>2</parameter>"
     "</function></tool_call>", "=", [], None),
    ("glm", "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>\n"
     "<tool_call>g\n</tool_call>", None, [F, G], None),
    ("glm", "<tool_call>f<arg_key>s</arg_key><arg_value>1</arg_value><arg_key>b</arg_key>"
     "<arg_value>yes</arg_value></tool_call>", None, [("f", {"s": "1", "b": "yes"})], None),
    ("glm", "<tool_call>f(1)</tool_call>", "=", [], None),
    ("gemma4", gemma4("f{a:1}") + gemma4("g{}"), None, [F, G], None),
    ("gemma4", "A" + gemma4('f{s:"x<tool_call|>,{",l:[1,{k:"v"}],b:true,n:null}'), "A",
     [("f", {"s": "x<tool_call|>,{", "l": [1, {"k": "v"}], "b": True, "n": None})], None),
    ("gemma4", gemma4("f{a:}"), "=", [], None),
    ("gemma4", gemma4("f{a 1}"), "=", [], None),
    ("function-gemma", "<start_function_call>call:f{a:1,s:<escape>é<escape>}<end_function_call>",
     None, [("f", {"a": 1, "s": "é"})], None),
    ("lfm2", f"So.{lfm2('f(a=1), g()')} it is", "So.it is", [F, G], None),
    ("lfm2", lfm2('f(a = 1,), g( )'), None, [F, G], None),
    ("lfm2", lfm2(f'{ONE_F}, {ONE_G}'), None, [F, G], None),
    ("lfm2", lfm2(f"f(a=1), {ONE_G}"), None, [F, G], None),
    ("lfm2", lfm2("f(s='it\\'s \\\\ a\\nb', o=\"x'y]\", b=True, "
                  "l=[1, None, {'k': \"v\", \"w\": false}])"),
     None, [("f", {"s": "it's \\ a\nb", "o": "x'y]", "b": True,
                   "l": [1, None, {"k": "v", "w": False}]})], None),
    ("lfm2", lfm2('f(s="""a "b"\nc""", o="\\u00e9\\x41\\q\\ud83d\\ude00")'), None,
     [("f", {"s": 'a "b"\nc', "o": "éA\\q😀"})], None),
    ("lfm2", lfm2("f(s='<|tool_call_end|>')"), None, [("f", {"s": "<|tool_call_end|>"})], None),
    ("lfm2", lfm2("a.b:c-d(max-results=-1.5e3)"), None,
     [("a.b:c-d", {"max-results": -1500.0})], None),
    ("lfm2", lfm2("f(a=1)").removesuffix("<|tool_call_end|>"), None, [F], None),
    ("lfm2", lfm2("f(a=1)").removesuffix("_end|>"), "=", [], None),
    ("lfm2", lfm2("f(1)"), "=", [], None),
    ("lfm2", lfm2("f(a=1, a=2)"), "=", [], None),
    ("lfm2", lfm2("f(a=b)"), "=", [], None),
    ("lfm2", lfm2("f(a=1) g()"), "=", [], None),
    ("lfm2", lfm2("f(a=1e999)"), "=", [], None),
    ("lfm2", lfm2("f(a=" + "[" * 5_000 + "]" * 5_000 + ")"), "=", [], None),
    ("lfm2", "<|tool_call_start|>f(a=1)<|tool_call_end|>", "=", [], None),
    ("lfm2", "<|tool_call_start|>[f(a=1", "=", [], None),
    ("lfm2", "f(a=1) <|tool_call", "=", [], None),
    ("harmony", "<|channel|>analysis<|message|>I think.<|end|><|start|>assistant<|channel|>final"
     "<|message|>So.", "So.", [], "I think."),
    ("harmony", "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant<|channel|>commentary "
     'to=functions.f <|constrain|>json<|message|>{"a": 1}', None, [F], "Hm"),
    ("harmony", ' to=functions.f<|channel|>commentary json<|message|>{"a": 1}<|call|>', None,
     [F], None),
    ("harmony", "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.g"
     "<|channel|>commentary<|message|>{}", "First.", [G], None),
    ("harmony", "<|channel|>commentary to=functions.f<|message|>{", "{", [], None),
    ("harmony", "<|channel|>analysis<|message|>cut", None, [], "cut"),
    # Calls in thoughts that are not closed.
    ("think-qwen3-coder", f"<think>I ask.\n{coder('f', a='1')}", None, [F], "I ask."),
    ("think-qwen3-coder", "<think>I ask.\n<function=g>\n</function>", None, [G], "I ask."),
    ("think-qwen3-coder", f"<think>I ask.\n{coder('f', a='1')}\n{coder('g')} So.", "So.", [F, G],
     "I ask."),
    ("think-qwen3-coder", f"<think>As {coder('g')} shows,</think>{coder('f', a='1')}", None, [F],
     f"As {coder('g')} shows,"),
    ("think-qwen3-coder", f"<think>I ask.{coder('g')}</think>\n", None, [G], "I ask."),
    ("think-qwen3-coder", "<think>Write <tool_call> so.</think>Yes.", "Yes.", [],
     "Write <tool_call> so."),
    ("think-qwen3-coder", "<think>Write <tool_call>\n<function=f>\n<parameter=a>\n1", None, [],
     "Write <tool_call>\n<function=f>\n<parameter=a>\n1"),
    ("think", f"<think>I ask. {HERMES_F} {HERMES_G}", None, [F, G], "I ask."),
    ("think", f"<think>Or {HERMES_F} rather {HERMES_G}?</think>No.", "No.", [],
     f"Or {HERMES_F} rather {HERMES_G}?"),
    ("think-kimi", f"<think>I ask.{KIMI_CALLS}", None, [F, G], "I ask."),
    ("think-kimi", f"<think>I ask.{KIMI_CALLS}</think>So.", "</think>So.", [F, G], "I ask."),
    ("think-mistral", '[THINK]hm[TOOL_CALLS]f[ARGS]{"a": 1}', None, [F], "hm"),
    ("think-minimax", f"I ask.\n{WRITERS['minimax']([F])}", None, [F], "I ask."),
    ("think-command-r7b", "<|START_THINKING|>I ask.<|END_THINKING|>"
     f"{WRITERS['command-r7b']([F, G])}", None, [F, G], "I ask."),
    ("think-command-r7b", "<|START_THINKING|>I ask." + WRITERS["command-r7b"]([F]), None, [F],
     "I ask."),
    ("think-command-r7b", "<|START_RESPONSE|>So.<|END_RESPONSE|>", "So.", [], None),
    # Closing marks that are missing.
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n<parameter=s>\nx\n</parameter>\n"
     "</function>\n</tool_call>", None, [("f", {"a": 1, "s": "x"})], None),
    ("qwen3-coder", "<tool_call><function=f><parameter=a>1<parameter=s>x</function></tool_call>",
     None, [("f", {"a": 1, "s": "x"})], None),
    ("qwen3-coder", f"<tool_call>\n<function=f>\n<parameter=a>\n1\n{coder('g')}", None, [F, G],
     None),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</tool_call>", None, [F], None),
    ("qwen3-coder", "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</tool_call>\nso",
     "so", [F], None),
    ("glm", "<tool_call>f<arg_key>a<arg_value>1<arg_key>s</arg_key><arg_value>x</tool_call>", None,
     [("f", {"a": 1, "s": "x"})], None),
    ("glm", "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value><tool_call>g", None, [F, G],
     None),
    ("minimax", '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">1\n'
     '<parameter name="s">x</invoke></minimax:tool_call>', None, [("f", {"a": 1, "s": "x"})], None),
    ("hermes", f"<tool_call>{ONE_F}{HERMES_G}", None, [F, G], None),
    ("hermes", f'<tool_call>{{"name": "f", "argu {HERMES_G}', '<tool_call>{"name": "f", "argu', [G],
     None),
    ("kimi", KIMI_CALLS.replace("<|tool_call_end|>", ""), None, [F, G], None),
    ("deepseek-v3", DS_CALLS[0].replace(f"{DS}call▁end｜>", ""), None, [F, G], None),
    ("gemma4", gemma4("f{a:1}").removesuffix("<tool_call|>") + gemma4("g{}"), None, [F, G], None),
    ("olmo3", "<function_calls>\nf(a=1)\ng()", None, [F, G], None),
    ("nemotron", f"<TOOLCALL>[{ONE_F}]<TOOLCALL>[{ONE_G}]", None, [F, G], None),
    # Opening marks that are missing, or doubled.
    ("qwen3-coder", "So.\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", "So.", [F],
     None),
    ("qwen3-coder", "<function=g>\n</function>\n</tool_call>", None, [G], None),
    ("qwen3-coder", "<function=h>\n</function>", "=", [], None),
    ("qwen3-coder", f"<tool_call>\n{coder('g')}</tool_call>", None, [G], None),
    ("qwen3-coder", coder("f", a="1").replace("<parameter=a>", "<parameter=a>\n<parameter=a>"),
     None, [F], None),
    ("hermes", f"<tool_call>\n{HERMES_G}</tool_call> so", "so", [G], None),
    ("hermes", "Write <tool_call><tool_call> so", "=", [], None),
    ("minimax", 'So. <invoke name="g">\n</invoke>', "So.", [G], None),
    ("minimax", '<invoke name="h">\n</invoke>', "=", [], None),
    ("minimax", '<minimax:tool_call><invoke name="g"></invoke><invoke name="h"></invoke>'
     "</minimax:tool_call>", None, [G, ("h", {})], None),
    ("glm", "So.\nf<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "So.", [F], None),
    ("glm", "leaf<arg_key>a</arg_key>", "=", [], None),
    ("mistral", 'So. f[ARGS]{"a": 1}', "So.", [F], None),
    ("mistral", 'leaf[ARGS]{"a": 1}', 'leaf{"a": 1}', [], None),
    ("mistral", '[TOOL_CALLS][TOOL_CALLS]f[ARGS]{"a": 1}', None, [F], None),
    ("kimi", 'functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>', None, [F], None),
    ("kimi", "functions.f: see there", "=", [], None),
    ("deepseek-v3.1", f'f{DS}sep｜>{{"a": 1}}{DS}call▁end｜>', None, [F], None),
    ("deepseek-v3", f'function{DS}sep｜>f\n```json\n{{"a": 1}}\n```', None, [F], None),
    ("gemma4", "call:f{a:1}<tool_call|>", None, [F], None),
    ("gemma4", "call:h{a:1}", "=", [], None),
    # Values that hold marks as text.
    ("qwen3-coder", coder("f", s="a </parameter> b <parameter=k> </function> </tool_call> c"), None,
     [("f", {"s": "a </parameter> b <parameter=k> </function> </tool_call> c"})], None),
    ("qwen3-coder", coder("f", s="<tool_call> <function=h>"), None,
     [("f", {"s": "<tool_call> <function=h>"})], None),
    ("minimax", WRITERS["minimax"]([("f", {"s": "<invoke name= </parameter> é"})]), None,
     [("f", {"s": "<invoke name= </parameter> é"})], None),
    ("olmo3", WRITERS["olmo3"]([("f", {"s": "</function_calls> ("})]), None,
     [("f", {"s": "</function_calls> ("})], None),
    ("harmony", WRITERS["harmony"]([("f", {"s": "<|call|> <|end|>"})]), None,
     [("f", {"s": "<|call|> <|end|>"})], None),
    ("kimi", WRITERS["kimi"]([("f", {"s": "<|tool_call_begin|>"})]), None,
     [("f", {"s": "<|tool_call_begin|>"})], None),
    # Nothing of a call is lost.
    ("kimi", KIMI_CALLS.replace("<|tool_call_end|>", " more ", 1), "more", [F, G], None),
    ("hermes", '<tool_call>{"name": "f", "city": "Rome"}</tool_call>', "=", [], None),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "=", [],
     None),
    ("gemma4", gemma4("f{a:1,a:2}"), "=", [], None),
    ("hermes", '<tool_call>{"type": "function", "name": "f", "arguments": "{\\"a\\": 1}"}'
     "</tool_call>", None, [F], None),
    # MiniMax M2, DeepSeek V3.2, Command R, Olmo 3, Nemotron, Hunyuan.
    *((style, f"So.\n{WRITERS[style]([F, G])}", "So.", [F, G], None)
      for style in ("minimax", "command-r", "command-r7b", "olmo3", "nemotron", "hunyuan")),
    ("deepseek-v3.2", f'So.\n\n<{DSML}function_calls>\n<{DSML}invoke name="f">\n'
     f'<{DSML}parameter name="a" string="false">1</{DSML}parameter>\n'
     f'<{DSML}parameter name="b" string="true">true</{DSML}parameter>\n</{DSML}invoke>\n'
     f'<{DSML}invoke name="h">\n</{DSML}invoke>\n</{DSML}function_calls>', "So.",
     [("f", {"a": 1, "b": "true"}), ("h", {})], None),
    ("minimax", WRITERS["minimax"]([("f", {"b": True, "o": None, "l": [1, {"x": "<y>"}]})]), None,
     [("f", {"b": True, "o": None, "l": [1, {"x": "<y>"}]})], None),
    ("olmo3", "<function_calls>\nf(b=true, o=null, l=[None, False])\n</function_calls>", None,
     [("f", {"b": True, "o": None, "l": [None, False]})], None),
    ("olmo3", "<function_calls>\nJust text.\n</function_calls>", "=", [], None),
    ("hunyuan", "<answer>\nSo.\n</answer>", "\nSo.\n", [], None),
    # Recipients that are no tool.
    ("harmony", '<|channel|>commentary to=bash<|message|>{"cmd": "ls"}', None,
     [("bash", {"cmd": "ls"})], None),
    ("harmony", '<|channel|>commentary to=f<|message|>{"a": 1}<|call|>', None, [F], None),
    ("harmony", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", None, [],
     "print(1)"),
    ("harmony", "<|channel|>commentary to=bash<|message|>{", None, [], "{"),
    ("harmony", "<|channel|>final to=user<|message|>So.", "So.", [], None),
    ("harmony", "<|channel|>analysis<|message|>Hm<|channel|>final<|message|>So.", "So.", [], "Hm"),
    ("harmony", "<|channel|>final So.<|return|>", "So.", [], None),
    ("harmony", "<|channel|><|channel|>final<|message|><|message|>So.", "So.", [], None),
    ("harmony", "no channel at all <|message|>", "no channel at all <|message|>", [], None),
    ("harmony", "<|channel|>fin", "", [], None),
]  # fmt: skip


def parse(form: str, pieces: list[str]) -> tuple[ParsedAnswer, ParsedAnswer]:
    """What the deltas add up to, and what the parser says that it returned."""
    parser = OutputParser(FORMS[form])
    deltas = [parser.feed(piece) for piece in pieces]
    deltas.append(parser.finish())
    calls: dict[int, list[str]] = {}
    for delta in deltas:
        for call in delta.tool_calls:
            if call.index not in calls:
                assert call.name
                calls[call.index] = [call.id or "", call.name, call.arguments]
            else:
                assert (call.id, call.name) == (None, None)
                calls[call.index][2] += call.arguments
    found = [tuple(calls[index]) for index in range(len(calls))]
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    whole = parser.answer()
    streamed = ContentBlocks()
    for delta in deltas:
        list(streamed.push(delta))
    shown = [(part.kind, part.index, part.text, part.name) for part in streamed.blocks]
    assert shown == [
        (part.kind, part.index, part.text, part.name) for part in content_blocks_of(whole)
    ]
    assert [tuple(call) for call in whole.tool_calls] == found
    assert (whole.content or "", whole.reasoning or "") == (content, reasoning)
    return whole, parser.answer()


def check(case: Any, pieces: list[str]) -> None:
    form, text, content, calls, reasoning = case
    found, _ = parse(form, pieces)
    assert found.content == (text if content == "=" else content)
    assert found.reasoning == reasoning
    assert [(call.name, json.loads(call.arguments)) for call in found.tool_calls] == calls
    for call in found.tool_calls:
        json.dumps(call.arguments).encode()
        call.arguments.encode()


def test_text_stays_where_it_is_among_calls() -> None:
    found, _ = parse("hermes", [f"One: {HERMES_F} two: {HERMES_G} three."])
    assert [(part.kind, part.text) for part in content_blocks_of(found)] == [
        ("text", "One:"),
        ("tool_call", '{"a": 1}'),
        ("text", " two:"),
        ("tool_call", "{}"),
        ("text", " three."),
    ]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_an_answer(case: Any) -> None:
    """Whole, letter by letter, and in random pieces."""
    text = case[1]
    check(case, [text])
    check(case, list(text))
    rng = random.Random(text)
    for _ in range(20 if len(text) < 500 else 1):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(0, 6)))
        check(case, [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)])


def test_nothing_is_held_that_is_surely_no_call() -> None:
    parser = OutputParser(FORMS["hermes"])
    assert parser.feed("a < b").content == "a < b"
    assert parser.feed(" <tool").content == ""
    assert parser.feed("box>").content == " <toolbox>"
    parser = OutputParser(FORMS["llama3"])
    assert parser.feed("Hello {").content == "Hello {"


@pytest.mark.parametrize("form", sorted(FORMS))
def test_random_texts_lose_nothing(form: str) -> None:
    """However a text of tags, brackets and letters is cut, the answer is the same."""
    rng = random.Random(form)
    words = ["<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<think>",
             "</think>", "{", "}", "[", "]", '"', "\\", " ", "\n", "f", LLAMA_F, HERMES_G, ";",
             '{"name": "f"}', "<", "[", *STYLES["harmony"].marks,
             *(STYLES[form].marks * 2 if form in STYLES else ()),
             "<function=f>", "</function>", "<parameter=a>", "</parameter>", "call:f", "to=",
             "functions.f", "json", *THOUGHTS["mistral"][:2], *THOUGHTS["gemma4"][:2], "thought",
             "(", ")", "a=", "'", "f()"]  # fmt: skip
    for _ in range(300):
        text = "".join(rng.choices(words, k=rng.randint(1, 12)))
        whole, _ = parse(form, [text])
        pieces = []
        rest = text
        while rest:
            size = rng.randint(1, 9)
            pieces.append(rest[:size])
            rest = rest[size:]
        found, _ = parse(form, pieces)
        assert found[:2] == whole[:2]
        assert [call[1:] for call in found.tool_calls] == [call[1:] for call in whole.tool_calls]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('<tool_call>\n{"name": ..., "arguments": ...}\n</tool_call>', "hermes"),
        ("<tool_call>\n<function=f>\n<parameter=a>", "qwen3-coder"),
        ("<tool_call>{name}\n<arg_key>", "glm"),
        (f"{DS}calls▁begin｜>{DS}call▁begin｜>function ```json", "deepseek-v3"),
        (f"{DS}calls▁begin｜>{DS}call▁begin｜>", "deepseek-v3.1"),
        ("<|tool_calls_section_begin|>", "kimi"),
        ("<|tool_call|>[", "granite"),
        ("<minimax:tool_call>", "minimax"),
        ('{% set dsml = "｜DSML｜" %}<function_calls>', "deepseek-v3.2"),
        ("<|START_ACTION|>", "command-r7b"),
        ("Action: ```json tool_name", "command-r"),
        ("<function_calls></function_calls>", "olmo3"),
        ("<TOOLCALL>[", "nemotron"),
        ("<tool_calls>[", "hunyuan"),
        ("<|tool_call>call:<tool_call|>", "gemma4"),
        ("<start_function_call>call:", "function-gemma"),
        ("<|tool_call_start|>[ ]<|tool_call_end|>", "lfm2"),
        ("<|channel|>final<|message|>", "harmony"),
        ("[TOOL_CALLS] [ARGS]", "mistral-args"),
        ('{{ \'<|start_header_id|>\' }} {"name": , "parameters": }', "llama3"),
        ('<|header_start|> {"name": , "parameters": }', "llama3"),
        ("<|python_tag|>", "llama3"),
        ("[TOOL_CALLS]", "mistral"),
        ("{{ message.content }}", "generic"),
    ],
)
def test_the_parser_that_a_template_shows(text: str, name: str) -> None:
    assert shown_style(text) == name


def test_the_styles_of_calls_are_the_settings_choices() -> None:
    assert {*STYLES, "auto", "none"} == set(TOOL_CALL_PARSERS)
    assert {*THOUGHTS, "auto", "none"} == set(REASONING_PARSERS)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("{{ '<|channel>thought\\n' + text + '\\n<channel|>' }}", "gemma4"),
        ("{{ '[THINK]' + block['thinking'] + '[/THINK]' }}", "mistral"),
        ("{{ content.split('</think>')[-1] }}", "think"),
        ("<|START_THINKING|>", "command-r7b"),
        ("<|channel|>analysis<|message|>", "none"),
        ("{{ message.content }}", "none"),
    ],
)
def test_the_reasoning_that_a_template_shows(text: str, name: str) -> None:
    assert shown_thoughts(text) == name


@pytest.mark.parametrize(
    ("style", "tool_parser", "choice"),
    [
        ("granite33", "granite", "granite (the form of the chat template)"),
        ("command-r7b", "command-r7b", "command-r7b (the form of the chat template)"),
        ("generic", "generic", "generic (the chat template leaves out tools, calls or results)"),
        ("unknown", "generic", "generic (the chat template's own form is not known)"),
        ("other", "generic", "generic (the chat template's calls are not in the form hermes)"),
    ],
)
def test_the_choice_and_its_reason(
    tmp_path: Path, style: str, tool_parser: str, choice: str
) -> None:
    changes = {"unknown": ("tool_call>", "tool_use>"), "other": ('{"name": ', '{"call": ')}
    folder = make_model(tmp_path, "hermes" if style in changes else style)
    if style in changes:
        file = folder / "chat_template.jinja"
        file.write_text(file.read_text().replace(*changes[style]))
    tokenizer = Tokenizer.load(folder)
    configs = OutputParserConfigs(tokenizer, "auto", "auto")
    assert (configs.tool_parser, configs.choice) == (tool_parser, choice)
    assert OutputParserConfigs(tokenizer, "llama3", "auto").choice == "llama3"
