"""Parsers for the forms in which models write tool calls."""
