"""Decoders, their weights, and the sources of these."""
