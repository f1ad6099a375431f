"""Structured output: compiled grammars, and where each answer stands in its own."""
