"""Decoders, their weights, and the sources of weights."""
