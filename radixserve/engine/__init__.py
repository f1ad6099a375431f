"""Requests in, tokens out: the engine, its thread, and the way of outputs back to callers."""
