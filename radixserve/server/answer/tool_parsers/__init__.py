"""Parsers for the formats in which models write tool calls; `tool_styles.py` chooses among them."""
