"""Formats on the wire: bodies, errors, usage, log-probabilities, server-sent events."""
