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
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
_THOUGHT = """{%- if message.reasoning_content and loop.index0 > last.at -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
"""
HERMES = QWEN3.replace(_THOUGHT, "")
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
THINKING = QWEN3.replace(
    "{{ '<|assistant|>' }}{%- endif -%}\n", "{{ '<|assistant|><think>\\n' }}{%- endif -%}\n"
)
TEMPLATES = {
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
}


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
