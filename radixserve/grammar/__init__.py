"""Structured output: compiled grammars, and each answer's position in its grammar."""
