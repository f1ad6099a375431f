"""How the demo model reads a conversation: its special tokens and its chat template."""

from __future__ import annotations

PAD, BOS, EOS = "<|pad|>", "<|begin|>", "<|endoftext|>"
SYSTEM, USER, ASSISTANT, END = "<|system|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL = (PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END)  # their ids are 0, 1, 2, ...
CONTEXT = 4096

# No trimming and no text between the markers: the rendering of a longer history starts with the
# rendering of the shorter one, as text and as tokens, whatever white space the messages hold.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content is iterable -%}
{%- for part in content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- endif -%}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- bos_token -}}
{%- for message in messages -%}
{%- if message.role in ['system', 'developer'] -%}{{ '<|system|>' }}
{%- elif message.role == 'assistant' -%}{{ '<|assistant|>' }}
{%- else -%}{{ '<|user|>' }}
{%- endif -%}
{{- text(message.content) -}}{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|assistant|>' }}{%- endif -%}
"""
