"""Runs one step: input batch, KV pool, forward pass, sampling."""
