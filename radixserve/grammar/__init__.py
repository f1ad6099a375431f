"""Structured output: compiles grammars and computes which tokens may follow in an answer."""
