"""Publishes a cache's events in vLLM's format over ZeroMQ, for routers. Needs msgspec and pyzmq."""
