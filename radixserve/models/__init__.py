"""Decoders, their weights, and where these come from."""
