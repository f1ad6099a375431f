"""The demo model with chat templates in the style of models that call tools."""

from __future__ import annotations

from pathlib import Path

DEMO = Path(__file__).parents[2] / "radixserve" / "models" / "demo"

# Tools in the system prompt, calls between tags, results in a turn of the user's, all of one round
# together. What was thought is told again only after the last question.
QWEN3 = """{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>' -}}
{%- if messages[0].role == 'system' -%}{{ messages[0].content + '\\n' }}{%- endif -%}
{{- '<tools>' -}}
{%- for tool in tools -%}{{ '\\n' }}{{ tool | tojson }}{%- endfor -%}
{{- '\\n</tools> <tool_call>\\n{"name": N, "arguments": A}\\n</tool_call><|end|>' -}}
{%- elif messages[0].role == 'system' -%}
{{- '<|system|>' + messages[0].content + '<|end|>' -}}
{%- endif -%}
{%- set last = namespace(at=-1) -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{%- set last.at = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<|user|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' -}}
{%- if message.reasoning_content and loop.index0 > last.at -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{%- if message.content or not loop.first -%}{{ '\\n' }}{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' -%}{{ '<|user|>' }}{%- endif -%}
{{- '<tool_response>\\n' + message.content + '\\n</tool_response>' -}}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' -%}{{ '<|end|>' }}{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}
{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}{%- endif -%}
"""
_NO_THOUGHT = """{%- if enable_thinking is defined and not enable_thinking -%}
{{- '<think>\\n\\n</think>\\n\\n' -}}
{%- endif -%}"""
_THOUGHT = """{%- if message.reasoning_content and loop.index0 > last.at -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
"""
HERMES = QWEN3.replace(_THOUGHT, "").replace(_NO_THOUGHT, "")
# Tools in front of the first question, one call a turn as plain JSON, results as JSON texts.
LLAMA3 = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '<|system|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'user' -%}
{{- '<|user|>' -}}
{%- if tools and not messages[:loop.index0] | selectattr('role', 'equalto', 'user') | list -%}
{{- 'Answer with {"name": function, "parameters": arguments}, built in: <|python_tag|>\\n' -}}
{%- for tool in tools -%}{{ tool | tojson(indent=4) + '\\n' }}{%- endfor -%}
{%- endif -%}
{{- message.content + '<|end|>' -}}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length != 1 -%}{{ raise_exception('one call at a time') }}{%- endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|assistant|>{"name": "' + call.name + '", "parameters": ' -}}
{{- call.arguments | tojson -}}
{{- '}<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + message.content + '<|end|>' -}}
{%- else -%}
{{- '<|user|>' + message.content | tojson + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
_MISTRAL = """{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '<|user|>' + message.content + '\\n\\n' -}}
{%- elif message.role == 'user' -%}
{%- if tools and loop.first -%}{{ '[AVAILABLE_TOOLS]' + tools | tojson }}{%- endif -%}
{{- '<|user|>' + message.content + '<|end|>' -}}
{%- elif message.tool_calls -%}
{{- '<|assistant|>' + message.content -}}
CALLS
{{- '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + message.content + '<|end|>' -}}
{%- else -%}
{%- if message.tool_call_id | length != 9 -%}{{ raise_exception('nine letters') }}{%- endif -%}
{{- '<|user|>[TOOL_RESULTS]' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
MISTRAL = _MISTRAL.replace(
    "CALLS",
    """{{- '[TOOL_CALLS] [' -}}
{%- for call in message.tool_calls -%}
{{- '{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson -}}
{{- ', "id": "' + call.id + '"}' -}}
{%- if not loop.last -%}{{ ', ' }}{%- endif -%}
{%- endfor -%}
{{- ']' -}}""",
)
MISTRAL_ARGS = _MISTRAL.replace(
    "CALLS",
    """{%- for call in message.tool_calls -%}
{{- '[TOOL_CALLS]' + call.function.name + '[ARGS]' + call.function.arguments | tojson -}}
{%- endfor -%}""",
)
# Reasoning is opened in the prompt.
THINKING = QWEN3.replace(_NO_THOUGHT, "").replace(
    "{{ '<|assistant|>' }}\n{%- endif -%}\n", "{{ '<|assistant|><think>\\n' }}{%- endif -%}\n"
)
# Turns as the demo model knows them; each family's own tools, calls and results.
_FAMILY = """{{- bos_token -}}
{%- if tools -%}<|system|>TOOLS<|end|>{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '<|system|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'user' -%}
{{- '<|user|>' + message.content + '<|end|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|assistant|>' + message.content -}}
{%- if message.tool_calls -%}CALLS{%- endif -%}
{{- '<|end|>' -}}
{%- else -%}
{{- '<|user|>RESULT' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
_JSON_TOOLS = "{%- for tool in tools -%}{{ tool | tojson }}{%- endfor -%}"
_EACH = "{%- for call in message.tool_calls -%}BODY{%- endfor -%}"
_NAME, _ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"


def _family(calls: str, result: str, tools: str = _JSON_TOOLS) -> str:
    template = _FAMILY.replace("TOOLS", tools).replace("RESULT", result)
    return template.replace("CALLS", calls)


def _each(body: str) -> str:
    return _EACH.replace("BODY", body)


_LINE = "{{ '\\n' }}"  # a line break behind a block, which Jinja takes away otherwise
_VALUE = "{{ value if value is string else value | tojson }}"
CODER = _family(
    _each(
        "{{ '\\n' if message.content or not loop.first }}<tool_call>\n<function=" + _NAME + ">\n"
        "{%- for key, value in call.function.arguments.items() -%}" + _LINE
        + "<parameter={{ key }}>" + _LINE + _VALUE + "\n</parameter>{%- endfor -%}" + _LINE
        + "</function>\n</tool_call>"
    ),
    "<tool_response>",
)  # fmt: skip
GLM = _family(
    _each(
        "{{ '\\n' if message.content or not loop.first }}<tool_call>" + _NAME
        + "{%- for key, value in call.function.arguments.items() -%}" + _LINE
        + "<arg_key>{{ key }}</arg_key>\n<arg_value>" + _VALUE + "</arg_value>{%- endfor -%}"
        + _LINE + "</tool_call>"
    ),
    "<|observation|>",
)  # fmt: skip
_DS = "<｜tool▁"
DEEPSEEK_V3 = _family(
    _DS + "calls▁begin｜>" + _each(
        "{{ '' if loop.first else '\\n' }}" + _DS + "call▁begin｜>function" + _DS + "sep｜>" + _NAME
        + "\n```json\n" + _ARGUMENTS + "\n```" + _DS + "call▁end｜>"
    ) + _DS + "calls▁end｜>",
    _DS + "output▁begin｜>",
)  # fmt: skip
DEEPSEEK_V31 = _family(
    _DS + "calls▁begin｜>" + _each(
        _DS + "call▁begin｜>" + _NAME + _DS + "sep｜>" + _ARGUMENTS + _DS + "call▁end｜>"
    ) + _DS + "calls▁end｜>",
    _DS + "output▁begin｜>",
)  # fmt: skip
KIMI = _family(
    "<|tool_calls_section_begin|>" + _each(
        "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>" + _ARGUMENTS
        + "<|tool_call_end|>"
    ) + "<|tool_calls_section_end|>",
    "## Return of ",
)  # fmt: skip
GRANITE = _family(
    "<|tool_call|>[" + _each(
        '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}{{ '' if loop.last else ', ' }}"
    ) + "]",
    "<|tool_response|>",
)  # fmt: skip


def _gemma(opening: str, closing: str, quote: str) -> str:
    """Members in the order of their names."""
    value = (
        "{%- macro text(v) -%}{%- if v is string -%}" + quote + "{{ v }}" + quote
        + "{%- else -%}{{ v | tojson }}{%- endif -%}{%- endmacro -%}"
    )  # fmt: skip
    call = (
        opening + "call:" + _NAME + "{{ '{' }}{%- for key, v in call.function.arguments | dictsort "
        "-%}{{ key }}:{{ text(v) }}{{ '' if loop.last else ',' }}{%- endfor -%}{{ '}' }}" + closing
    )  # fmt: skip
    return value + _family(_each(call), "response:")


# Calls as a list of Python's.
LFM2 = """{%- macro literal(value) -%}
{%- if value is string -%}
{{- "'" + value.replace('\\\\', '\\\\\\\\').replace("'", "\\\\'").replace('\\n', '\\\\n') + "'" -}}
{%- elif value is boolean or value is none or value is number -%}{{ value }}
{%- else -%}{{ value | tojson }}
{%- endif -%}
{%- endmacro -%}
""" + _family(
    "<|tool_call_start|>[" + _each(
        _NAME + "({%- for key, value in call.function.arguments.items() -%}{{ key }}="
        "{{ literal(value) }}{{ '' if loop.last else ', ' }}{%- endfor -%})"
        "{{ '' if loop.last else ', ' }}"
    ) + "]<|tool_call_end|>",
    "",
).replace("<|system|>", "<|user|>")  # fmt: skip
_OLMO = "{{ key }}={{ literal(value) if value is string else value | tojson }}"
OLMO3 = LFM2[: LFM2.index("{%- endmacro -%}") + 17] + _family(
    "<function_calls>{{ '\\n' }}" + _each(
        _NAME + "({%- for key, value in call.function.arguments.items() -%}" + _OLMO
        + "{{ '' if loop.last else ', ' }}{%- endfor -%})" + _LINE
    ) + "</function_calls>",
    "",
)  # fmt: skip
MINIMAX = _family(
    "{{ '\\n' }}<minimax:tool_call>" + _LINE + _each(
        '<invoke name="' + _NAME + '">' + _LINE
        + "{%- for key, value in call.function.arguments.items() -%}"
        '<parameter name="{{ key }}">' + _VALUE + "</parameter>" + _LINE + "{%- endfor -%}"
        "</invoke>" + _LINE
    ) + "</minimax:tool_call>",
    "<response>",
)  # fmt: skip
_DSML = "｜DSML｜"
DEEPSEEK_V32 = _family(
    "{{ '\\n\\n' }}<" + _DSML + "function_calls>" + _LINE + _each(
        "<" + _DSML + 'invoke name="' + _NAME + '">' + _LINE
        + "{%- for key, value in call.function.arguments.items() -%}"
        "<" + _DSML + 'parameter name="{{ key }}" string="{{ \'true\' if value is string else '
        "'false' }}\">" + _VALUE + "</" + _DSML + "parameter>" + _LINE + "{%- endfor -%}"
        "</" + _DSML + "invoke>" + _LINE
    ) + "</" + _DSML + "function_calls>",
    "<result>",
)  # fmt: skip
_OBJECTS = _each(
    '{"name": "' + _NAME + '", "arguments": ' + _ARGUMENTS + "}{{ '' if loop.last else ', ' }}"
)
NEMOTRON = _family("<TOOLCALL>[" + _OBJECTS + "]</TOOLCALL>", "<TOOL_RESPONSE>")
HUNYUAN = _family("<tool_calls>[" + _OBJECTS + "]</tool_calls>", "<tool_response>")
COMMAND_R = _family(
    "{{ '\\n' }}Action:\n```json\n[" + _LINE + _each(
        '    {"tool_name": "' + _NAME + '", "parameters": ' + _ARGUMENTS
        + "}{{ '' if loop.last else ',' }}" + _LINE
    ) + "]```" + _LINE,
    "<results>",
)  # fmt: skip
COMMAND_R7B = _family(
    "<|START_ACTION|>[" + _LINE + _each(
        '    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "' + _NAME + '", "parameters": '
        + _ARGUMENTS + "}{{ '' if loop.last else ',' }}" + _LINE
    ) + "]<|END_ACTION|>",
    "<|START_TOOL_RESULT|>",
)  # fmt: skip
# Results have a role of their own, calls have no place.
GRANITE33 = _FAMILY.replace("TOOLS", "Call with <|tool_call|>" + _JSON_TOOLS)
GRANITE33 = GRANITE33.replace("RESULT", "tool: ")
GRANITE33 = GRANITE33.replace("{%- if message.tool_calls -%}CALLS{%- endif -%}\n", "")
# What was thought before a call stays in the turn, until the next question.
GEMMA4_THINKING = _gemma("<|tool_call>", "<tool_call|>", '<|"|>')
_BEFORE = "{{- '<|assistant|>' + message.content -}}"
assert _BEFORE in GEMMA4_THINKING
GEMMA4_THINKING = GEMMA4_THINKING.replace("<|system|>", "<|user|>").replace(
    _BEFORE,
    """{{- '<|assistant|>' -}}
{%- set later = messages[loop.index0:] | selectattr('role', 'equalto', 'user') | list -%}
{%- if message.reasoning_content and message.tool_calls and not later -%}
{{- '<|channel>thought\\n' + message.reasoning_content + '\\n<channel|>' -}}
{%- endif -%}
{{- message.content -}}""",
)
# Thoughts are blocks of the content.
MINISTRAL = MISTRAL_ARGS
for _text in ("'<|assistant|>' + message.content -}}", "'<|assistant|>' + message.content + "):
    assert _text in MINISTRAL
    MINISTRAL = MINISTRAL.replace(_text, _text.replace("message.content", "said(message.content)"))
MINISTRAL = (
    """{%- macro said(content) -%}
{%- if content is string -%}{{ content }}
{%- else -%}
{%- for block in content -%}
{{- '[THINK]' + block.thinking + '[/THINK]' if block.type == 'thinking' else block.text -}}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
"""
    + MINISTRAL
)
# Channels; thoughts stay between a call and its results.
HARMONY = """{{- bos_token -}}
{%- macro turn(role, text) -%}
{{- '<|start|>' + role + '<|message|>' + text + '<|end|>' -}}
{%- endmacro -%}
{{- turn('system', 'Channels: <|channel|>') -}}
{%- set dev = namespace(text='') -%}
{%- if messages[0].role in ['system', 'developer'] -%}
{%- set dev.text = messages[0].content -%}{%- set messages = messages[1:] -%}
{%- endif -%}
{%- if dev.text or tools -%}
{%- for tool in tools or [] -%}{%- set dev.text = dev.text + tool | tojson -%}{%- endfor -%}
{{- turn('developer', dev.text) -}}
{%- endif -%}
{%- set last = namespace(name='') -%}
{%- for message in messages -%}
{%- if message.role == 'user' -%}{{ turn('user', message.content) }}
{%- elif message.role == 'tool' -%}
{{- '<|start|>functions.' + last.name + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- message.content | tojson + '<|end|>' -}}
{%- elif message.tool_calls -%}
{%- if message.reasoning_content -%}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' -}}
{%- endif -%}
{%- set last.name = message.tool_calls[0].function.name -%}
{{- '<|start|>assistant to=functions.' + last.name + '<|channel|>commentary json<|message|>' -}}
{{- message.tool_calls[0].function.arguments | tojson + '<|call|>' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content + '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|start|>assistant' }}{%- endif -%}
"""
# Another family's turns and nothing about tools.
PLAIN = _FAMILY.replace("TOOLS", "").replace("{%- if message.tool_calls -%}CALLS{%- endif -%}", "")
PLAIN = PLAIN.replace("{%- if tools -%}<|system|><|end|>{%- endif -%}\n", "").replace("RESULT", "")
PLAIN = PLAIN.replace("{%- else -%}", "{%- elif message.role == 'none' -%}")
TEMPLATES = {
    "qwen3-coder": CODER,
    "glm": GLM,
    "deepseek-v3": DEEPSEEK_V3,
    "deepseek-v3.1": DEEPSEEK_V31,
    "kimi": KIMI,
    "granite": GRANITE,
    "granite33": GRANITE33,
    "minimax": MINIMAX,
    "deepseek-v3.2": DEEPSEEK_V32,
    "nemotron": NEMOTRON,
    "hunyuan": HUNYUAN,
    "command-r": COMMAND_R,
    "command-r7b": COMMAND_R7B,
    "olmo3": OLMO3,
    "gemma4": _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    "lfm2": LFM2,
    "gemma4-thinking": GEMMA4_THINKING,
    "ministral": MINISTRAL,
    "harmony": HARMONY,
    "generic": PLAIN,
    "hermes": HERMES,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "mistral-args": MISTRAL_ARGS,
    "thinking": THINKING,
}
# Tokens that the demo model has no other use for become the marks, which are special tokens there.
_MARKS = {
    "llama3": {"<|pad|>": "<|python_tag|>"},
    "mistral": {"<|pad|>": "[TOOL_CALLS]"},
    "mistral-args": {"<|pad|>": "[TOOL_CALLS]", "<|system|>": "[ARGS]"},
    "deepseek-v3.1": {"<|pad|>": "<｜tool▁call▁begin｜>"},
    "kimi": {"<|pad|>": "<|tool_calls_section_begin|>"},
    "granite33": {"<|pad|>": "<|tool_call|>"},
    "deepseek-v3.2": {"<|pad|>": "｜DSML｜"},
    "minimax": {"<|pad|>": "<minimax:tool_call>", "<|system|>": "</minimax:tool_call>"},
    "command-r7b": {"<|pad|>": "<|START_ACTION|>", "<|system|>": "<|END_ACTION|>"},
    "gemma4": {"<|pad|>": '<|\\"|>'},
    "lfm2": {"<|pad|>": "<|tool_call_start|>", "<|system|>": "<|tool_call_end|>"},
    "gemma4-thinking": {"<|pad|>": "<|channel>", "<|system|>": "<channel|>"},
    "ministral": {"<|pad|>": "[THINK]", "<|system|>": "[/THINK]"},
    "harmony": {"<|end|>": "<|call|>", "<|endoftext|>": "<|return|>", "<|assistant|>": "<|end|>",
                "<|pad|>": "<|start|>", "<|system|>": "<|channel|>", "<|user|>": "<|message|>"},
}  # fmt: skip


assert "<think>" not in HERMES


def make_model(folder: Path, style: str) -> Path:
    """A checkpoint folder: the demo model's weights, another chat template."""
    for file in DEMO.iterdir():
        if file.name in ("tokenizer.json", "tokenizer_config.json"):
            text = file.read_text(encoding="utf-8")
            for old, new in _MARKS.get(style, {}).items():
                assert old in text
                text = text.replace(f'"{old}"', f'"{new}"')
            (folder / file.name).write_text(text, encoding="utf-8")
        elif file.name == "chat_template.jinja":
            (folder / file.name).write_text(TEMPLATES[style], encoding="utf-8")
        else:
            (folder / file.name).symlink_to(file)
    return folder
