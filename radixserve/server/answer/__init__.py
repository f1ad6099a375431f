"""Parses generated text into content, reasoning and tool calls.

`OutputParser` parses one answer. `tool_styles.py` has a parser and a grammar for the tool calls of
each family of models, `reasoning.py` the marks around reasoning.
"""
