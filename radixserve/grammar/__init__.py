"""Structured output: compiles grammars and computes the allowed next tokens."""
