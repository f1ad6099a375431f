"""The engine: requests in, tokens out; its thread, and the way of an answer back to its caller."""
